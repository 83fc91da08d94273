"""Nodes that a pass of one side alone ran again, and received a multiple of what came before."""

from __future__ import annotations

from typing import Any

import pytest

from gradtrace_analyzer.diff.explanations.rerun_nodes import RerunNode, repeated
from support.synthetic_runs.builder import summary_columns
from support.synthetic_runs.differences import Row, Rows, paired

STEP = 2


def ran(backward_index: int, autograd_seq: int, times: float = 1.0, **more: Any) -> Row:
    """A Node of a graph that is kept; its number in the graph is also its name and what arrives at it."""
    return {
        "step": STEP,
        "backward_index": backward_index,
        "event_index": autograd_seq,
        "autograd_seq": autograd_seq,
        "node_name": f"N{autograd_seq}",
        "root": 0,
        "module_fqn": "m",
        "call_index": 0,
        "thread": 1,
        **summary_columns([times * (1 + autograd_seq), 2 * times, -times], "grad_output_", 4),
        **more,
    }


def side(*nodes: Row, passes: int = 1, parent: int | None = None) -> Rows:
    rows: list[Row] = [
        {"step": STEP, "backward_index": n, "kind": "backward", "parent_backward_index": parent if n else None}
        for n in range(passes)
    ]  # fmt: skip
    return {"backward_passes": rows, "node_events": nodes}


ONCE = side(ran(0, 1), ran(0, 2), ran(0, 3))
FIRST = (ran(0, 1), ran(0, 2), ran(0, 3))


def found(a: Rows, b: Rows) -> list[RerunNode]:
    return repeated(paired(a, b), STEP)


@pytest.mark.parametrize("name", ["candidate", "baseline"])
def test_first_node_that_receives_a_multiple_is_told_with_those_that_receive_the_same(
    name: str,
) -> None:
    """The pass runs three Nodes again: one receives the same, two receive twice as much."""
    twice = side(*FIRST, ran(1, 1), ran(1, 2, 2.0), ran(1, 3, 2.0), passes=2)
    [node] = found(ONCE, twice) if name == "candidate" else found(twice, ONCE)
    assert (node.side, node.step, node.rank, node.before, node.backward_index) == (
        name,
        STEP,
        0,
        0,
        1,
    )
    assert (node.node_name, node.module_fqn, node.equal_count) == ("N2", "m", 1)
    assert node.times == pytest.approx(2.0)


@pytest.mark.parametrize(
    "again",
    [
        (ran(1, 1, 2.0), ran(1, 2, 2.0)),  # the whole pass is scaled: no path was counted twice
        (ran(1, 1), ran(1, 2)),  # everything is the same
        (ran(1, 1), ran(1, 2, 2.0, thread=9)),  # another thread numbers its own Nodes
        (ran(1, 1), ran(1, 2, 2.0, node_name="Other")),
        (
            ran(1, 1),
            {**ran(1, 2, 2.0), "autograd_seq": 7},
        ),  # another of that name: it did not run before
    ],
)
def test_no_node_is_told_without_a_multiple_beside_an_equal(again: tuple[Row, ...]) -> None:
    assert found(ONCE, side(*FIRST, *again, passes=2)) == []


def test_pass_inside_another_is_no_repetition() -> None:
    nested = side(*FIRST, ran(1, 1), ran(1, 2, 2.0), passes=2, parent=0)
    assert found(ONCE, nested) == []


def test_pass_that_both_sides_made_is_no_repetition() -> None:
    twice = side(*FIRST, ran(1, 1), ran(1, 2, 2.0), passes=2)
    assert found(twice, twice) == []
