"""Forwards from which no gradient came back: a metric, a shape that was tried out."""

from __future__ import annotations

from typing import Any

from gradtrace_analyzer.diff.origins.unused_forwards import unused_forwards
from support.synthetic_runs.differences import started

Event = tuple[str, dict[str, Any]]


def stretches(*events: Event) -> dict[int, list[tuple[float, float]]]:
    """The stretches of a step of rank 0 with these events, which take the places 0, 1 and so on."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for place, (table, row) in enumerate(events):
        rows.setdefault(table, []).append({"record_index": 100 + place, **row})
    return unused_forwards(started(rows), 0)


def called(fqn: str, call_index: int = 0, depth: int = 0, **more: Any) -> Event:
    key = {"root": 0, "module_fqn": fqn, "call_index": call_index, "depth": depth}
    return "module_calls", {**key, "phase": "forward", **more}


def ran(fqn: str, call_index: int = 0, backward_index: int = 0, **more: Any) -> Event:
    key = {"root": 0, "module_fqn": fqn, "call_index": call_index, "node_name": "A"}
    return "node_events", {**key, "backward_index": backward_index, **more}


def went(backward_index: int = 0, kind: str = "backward") -> Event:
    return "backward_passes", {"backward_index": backward_index, "kind": kind}


def test_forward_whose_nodes_ran_is_used() -> None:
    assert stretches(called("a", depth=1), called(""), ran("a"), went()) == {}


def test_forward_without_nodes_is_unused_with_all_that_is_in_it() -> None:
    inner, outer = called("a", depth=1), called("")
    second = (called("a", 1, depth=1), called("", 1), ran("a", 1), went())
    assert stretches(inner, outer, *second) == {0: [(0.0, 1.0)]}


def test_forward_behind_a_backward_pass_begins_after_it() -> None:
    assert stretches(called(""), ran(""), went(), called("", 1)) == {0: [(2.5, 3.0)]}


def test_gradients_that_were_asked_for_by_themselves_use_no_forward() -> None:
    """`autograd.grad` gives no parameter a gradient: what it ran belongs to the unused stretch."""
    probe = (called(""), ran(""), went(kind="grad"))
    trained = (called("", 1), ran("", 1, 1), went(1))
    assert stretches(*probe, *trained) == {0: [(0.0, 2.0)]}
    assert stretches(*trained, *probe) == {0: [(2.5, 5.0)]}


def test_gradient_pass_after_a_used_forward_is_no_part_of_an_unused_one() -> None:
    used = (called(""), ran(""), went())
    assert stretches(*used, went(1, "grad"), called("", 1)) == {0: [(3.5, 4.0)]}


def test_pass_of_something_else_ends_what_is_unused() -> None:
    assert stretches(called(""), went(), went(1, "grad")) == {0: [(0.0, 0.0)]}


def test_call_is_used_by_a_later_pass_unless_the_same_call_was_made_again_before_it() -> None:
    first, again = called("", microbatch=0), called("", microbatch=1)
    assert stretches(first, ran("", microbatch=1), went()) == {}
    # The Nodes of microbatch 1 are those of its own call.
    assert stretches(first, again, ran("", microbatch=1), went()) == {0: [(0.0, 0.0)]}
