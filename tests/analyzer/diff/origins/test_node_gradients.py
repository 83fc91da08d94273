"""The single gradients into or out of a Node, held against each other by position."""

from __future__ import annotations

from typing import Any

from gradtrace_analyzer.diff.difference import Change
from gradtrace_analyzer.diff.origins.node_gradients import node_gradients
from support.synthetic_runs.builder import summary_columns
from support.synthetic_runs.differences import changed, node, views

AT = {"step": 3, "backward_index": 1}


def side(event_index: int, values: dict[int, float], count: int | None = None) -> dict[str, Any]:
    """A Node of which these gradients, by position, are known; one more row is of another Node."""
    tensors = [
        {**AT, "event_index": index, "direction": way, "position": p, **summary_columns([v, 1.0], "", 4)}
        for index, way, offset in (
            (event_index, "grad_input", 0), (event_index, "grad_output", 5), (8, "grad_input", 9)
        )
        for p, v in ((p, v + offset) for p, v in values.items())
    ]  # fmt: skip
    counts = {"grad_input_count": len(values) if count is None else count, "grad_output_count": 1}
    nodes = [{**AT, "event_index": event_index, "node_name": "A", **counts}]
    return {"node_events": nodes, "node_tensors": tensors}


NODE = node("m", 0, step=3, backward_index=1, event_indices=(2, 4), writes=changed(tolerance=0.25))


def gradients(a: dict[str, Any], b: dict[str, Any]) -> tuple[list[Change | None], int, int]:
    return node_gradients(views(a, b), NODE, "grad_input")


def test_gradients_are_told_by_position_and_what_nobody_recorded_is_none() -> None:
    found, before, after = gradients(side(2, {0: 1.0, 2: 3.0}), side(4, {0: 1.0, 2: 6.0}))
    assert (before, after) == (2, 2)
    equal, missing, apart = found
    assert equal is not None and apart is not None and missing is None
    assert (equal.differs, apart.differs) == (False, True)
    assert apart.candidate is not None and apart.candidate["abs_max"] == 6.0
    assert apart.tolerance == 0.25


def test_other_counts_on_both_sides_are_told_and_nothing_is_held_against_each_other() -> None:
    assert gradients(side(2, {0: 1.0}), side(4, {0: 1.0, 1: 2.0})) == ([], 1, 2)


def test_node_that_one_side_lacks_has_no_gradients() -> None:
    assert gradients(side(2, {0: 1.0}), side(5, {0: 1.0})) == ([], 0, 0)
