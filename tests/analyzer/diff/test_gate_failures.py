"""Which links of an answer reach a gate, with what error and where."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gradtrace_analyzer.diff.answer import Answer
from gradtrace_analyzer.diff.code.structure import OneSided
from gradtrace_analyzer.diff.gate import Gate, GateFailure, exit_status, gate_failures
from gradtrace_analyzer.diff.origin import ClipOrigin, FailureOrigin, RngOrigin
from gradtrace_analyzer.diff.verdict import Verdict
from gradtrace_analyzer.failures.failed_passes import OneSidedFailure
from support.synthetic_runs.differences import call, changed, cover, gradient

ANY, CLIP = Gate("any", 0.1), Gate("clip", 0.1)


def answer(verdict: Verdict = "different", **more: Any) -> Answer:
    return Answer(verdict, "", more.pop("origins", ()), (), cover(), **more)


def entry(
    link: str,
    error: float | None,
    *,
    rank: int = 0,
    step: int = 2,
    unmeasured: int = 0,
    place: str | None = "w",
) -> dict[str, Any]:
    return {
        "link": link,
        "rank": rank,
        "first_step": step,
        "largest_error": error,
        "unmeasured_count": unmeasured,
        "place": place,
    }


def numbers(found: dict[str, GateFailure]) -> dict[str, tuple[Any, ...]]:
    return {link: (f.error, f.step, f.ranks, f.place) for link, f in found.items()}


def test_link_fails_from_its_threshold_on() -> None:
    spread = (entry("clip", 0.1), entry("forward", 0.5))
    assert numbers(gate_failures(answer(spread=spread), [CLIP])) == {"clip": (0.1, 2, (0,), "w")}
    assert gate_failures(answer(spread=spread), [Gate("clip", 0.11)]) == {}
    assert list(gate_failures(answer(spread=spread), [ANY])) == [
        "forward",
        "clip",
    ]  # in the order of the chain


def test_ranks_of_one_link_are_one_entry_with_the_worst_error_and_the_first_place() -> None:
    spread = (
        entry("clip", 0.25, rank=1, step=5, place="late"),
        entry("clip", 0.5, rank=0, step=7),
        entry("clip", 0.2, rank=2, step=3, place="early"),
    )
    assert numbers(gate_failures(answer(spread=spread), [CLIP])) == {
        "clip": (0.5, 3, (0, 1, 2), "early")
    }
    nameless = (entry("clip", 0.25, step=1, place=None), entry("clip", 0.5, rank=1))
    assert numbers(gate_failures(answer(spread=nameless), [CLIP])) == {
        "clip": (0.5, 1, (0, 1), "w")
    }


def test_value_without_a_number_fails_at_any_threshold() -> None:
    spread = (entry("clip", 0.2, unmeasured=1), entry("loss", None))
    found = gate_failures(answer(spread=spread), [Gate("any", 1e9)])
    assert numbers(found) == {"clip": (None, 2, (0,), "w")}


def test_configuration_fails_only_where_it_is_asked_for_and_changes_numbers() -> None:
    entries = [
        {"name": "git_commit", "changes_numbers": False},
        {"name": "torch", "changes_numbers": True},
    ]
    given = answer(configuration=tuple(entries))
    assert numbers(gate_failures(given, [Gate("configuration", 0.0)])) == {
        "configuration": (None, None, (), "torch")
    }
    assert gate_failures(given, [Gate("any", 0.0)]) == {}


@pytest.mark.parametrize(
    ("lone", "gate", "fails"),
    [
        (OneSided("node", "A", "candidate"), "any", True),
        (OneSided("node", "A", "candidate", is_code=True), "any", False),
        (OneSided("node", "A", "candidate", is_code=True), "structure", True),
        (OneSided("module", "m", "candidate", is_code=True, holds={"parameters": 1}), "any", True),
    ],
)
def test_other_code_for_the_same_numbers_is_no_difference_of_values(
    lone: OneSided, gate: str, fails: bool
) -> None:
    assert bool(gate_failures(answer(structure=(lone,)), [Gate(gate, 1e9)])) == fails


def test_factor_of_an_origin_is_known_exactly() -> None:
    d = gradient("w", 1, "final", step=4)
    scaled = ClipOrigin(d, (1,), None, changed(factor=1.25))
    found = gate_failures(answer(spread=(entry("clip", 0.12),), origins=(scaled,)), [CLIP])
    assert numbers(found) == {"clip": (0.25, 2, (0, 1), "w")}
    plain = replace(scaled, change=changed(0.5))  # its error is an estimate, which the spread has
    assert gate_failures(answer(origins=(plain,)), [CLIP]) == {}


def test_failure_and_generator_fail_without_a_number() -> None:
    d = call("m", 1, step=4)
    failure = OneSidedFailure(0, 4, 0, {"node_name": "A"})
    failed = FailureOrigin(replace(d, table="failures"), (0,), "m", failure=failure)
    moved = RngOrigin(d, (0,), "m")
    found = gate_failures(answer(origins=(failed, moved)), [Gate("any", 1e9)])
    assert numbers(found) == {"rng": (None, 4, (0,), "m"), "backward": (None, 4, (0,), "m")}


def test_exit_status_says_whether_anything_failed_or_nothing_can_be_told() -> None:
    spread = (entry("clip", 0.5),)
    found = gate_failures(answer(spread=spread), [CLIP])
    assert exit_status(answer(spread=spread), found) == 1
    assert exit_status(answer(spread=spread), {}) == 0
    cannot = answer("incomparable", spread=spread)
    assert gate_failures(cannot, [CLIP]) == {} and exit_status(cannot, {}) == 2
