"""What a step holds besides its differences: modules, roots, points, the ranks whose tensors are followed."""

from __future__ import annotations

from typing import Any

import pytest

import gradtrace_analyzer.diff.origins.step_reader as step_reader
from gradtrace_analyzer.diff.origins.step_reader import StepReader
from gradtrace_analyzer.diff.scope.selection import Selection
from support.synthetic_runs.differences import call, cover, gradient, node, started


def called(fqn: str, of_class: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "root": 0,
        "module_fqn": fqn,
        "phase": "forward",
        "call_index": 0,
        "module_class": of_class,
        "output_numel": 1,
        "output_fingerprint": 1,
        **more,
    }


BASELINE: dict[str, list[dict[str, Any]]] = {
    "module_calls": [
        called("", "Net"),
        called("a.b", "Dropout"),
        called("c", "SyncBatchNorm"),
        called("", "Critic", root=1),
        called("a", step=1),
        called("", "Net", rank=1),
        called("d", rank=2),
    ],
    "gradients": [
        {"root": 0, "parameter_fqn": "w", "backward_index": 0, "point": point} for point in ("local", "final")
    ],
}  # fmt: skip
CANDIDATE = {
    "module_calls": [*BASELINE["module_calls"][:-1], called("", "Other"), called("e")],
    "gradients": [row | {"step": step} for row in BASELINE["gradients"] for step in (0, 1)][1:],
}


@pytest.fixture(scope="module")
def here() -> StepReader:
    return StepReader(started(BASELINE, CANDIDATE), cover(), 0)


def test_modules_are_those_of_the_step_on_ranks_that_both_sides_have(here: StepReader) -> None:
    assert here.modules() == {(0, ""), (0, "a.b"), (0, "c"), (1, "")}


def test_modules_that_nobody_asked_for_are_left_out() -> None:
    chosen = cover(selection=Selection(modules=("a*",)))
    assert StepReader(started(BASELINE), chosen, 0).modules() == {(0, "a.b")}


def test_root_is_named_by_its_class_the_first_by_name_where_sides_differ(
    here: StepReader,
) -> None:
    assert here.roots() == {0: "Net", 1: "Critic"}


def test_what_a_step_tells_of_its_modules_is_by_their_classes(here: StepReader) -> None:
    facts = here.step_facts([gradient("w", 1)], [3])
    assert (facts.random, facts.collective) == ({(0, "a.b")}, {(0, "c")})
    assert (facts.disturbed, facts.is_whole, facts.is_filtered) == ({3}, True, False)


def test_only_ranks_that_differ_in_what_they_compute_are_followed(
    here: StepReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {0: [call("a.b", 1)], 1: [gradient("w", 1)], 2: [node("d", 1)]}
    assert {place[1] for place in here.dataflow(rows).rows["baseline"]} == {0, 2}
    monkeypatch.setattr(step_reader, "MOST_RANKS", 1)
    assert {place[1] for place in here.dataflow(rows).rows["baseline"]} == {0}
