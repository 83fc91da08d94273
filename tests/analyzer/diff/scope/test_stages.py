"""Which ranks hold which stage on both sides, and what is said of it."""

from __future__ import annotations

from gradtrace_analyzer.diff.scope.stages import Stages

# Two copies of a pipeline of two stages; the candidate has turned the first copy round, and has no second stage twice.
STAGES = Stages({"baseline": {0: 0, 1: 1, 2: 2, 3: 3}, "candidate": {0: 1, 1: 0, 2: 2}}, 2)


def test_only_stages_of_both_sides_are_common() -> None:
    assert STAGES.common == [0, 1, 2]


def test_stages_that_lie_elsewhere_are_named_with_their_ranks() -> None:
    said = STAGES.note()
    assert said.startswith("The runs are scheduled otherwise: they were compared stage by stage")
    assert said.endswith(
        "In the candidate stages are on other ranks (stage 0 on rank 1 instead of rank 0, stage 1 on rank 0 instead of "
        "rank 1); ranks are named as there."
    )


def test_of_many_stages_that_lie_elsewhere_two_are_named() -> None:
    ranks = {"baseline": dict(enumerate(range(4))), "candidate": dict(enumerate((3, 2, 1, 0)))}
    assert (
        "(stage 0 on rank 3 instead of rank 0, stage 1 on rank 2 instead of rank 1 and 2 more)"
        in Stages(ranks, 4).note()
    )
    # Copies of the same stage count from the first again.
    assert (
        "stage 1 on rank 0 instead of rank 3"
        in Stages({"baseline": {3: 3}, "candidate": {3: 0}}, 2).note()
    )


def test_stages_on_the_same_ranks_are_not_told() -> None:
    ranks = {0: 0, 1: 1}
    assert "other ranks" not in Stages({"baseline": ranks, "candidate": ranks}, 2).note()


def test_parameters_of_no_stage_are_counted() -> None:
    ranks = {"baseline": {0: 0}, "candidate": {0: 0}}
    assert "1 parameter is of no stage" in Stages(ranks, 1, 1).note()
    assert "2 parameters are of no stage" in Stages(ranks, 1, 2).note()
    assert "of no stage" not in Stages(ranks, 1).note()


def test_spread_is_told_by_the_candidates_ranks_and_the_stage() -> None:
    assert STAGES.spread([{"rank": 1, "link": "loss"}, {"rank": 2, "link": "clip"}]) == [
        {"rank": 0, "link": "loss", "stage_index": 1},
        {"rank": 2, "link": "clip", "stage_index": 0},
    ]


def test_rank_may_hold_several_stages() -> None:
    held = Stages({"baseline": {0: 0, 1: 1, 2: 0}, "candidate": {}}, 3)
    assert held.of_rank("baseline", 0) == [0, 2]
    assert held.of_rank("candidate", 0) == []
