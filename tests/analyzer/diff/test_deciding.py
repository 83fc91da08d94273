"""From two runs to the verdict and its origins: which step is searched, and why."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from gradtrace_analyzer.diff.comparison import comparison_of
from gradtrace_analyzer.diff.deciding import Outcome, outcome_of
from gradtrace_analyzer.diff.judging import judged
from gradtrace_analyzer.diff.scope.question import Question
from gradtrace_analyzer.diff.scoping import scope_of
from gradtrace_analyzer.diff.tolerances.judgement import Judgement
from gradtrace_analyzer.runs.opening import open_run
from gradtrace_analyzer.sql.views import connect_pair
from support.synthetic_runs.builder import build_run
from support.synthetic_runs.layer_chain import layered_run


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layered_run(tmp_path_factory.mktemp("runs") / "a")


def outcome(a: Path, b: Path, **asked: Any) -> Outcome:
    runs = {"baseline": open_run(a), "candidate": open_run(b)}
    question = Question(**asked)
    with contextlib.closing(connect_pair(*runs.values())) as connection:
        scope = scope_of(connection, runs, question)
        judgement = Judgement(connection, runs, exact=question.exact)
        comparison = comparison_of(connection, scope, judged(connection, scope, judgement))
        assert comparison.reader(0) is comparison.reader(0)
        return outcome_of(comparison)


def places(found: Outcome) -> list[tuple[int, str | None]]:
    return [(o.step, o.module_fqn) for o in found.origins]


def test_same_runs_are_identical(baseline: Path) -> None:
    found = outcome(baseline, baseline)
    assert found == Outcome(found.decision) and found.decision.verdict == "identical"


def test_rounding_from_the_start_is_within_tolerance_and_bits_decide_where_asked(
    baseline: Path, tmp_path: Path
) -> None:
    b = layered_run(tmp_path / "b", forward=1e-7, backward=1e-7)
    found = outcome(baseline, b)
    assert found.decision.verdict == "within_tolerance" and found.origins
    exact = outcome(baseline, b, exact=True)
    assert (exact.decision.verdict, exact.decision.place) == ("different", "first")
    assert places(exact)[0][0] == 0


def test_fault_behind_rounding_is_looked_for_in_the_first_step_beyond(
    baseline: Path, tmp_path: Path
) -> None:
    b = layered_run(tmp_path / "b", outputs={(2, "layer2"): 0.1}, forward=1e-7, backward=1e-7)
    found = outcome(baseline, b)
    assert (found.decision.verdict, found.decision.place) == ("different", "beyond")
    assert places(found)[0] == (2, "layer2")
    assert found.first_bits is not None and found.first_bits.step == 0


def test_equal_steps_before_a_difference_prove_that_its_bits_decide(
    baseline: Path, tmp_path: Path
) -> None:
    b = layered_run(tmp_path / "b", outputs={(1, "layer1"): 1e-7})
    found = outcome(baseline, b)
    assert (found.decision.place, places(found)) == ("first", [(1, "layer1")])
    # A side whose kernels may round otherwise proves nothing.
    other = layered_run(
        tmp_path / "c", outputs={(1, "layer1"): 1e-7}, environment={"torch": "2.12.0"}
    )
    assert outcome(baseline, other).decision.verdict == "within_tolerance"


def test_runs_without_a_common_step_cannot_be_compared(baseline: Path, tmp_path: Path) -> None:
    b = build_run(tmp_path / "b", {"steps": [{"step": 50}]})
    found = outcome(baseline, b)
    assert (
        found.decision.verdict == "incomparable" and "no step was recorded" in found.decision.reason
    )
