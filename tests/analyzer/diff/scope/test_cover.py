"""What of two runs was compared, what is missing of it, and whether anything may still be called identical."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gradtrace_analyzer.diff.scope.cover import (
    Cover,
    all_steps,
    asked_differently,
    cover_of,
    held,
    lacking_words,
    lost_rows,
    problems_of,
    torn_ends,
)
from gradtrace_analyzer.diff.scope.selection import chosen
from gradtrace_analyzer.diff.scope.stages import Stages
from gradtrace_analyzer.runs.parts import DamagedPart, Part
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.sql.footers import Counts
from support.synthetic_runs.differences import Rows, cover, run_of, views

STEPS = {"both": {0: [0, 1], 1: [0, 1]}, "baseline": {}, "candidate": {1: [2]}}


def covered(a: Run, b: Run, ranks: tuple[int, ...] = (0, 1), **more: Any) -> Cover:
    given: dict[str, Any] = {
        "steps": STEPS,
        "rows": {},
        "unread": {"baseline": (), "candidate": ()},
    } | more
    return cover_of({"baseline": a, "candidate": b}, ranks, **given)


def test_ranks_of_the_job_that_a_side_lacks_are_missing_on_it() -> None:
    a, b = run_of(range(2), world_size=4), run_of((0, 1, 2), world_size=4)
    assert covered(a, b).missing_ranks == {"baseline": (2, 3), "candidate": (3,)}


def test_ranks_that_nobody_asked_for_are_not_missed() -> None:
    a, b = run_of(range(2), world_size=4), run_of((0, 1, 2), world_size=4)
    assert covered(a, b, chosen=chosen(ranks="0-2")).missing_ranks == {
        "baseline": (2,),
        "candidate": (),
    }


def test_ranks_that_both_sides_were_told_to_leave_out_are_missed_by_nobody() -> None:
    recorded: dict[str, Any] = {"settings": {"ranks": [0, 1]}, "world_size": 4}
    a, b = (run_of(range(2), **recorded) for _ in range(2))
    assert covered(a, b).missing_ranks == {"baseline": (), "candidate": ()}
    other = run_of(range(2), world_size=4, settings={"ranks": [0, 1, 2]})
    assert covered(a, other).missing_ranks == {"baseline": (2, 3), "candidate": (2, 3)}


def test_where_stages_were_compared_a_side_lacks_only_its_own_ranks() -> None:
    stages = Stages({"baseline": {0: 0}, "candidate": {0: 3}}, 1)
    a, b = run_of(range(2), world_size=2), run_of(range(3), world_size=4)
    found = covered(a, b, stages=stages)
    assert found.missing_ranks == {"baseline": (), "candidate": (3,)}
    assert found.by_stage and found.stages == {0: 3}


def test_steps_that_one_side_alone_has_are_missing_on_the_other() -> None:
    found = covered(run_of(range(2)), run_of(range(2)))
    assert found.missing_steps == {"baseline": {1: (2,)}, "candidate": {}}
    assert found.steps == {0: (0, 1), 1: (0, 1)}


def test_what_is_told_of_ranks_is_of_those_asked_for() -> None:
    a, b = run_of(range(2), unclosed=(0, 1)), run_of(range(2))
    unread = {"baseline": (("parameters", 0), ("gradients", 1)), "candidate": ()}
    found = covered(a, b, unread=unread, chosen=chosen(ranks="1"))
    assert found.incomplete_ranks == {"baseline": (1,), "candidate": ()}
    assert found.unread == {"baseline": (("gradients", 1),), "candidate": ()}


def test_counts_of_all_ranks_are_added_up_by_reason() -> None:
    a = run_of(range(2), dropped={"journal full": 3}, unsummarised={"sparse": 1})
    found = covered(a, run_of(range(2)))
    assert found.dropped == {"baseline": {"journal full": 6}, "candidate": {}}
    assert found.unsummarised["baseline"] == {"sparse": 2}


def test_filters_are_the_settings_that_left_something_out() -> None:
    a = run_of(range(2), settings={"modules": "a*", "steps": "", "detail": "nodes"})
    found = covered(a, run_of(range(2)))
    assert found.filters == {"baseline": {"modules": "a*"}, "candidate": {}}
    assert found.is_filtered and not covered(run_of(), run_of()).is_filtered
    assert cover(selection=chosen(links=["loss"])).is_filtered
    assert not cover(selection=chosen(step=1)).is_filtered


def test_flight_recordings_tell_which_steps_they_kept() -> None:
    a = run_of(range(2), settings={"mode": "flight", "flight_steps": 3})
    found = covered(a, run_of(range(2)))
    assert a.flight_steps == 3 and found.flights == {"baseline": (0, 1)}


@pytest.mark.parametrize(("summary", "has"), [("full", True), ("norms", False)])
def test_only_whole_summaries_hold_fingerprints(summary: str, has: bool) -> None:
    b = run_of(range(2), settings={"summary": summary})
    assert covered(run_of(range(2)), b).has_fingerprints == has


@pytest.mark.parametrize(
    ("ranks", "world_size", "sees_all"),
    [((0, 1), 2, True), ((0,), 2, False), ((0, 1, 2), 2, True)],
)
def test_all_ranks_are_seen_where_each_of_the_job_was_compared(
    ranks: tuple[int, ...], world_size: int, sees_all: bool
) -> None:
    assert cover(ranks=ranks, world_size=world_size).sees_all_ranks == sees_all


def test_all_stages_are_seen_whatever_ranks_hold_them() -> None:
    assert cover(ranks=(0, 1), stages={0: 5, 1: 7}, world_size=9).sees_all_ranks
    assert not cover(ranks=(0,), stages={0: 5, 1: 7}, world_size=1).sees_all_ranks


def test_what_the_recorder_gave_up_on_ranks_that_nobody_asked_for_restricts_nothing() -> None:
    a, b = run_of(range(2), problems=["no space left"]), run_of(range(2))
    assert covered(a, b).problems["baseline"] == ("rank 0: no space left", "rank 1: no space left")
    only = covered(a, b, chosen=chosen(ranks="1"))
    assert only.problems["baseline"] == ("rank 1: no space left",)


def test_rank_that_never_said_what_it_was_asked_is_no_filter() -> None:
    a, b = (run_of(range(2), world_size=4) for _ in range(2))
    for run in (a, b):
        for info in run.ranks.values():
            info.facts.pop("settings")  # type: ignore[attr-defined]
    assert covered(a, b).missing_ranks == {"baseline": (2, 3), "candidate": (2, 3)}


UNEVEN = {"ranks": (0, 1), "steps": {0: (0, 1), 1: (0,)}}


@pytest.mark.parametrize(
    ("lacks", "is_whole"),
    [
        ({}, True),
        ({"missing_ranks": {"baseline": (1,)}}, False),
        ({"unread": {"baseline": (("parameters", 0),)}}, False),
        ({"problems": {"candidate": ("rank 0: no",)}}, False),
        # A run that was asked to make fewer steps is whole; one that was cut short is not.
        ({"missing_steps": {"candidate": {0: (5,)}}}, True),
        ({"missing_steps": {"candidate": {0: (5,)}}, "incomplete_ranks": {"candidate": (0,)}}, False),
        ({"incomplete_ranks": {"candidate": (0,)}}, True),
        ({"missing_steps": {"candidate": {1: (1,)}}, **UNEVEN}, False),
        (UNEVEN, True),
        ({"dropped": {"candidate": {"journal full": 1}}}, True),
    ],
)  # fmt: skip
def test_whole_is_what_nothing_was_lost_of(lacks: dict[str, Any], is_whole: bool) -> None:
    assert cover(**lacks).is_whole == is_whole


def test_what_is_lacking_is_said_in_one_sentence() -> None:
    lacks = cover(
        missing_ranks={"baseline": (), "candidate": (1, 2)},
        unread={"baseline": (("gradients", 0),), "candidate": ()},
        problems={"baseline": ("rank 0: no space left",), "candidate": ()},
        missing_steps={"baseline": {}, "candidate": {0: (3, 4)}},
    )
    assert lacking_words(lacks) == (
        "the candidate lacks ranks 1-2 and the baseline has lost rows of gradients of rank 0 and the recorder of the "
        "baseline gave up in part (rank 0: no space left) and the candidate lacks steps 3-4 of rank 0, of which "
        "nothing can be said"
    )


@pytest.mark.parametrize(
    ("numbers", "words"), [([], "no rank"), ([3], "rank 3"), ([1, 2, 5], "ranks 1-2,5")]
)
def test_numbers_are_held_as_words(numbers: list[int], words: str) -> None:
    assert held(numbers) == words
    assert held(dict.fromkeys(numbers), "rank") == words


def test_steps_of_all_ranks_are_taken_together() -> None:
    assert all_steps({0: [2, 1], 3: [2, 7]}) == [1, 2, 7]


@pytest.mark.parametrize(
    ("other", "differently"),
    [
        (run_of(), False),
        (run_of(settings={"steps": "1-2"}), False),  # fewer steps: those that are there are whole
        (run_of(settings={"detail": "modules"}), True),
        (run_of(settings={"summary": "norms"}), True),
        (run_of(settings={"modules": "a*"}), True),
        (run_of(schema_version=3), True),
    ],
)
def test_sides_were_asked_differently_where_rows_of_one_alone_say_nothing(
    other: Run, differently: bool
) -> None:
    assert asked_differently({"baseline": run_of(), "candidate": other}) == differently


def test_problems_are_told_with_their_rank() -> None:
    assert problems_of(run_of(range(2), problems=["a", "b"])) == [
        "rank 0: a",
        "rank 0: b",
        "rank 1: a",
        "rank 1: b",
    ]


def test_rank_that_did_not_close_ends_with_the_last_step_of_any_of_its_rows() -> None:
    rows: Rows = {
        "parameters": [{"root": 0, "parameter_fqn": "w", "point": "before", "step": s} for s in (0, 1)],
        "backward_passes": [{"backward_index": 0, "kind": "backward", "step": 2}],
        "module_calls": [{"root": 0, "module_fqn": "", "phase": "forward", "step": 9, "rank": 1}],
    }  # fmt: skip
    run = run_of(range(3), unclosed=(0, 2))
    assert torn_ends(views(rows), "baseline", run) == {0: (2,)}  # rank 2 has no row at all


def part(table: str, rank: int) -> Part:
    return Part(table=table, rank=rank, attempt=0, number=0, path=table, size_bytes=0)


def test_rows_are_lost_where_fewer_are_there_than_were_recorded_or_a_part_is_damaged() -> None:
    recorded = {"parameters": 3, "gradients": 2}
    run = run_of(range(2), recorded=recorded, unclosed=(1,))
    counts = Counts({("parameters", 0): 3, ("gradients", 0): 1})
    assert lost_rows(run, counts) == [("gradients", 0)]  # rank 1 never said how many
    damaged = replace(run, damaged=(DamagedPart(part("inputs", 1), "no footer"),))
    assert lost_rows(damaged, counts) == [("gradients", 0), ("inputs", 1)]
