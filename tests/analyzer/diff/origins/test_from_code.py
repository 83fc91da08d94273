"""Which differences of a step follow from changed code, and which have another cause."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from gradtrace_analyzer.diff.code.structure import OneSided, Structure
from gradtrace_analyzer.diff.difference import Difference
from gradtrace_analyzer.diff.origins.from_code import origin_of_code, split_by_code
from support.synthetic_runs.differences import (
    bucket,
    call,
    changed,
    given,
    gradient,
    group,
    loss,
    node,
    parameter,
)

READS = {"reads": changed()}
LAYER = OneSided("module", "extra", "candidate", "extra", is_code=True)
WITH_WEIGHTS = OneSided(
    "module", "extra", "candidate", "extra", is_code=True, holds={"parameters": 2}
)


def others(
    *rows: Difference,
    lone: OneSided = LAYER,
    at: float | None = 10.0,
    touched: Collection[str | None] = ("extra", ""),
    trained: Collection[str | None] = (),
    rng: Collection[int] = (),
    exceeding: bool = False,
    is_proven: bool = False,
) -> list[int]:
    """The places in the arguments of the rows that have another cause; changed code begins at 10, inside `extra`."""
    places = {} if at is None else {(0, 0): at}
    structure = Structure((lone,), places, frozenset(touched), frozenset(trained))
    found = split_by_code(rows, structure, rng, exceeding=exceeding, is_proven=is_proven)
    assert len(found.others) + len(found.following) == len(rows)
    return [n for n, d in enumerate(rows) if any(d is o for o in found.others)]


def test_what_reads_otherwise_behind_the_changed_code_follows_from_it() -> None:
    rows = [call("before", 5, **READS), call("after", 15, **READS), gradient("w", 30)]
    assert others(*rows) == [0]


def test_fault_of_a_module_that_reads_the_same_has_another_cause_unless_its_code_changed() -> None:
    rows = [call("after", 15), call("extra", 16), node("after", 20), node("extra", 21)]
    assert others(*rows) == [0, 2]


def test_node_of_a_module_whose_call_follows_does_so_too() -> None:
    rows = [call("after", 15, **READS), node("after", 20), node("other", 21)]
    assert others(*rows) == [2]


def test_node_outside_any_module_has_saved_what_the_model_gave() -> None:
    assert others(node(None, 20, root=None)) == []
    assert others(node(None, 5, root=None)) == [0]


def test_everything_behind_a_row_that_follows_may_follow_too() -> None:
    """Places on the two sides are not the same: what follows shows that the changed code has run."""
    rows = [call("extra", 5), call("b", 6, **READS), gradient("w", 7)]
    assert others(*rows, at=10.0) == []
    assert others(*rows[1:], at=10.0) == [0, 1]


def test_what_happened_on_one_side_alone_never_follows() -> None:
    assert others(call("after", 15, only_in="candidate"), loss(30, only_in="baseline")) == [0, 1]


def test_inputs_never_follow() -> None:
    assert others(given(15)) == [0]


@pytest.mark.parametrize(("lone", "found"), [(LAYER, [0, 1]), (WITH_WEIGHTS, [])])
def test_only_another_model_has_other_parameters_or_groups(
    lone: OneSided, found: list[int]
) -> None:
    """Weights that one side alone has take random numbers: those made after them are others."""
    rows = [parameter("w", 0), group(30, parameter_fqns=(["w"], ["w", "extra.w"]))]
    assert others(*rows, lone=lone) == found
    rate = group(31, learning_rate=(0.1, 0.2), parameter_fqns=(["w"], ["w", "extra.w"]))
    assert others(rate, lone=lone) == [0]


def test_other_random_numbers_explain_a_call_but_no_constant_factor() -> None:
    draws = [call("dropout", 5), call("scaled", 6, writes=changed(factor=2.0))]
    assert others(*draws, lone=WITH_WEIGHTS, rng={0}) == [1]
    assert others(*draws, lone=WITH_WEIGHTS) == [0, 1]  # the generators stood where they should
    assert others(*draws, lone=LAYER, rng={0}) == [0, 1]  # the changed code drew none


def test_code_that_agreed_in_earlier_steps_spreads_nothing_now() -> None:
    rows = [call("after", 15, **READS), call("extra", 16)]
    assert others(*rows, is_proven=True) == [0, 1]
    # Unless parameters of it have moved meanwhile: then what it is inside of, and what comes behind, follows.
    moved: dict[str, Any] = {"lone": WITH_WEIGHTS, "trained": {"extra"}}
    assert others(*rows, is_proven=True, **moved) == []


def test_difference_within_rounding_is_none_where_only_more_counts() -> None:
    rows = [call("before", 5, **READS, exceeds=False), call("b", 6, **READS)]
    # It follows, but no more than it counts: what comes behind it is not excused by it.
    assert others(*rows, exceeding=True) == [1]
    assert others(*rows, exceeding=False) == [0, 1]


def test_code_of_the_loss_alone_is_where_the_runs_part() -> None:
    rows = [call("m", 5), loss(20)]
    assert others(*rows, touched={None}) == [0, 1]
    assert others(call("m", 15, **READS), touched={None}) == []  # nothing is said of a loss


def test_ranks_are_told_apart() -> None:
    """Rank 1 has no row of the changed code: nothing of it follows."""
    rows = [call("b", 15, **READS), call("b", 15, rank=1, **READS)]
    assert others(*rows) == [1]


def test_rows_are_taken_in_program_order_whatever_order_they_come_in() -> None:
    assert others(node("after", 20), call("after", 15, **READS)) == []


def test_bucket_behind_the_changed_code_follows() -> None:
    assert others(bucket(["w"], 40), bucket(["w"], 5)) == [1]


def origin(*rows: Difference, exceeding: bool = False, left: Difference | None = None) -> Any:
    structure = Structure((LAYER, OneSided("pass", "p", "candidate")))
    return origin_of_code(structure, rows, left, exceeding=exceeding)


def test_origin_of_changed_code_names_it_and_the_first_row_that_follows() -> None:
    rows = [call("b", 7, rank=1), call("a", 9, **READS), call("c", 12, exceeds=False)]
    found = origin(*rows)
    assert (found.link, found.ranks, found.module_fqn, found.code) == (
        "structure",
        (0, 1),
        "extra",
        (LAYER,),
    )
    assert found.difference is found.follower is rows[1]
    assert found.change is rows[1].reads
    left = call("extra", 3, only_in="candidate")
    assert origin(*rows, left=left).difference is left


def test_origin_of_changed_code_is_told_by_what_exceeds_where_that_is_asked() -> None:
    small, large = call("a", 1, exceeds=False), call("b", 2, rank=1)
    found = origin(small, large, exceeding=True)
    assert (found.follower, found.ranks) == (large, (1,))
    assert origin(small, exceeding=True).follower is small  # there is nothing else
    assert found.change is large.writes
