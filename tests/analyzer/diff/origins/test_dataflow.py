"""What left one row and came into another, by fingerprints; and how rows of the tables are read for that."""

from __future__ import annotations

from typing import Any

import pytest

from gradtrace_analyzer.diff.difference import Difference
from gradtrace_analyzer.diff.origins.dataflow import (
    Dataflow,
    RowKey,
    RowTensors,
    TensorId,
    TensorPair,
    dataflow,
    row_keys,
)
from support.synthetic_runs.differences import call, given, node, views


def tensors(text: str) -> tuple[TensorId | None, ...]:
    """`4:7 4:8 -`: size and fingerprint; `-` of one that is not known."""
    found = []
    for word in text.split():
        numel, _, fingerprint = word.partition(":")
        found.append(None if word == "-" else TensorId(int(numel), int(fingerprint)))
    return tuple(found)


def row(order: int, arrived: str = "", left: str = "") -> RowTensors:
    return RowTensors(order, tensors(arrived), tensors(left))


def of(*pairs: tuple[Difference, RowTensors, RowTensors]) -> Dataflow:
    """What these rows received and left, in the baseline and in the candidate."""
    by_side: dict[str, dict[RowKey, RowTensors]] = {"baseline": {}, "candidate": {}}
    for d, a, b in pairs:
        by_side["baseline"][row_keys(d)[0]] = a
        by_side["candidate"][row_keys(d)[1]] = b
    return Dataflow(by_side)


A, B = node("m", 1), node("m", 2, event_indices=(2, 3))


def test_tensors_that_are_not_the_same_have_moved() -> None:
    known = of((A, row(1, "4:7 4:8 2:1 -", "4:5"), row(1, "4:7 4:9 3:2 4:1", "4:6")))
    assert known.arrived(A) == [TensorPair(4, 8, 9)]  # of one size and known on both sides
    assert known.left(A) == [TensorPair(4, 5, 6)]


def test_other_count_of_tensors_tells_nothing() -> None:
    assert of((A, row(1, "4:7"), row(1, "4:8 4:9"))).arrived(A) == []


def test_row_that_one_side_lacks_tells_nothing() -> None:
    assert Dataflow().arrived(A) == []


def test_node_lies_at_its_number_on_each_side() -> None:
    known = of((B, row(2, "4:1"), row(2, "4:2")))
    assert known.arrived(B) == [TensorPair(4, 1, 2)]
    other = node("m", 2, event_indices=(2, 4))
    assert known.arrived(other) == []


@pytest.mark.parametrize(
    ("source", "target", "is_changed"),
    [
        (("4:7", "4:7"), ("4:7", "4:9"), True),  # it left equal and came in otherwise
        (("4:6", "4:6"), ("4:7", "4:9"), False),  # the baseline's came from elsewhere
        (("4:7", "4:9"), ("4:7", "4:9"), False),  # the candidate handed on what it had
        (("2:7", "2:7"), ("4:7", "4:9"), False),  # another size
        (("4:0", "4:0"), ("4:0", "4:9"), False),  # zeros: any row may have left them
        (("4:7", "4:7"), ("4:7", "4:7"), False),  # nothing differs
    ],
)
def test_tensor_is_changed_on_the_way_where_the_baseline_hands_on_what_the_candidate_does_not(
    source: tuple[str, str], target: tuple[str, str], is_changed: bool
) -> None:
    known = of(
        (A, row(1, "", source[0]), row(1, "", source[1])),
        (B, row(2, target[0]), row(2, target[1])),
    )
    assert known.changed_on_the_way(B, set()) == is_changed


def test_tensor_of_a_row_that_differs_itself_was_not_changed_on_the_way() -> None:
    known = of((A, row(1, "", "4:7"), row(1, "", "4:7")), (B, row(2, "4:7"), row(2, "4:9")))
    assert not known.changed_on_the_way(B, {row_keys(A)[0]})


def test_row_cannot_have_received_what_a_later_one_left() -> None:
    known = of((A, row(5, "", "4:7"), row(5, "", "4:7")), (B, row(2, "4:7"), row(2, "4:9")))
    assert not known.changed_on_the_way(B, set())


@pytest.mark.parametrize(
    "other", [node("m", 1, backward_index=1), node("m", 1, rank=1), call("m", 1)]
)
def test_tensors_move_within_a_pass_or_within_the_forward_of_a_rank(other: Difference) -> None:
    known = of((other, row(1, "", "4:7"), row(1, "", "4:7")), (B, row(2, "4:7"), row(2, "4:9")))
    assert not known.changed_on_the_way(B, set())


def test_input_may_be_what_a_call_received() -> None:
    x, first = given(1), call("m", 2)
    known = of((x, row(1, "", "4:7"), row(1, "", "4:7")), (first, row(2, "4:7"), row(2, "4:9")))
    assert known.changed_on_the_way(first, set())


def test_every_tensor_must_have_been_changed_on_the_way() -> None:
    known = of((A, row(1, "", "4:7"), row(1, "", "4:7")), (B, row(2, "4:7 4:3"), row(2, "4:9 4:5")))
    assert not known.changed_on_the_way(B, set())


def test_rows_are_read_of_the_ranks_and_the_step_that_are_asked_for() -> None:
    def nodes(value: int) -> list[dict[str, Any]]:
        at = {"backward_index": 0, "event_index": 0, "root": 0, "module_fqn": "m", "node_name": "A"}
        sizes = {"grad_output_numel": 4, "grad_input_numel": 2}
        bits = {"grad_output_fingerprint": value, "grad_input_fingerprint": value + 1}
        return [{**at, **sizes, **bits, "rank": r, "step": s} for r in (0, 1) for s in (0, 1)]

    def tensors_of(value: int) -> list[dict[str, Any]]:
        at = {"step": 1, "backward_index": 0, "event_index": 0, "direction": "grad_input"}
        return [{**at, "position": p, "numel": 1, "fingerprint": value + p} for p in (1, 0)]

    calls = [
        {
            "step": 1,
            "root": 0,
            "module_fqn": "m",
            "phase": "forward",
            "call_index": 0,
            "input_numel": 4,
            "input_fingerprint": 1,
            "output_numel": 4,
        }
    ]
    inputs = [{"step": 1, "root": 0, "call_index": 0, "name": "x", "numel": 4, "fingerprint": 1}]
    connection = views(
        {"node_events": nodes(10), "node_tensors": tensors_of(20), "module_calls": calls, "inputs": inputs},
        {"node_events": nodes(30), "node_tensors": tensors_of(40), "module_calls": calls, "inputs": inputs},
    )  # fmt: skip
    known = dataflow(connection, 1, [0], nodes=True)
    assert set(known.rows["baseline"]) == {
        ("node", 0, 0, 0),
        ("module_calls", 0, 0, 0, "m", "forward", 0),
        ("inputs", 0, 0, 0, 0, "x"),
    }
    # Several gradients by position, one by itself; a call without a fingerprint left nothing that is known.
    assert known.rows["candidate"]["node", 0, 0, 0].left == tensors("1:40 1:41")
    assert known.rows["candidate"]["node", 0, 0, 0].arrived == tensors("4:30")
    of_call = known.call("baseline", 0, 0, 0, "m", call_index=0)
    assert of_call is not None and (of_call.arrived, of_call.left) == (tensors("4:1"), (None,))
    assert known.rows["baseline"]["inputs", 0, 0, 0, 0, "x"].left == tensors("4:1")
    without = dataflow(connection, 1, [0, 1], nodes=False)
    assert not any(place[0] == "node" for place in without.rows["baseline"])
