"""Which rows handed a tensor on, in the order in which they left it."""

from __future__ import annotations

from gradtrace_analyzer.diff.difference import Difference
from gradtrace_analyzer.diff.origins.dataflow import Dataflow, RowTensors, TensorId, row_keys
from gradtrace_analyzer.diff.origins.producers import Producers
from support.synthetic_runs.differences import call, changed, node

# What a row received and left: (baseline, candidate) of tensors with four elements.
Moves = tuple[Difference, list[tuple[int, int]], list[tuple[int, int]]]


def producers(*moves: Moves, exceeding: bool = False) -> Producers:
    """All rows have been gone through but the last; their vertices are 10, 11 and so on."""
    rows: dict[str, dict[tuple[object, ...], RowTensors]] = {"baseline": {}, "candidate": {}}
    for order, (d, arrived, left) in enumerate(moves):
        for n, side in enumerate(("baseline", "candidate")):
            came, went = (tuple(TensorId(4, t[n]) for t in ts) for ts in (arrived, left))
            rows[side][row_keys(d)[n]] = RowTensors(order, came, went)
    found = Producers(Dataflow(rows), exceeding=exceeding)
    for n, (d, *_) in enumerate(moves[:-1]):
        found.add_outputs(10 + n, d)
    return found


A, B, C = (node("m", n) for n in (1, 2, 3))


def test_source_is_the_row_which_the_same_tensor_left_on_both_sides() -> None:
    known = producers((A, [], [(7, 8)]), (B, [], [(5, 6)]), (C, [(5, 6)], []))
    assert known.producers_of(C) == [11]


def test_every_row_that_left_the_tensor_is_a_source() -> None:
    known = producers((A, [], [(5, 6)]), (B, [], [(5, 6)]), (C, [(5, 6)], []))
    assert known.producers_of(C) == [10, 11]


def test_nothing_is_told_unless_all_that_came_in_was_left_by_a_row() -> None:
    known = producers((A, [], [(5, 6)]), (B, [], []), (C, [(5, 6), (1, 2)], []))
    assert known.producers_of(C) == []


def test_tensor_of_another_pass_is_no_source() -> None:
    before = node("m", 1, backward_index=1)
    assert producers((before, [], [(5, 6)]), (C, [(5, 6)], [])).producers_of(C) == []


def test_tensor_that_is_equal_moves_nothing() -> None:
    assert producers((A, [], [(5, 5)]), (C, [(5, 5)], [])).producers_of(C) == []


def test_tensor_that_left_equal_and_came_otherwise_was_changed_on_the_way() -> None:
    same = node("m", 1, writes=None)
    assert producers((same, [], [(5, 5)]), (C, [(5, 6)], [])).is_changed_on_the_way(C)


def test_tensor_that_a_differing_row_left_was_not_changed_on_the_way() -> None:
    assert not producers((A, [], [(5, 5)]), (C, [(5, 6)], [])).is_changed_on_the_way(C)
    within = node("m", 1, writes=changed(1e-9))  # less than rounding
    assert not producers((within, [], [(5, 5)]), (C, [(5, 6)], [])).is_changed_on_the_way(C)
    assert producers(
        (within, [], [(5, 5)]), (C, [(5, 6)], []), exceeding=True
    ).is_changed_on_the_way(C)


def test_gradient_that_was_zero_before_may_be_part_of_a_sum() -> None:
    same = node("m", 1, writes=None)
    known = producers((same, [], [(5, 5)]), (B, [], [(0, 3)]), (C, [(5, 6)], []))
    assert not known.is_changed_on_the_way(C)


def test_calls_hand_on_within_the_forward() -> None:
    first, second = call("a", 1), call("b", 2, reads=changed())
    assert producers((first, [], [(5, 6)]), (second, [(5, 6)], [])).producers_of(second) == [10]
