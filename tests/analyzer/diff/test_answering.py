"""What an answer holds beside its origins, and where it is left out."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from gradtrace_analyzer.diff.answer import Answer
from gradtrace_analyzer.diff.answering import answer_of
from gradtrace_analyzer.diff.compare import compare
from gradtrace_analyzer.diff.comparison import comparison_of
from gradtrace_analyzer.diff.deciding import Outcome, outcome_of
from gradtrace_analyzer.diff.judging import judged
from gradtrace_analyzer.diff.scope.question import Question
from gradtrace_analyzer.diff.scope.step_alignment import StepAlignment
from gradtrace_analyzer.diff.scoping import scope_of
from gradtrace_analyzer.diff.tolerances.judgement import Judgement
from gradtrace_analyzer.diff.verdict import Decision
from gradtrace_analyzer.runs.opening import open_run
from gradtrace_analyzer.sql.views import connect_pair
from support.synthetic_runs.builder import build_run, summary_columns
from support.synthetic_runs.layer_chain import layered_run


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layered_run(tmp_path_factory.mktemp("runs") / "a")


def told(a: Path, b: Path, outcome: Outcome | None = None) -> Answer:
    """The answer of an outcome of these runs; of their own where none is given."""
    runs = {"baseline": open_run(a), "candidate": open_run(b)}
    with contextlib.closing(connect_pair(*runs.values())) as connection:
        scope = scope_of(connection, runs, Question())
        found = judged(connection, scope, Judgement(connection, runs))
        comparison = comparison_of(connection, scope, found)
        return answer_of(comparison, outcome or outcome_of(comparison))


def test_outcome_is_told_as_it_was_decided(baseline: Path, tmp_path: Path) -> None:
    b = layered_run(tmp_path / "b", outputs={(1, "layer1"): 0.5})
    assert told(baseline, b).verdict == "different"
    refused = told(baseline, b, Outcome(Decision("incomparable", "why")))
    assert (refused.verdict, refused.reason, refused.origins) == ("incomparable", "why", ())
    assert not refused.equal and not refused.explanations and refused.spread


def test_chain_is_read_where_it_was_asked_for(baseline: Path, tmp_path: Path) -> None:
    b = open_run(layered_run(tmp_path / "b", outputs={(1, "layer1"): 0.5}))
    plain = compare(open_run(baseline), b)
    assert not plain.chain and plain.equal["links"] and plain.spread
    [*rows] = compare(open_run(baseline), b, with_chain=True).chain
    assert rows


def test_what_agrees_has_neither_origins_nor_what_stands_around_them(baseline: Path) -> None:
    run = open_run(baseline)
    found = compare(run, run)
    assert found.verdict == "identical" and not found.origins and not found.equal
    assert found.notes == ("Both sides are the same recording: it was compared with itself.",)


def numbered(path: Path, *values: tuple[int, float]) -> Path:
    """A run of one parameter, by step."""
    rows = [
        {"step": step, "root": 0, "parameter_fqn": "w", "point": "before", "kind": "parameter",
         **summary_columns([value])}
        for step, value in values
    ]  # fmt: skip
    return build_run(path, {"parameters": rows})


def test_runs_whose_steps_are_numbered_apart_get_the_hint_that_pairs_them(tmp_path: Path) -> None:
    a = open_run(numbered(tmp_path / "a", (50, 1.0), (51, 2.0)))
    b = open_run(numbered(tmp_path / "b", (7, 1.0), (8, 2.0)))
    found = compare(a, b)
    assert found.verdict == "incomparable"
    [note] = found.notes
    assert isinstance(note, str) and note.endswith("--align-steps offset=43 pairs them.")
    assert compare(a, b, aligned=StepAlignment(2)).notes == ()
