"""Where in a pipeline a difference lies, where it came from, and what one side alone did as a whole action."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from gradtrace_analyzer.diff.difference import Difference
from gradtrace_analyzer.diff.origin import (
    ForwardOrigin,
    LoneRowOrigin,
    Origin,
    Reached,
    ReceivedOrigin,
)
from gradtrace_analyzer.diff.origins.stage_edges import (
    StageEdges,
    on_ranks,
    received_apart,
    stage_edges,
)
from gradtrace_analyzer.diff.scope.stages import Stages
from gradtrace_analyzer.sql.pipelines import StagePlace
from support.synthetic_runs.builder import summary_columns
from support.synthetic_runs.differences import (
    action,
    call,
    changed,
    given,
    gradient,
    node,
    paired,
    parameter,
    unchanged,
)

# Rank 0 holds stages 0 and 2, of roots 0 and 1; its actions end at these places.
ENDS: Mapping[str, list[tuple[float, StagePlace]]] = {
    "baseline": [
        (10.0, StagePlace(0, 0, "forward")),
        (20.0, StagePlace(2, 0, "forward")),
        (30.0, StagePlace(2, 0, "input")),
        (40.0, StagePlace(0, 1, "backward")),
    ],
    "candidate": [(50.0, StagePlace(0, 5, "forward"))],
}
EDGES = StageEdges(
    {(side, 0): own for side, own in ENDS.items()},
    {(0, 0): 0, (0, 1): 2},
    {(0, 2, True): (3, 1), (0, 2, False): (1, 3)},
)


def origin(d: Difference, kind: type[Origin] = ForwardOrigin, **more: Any) -> Origin:
    return kind(d, (d.rank,), **more)


@pytest.mark.parametrize(
    ("row", "place"),
    [
        (call("m", 5), StagePlace(0, 0, "forward")),
        (given(15, root=1), StagePlace(2, 0, "forward")),
        (node("m", 21, root=1), StagePlace(2, 0, "input")),
        (
            gradient("w", 31, "local"),
            StagePlace(0, 1, "backward"),
        ),  # it has no microbatch of its own
        (call("m", 5, microbatch=1), StagePlace(0)),  # the action around is of another microbatch
        (call("m", 45), StagePlace(0)),  # no action ended after it
        (
            gradient("w", 31, "final", root=1),
            StagePlace(2),
        ),  # it belongs to the stage, and to no action
        (parameter("w", 5), StagePlace(0)),
        (action(2, 30, "backward_input", 4), StagePlace(2, 4, "input")),
        (call("m", 5, only_in="candidate", microbatch=5), StagePlace(0, 5, "forward")),
        (node(None, 5, root=None), StagePlace(0, 0, "forward")),
        (parameter("w", 5, root=None), None),
        (parameter("w", 5, rank=1), None),
    ],
)
def test_row_lies_in_the_action_that_ended_after_it_or_in_its_stage(
    row: Difference, place: StagePlace | None
) -> None:
    assert EDGES.place(row) == place


@pytest.mark.parametrize(
    ("kind", "source"), [("forward", (3, 1)), ("backward_full", (1, 3)), ("backward_input", (1, 3))]
)
def test_activations_come_from_one_neighbour_and_gradients_from_the_other(
    kind: str, source: tuple[int, int]
) -> None:
    assert EDGES.source_of(action(2, 20, kind)) == source
    assert EDGES.source_of(action(0, 20, kind)) is None


def test_whole_action_of_one_side_alone_stands_for_what_is_in_it() -> None:
    first = call("m", 5, only_in="baseline")
    whole = action(0, 10, "forward", 0, only_in="baseline")
    assert EDGES.lone_action(origin(first, LoneRowOrigin), [first, whole]).difference is whole


@pytest.mark.parametrize(
    "whole",
    [
        action(0, 10, "forward", 0),  # both sides have it
        action(0, 10, "forward", 1, only_in="baseline"),  # another one
        action(0, 10, "forward", 0, only_in="baseline", rank=1),
    ],
)
def test_action_around_a_lone_row_that_both_sides_made_is_not_told(whole: Difference) -> None:
    first = call("m", 5, only_in="baseline")
    assert EDGES.lone_action(origin(first, LoneRowOrigin), [whole]).difference is first


def test_origin_that_is_no_lone_row_stays_as_it_is() -> None:
    first = call("m", 5)
    whole = action(0, 10, "forward", 0, only_in="baseline")
    assert EDGES.lone_action(origin(first), [whole]).difference is first


def test_what_an_action_received_is_by_rank_stage_microbatch_and_way() -> None:
    rows = [
        action(2, 20, "forward", 3, reads=changed()),
        action(2, 30, "backward_weight", 3, reads=changed(), rank=1),
        action(1, 40, reads=unchanged()),
        call("m", 5, reads=changed()),
    ]
    assert received_apart(rows) == {(0, 2, 3, True): rows[0], (1, 2, 3, False): rows[1]}


def test_origin_is_placed_with_where_what_its_action_received_came_from() -> None:
    received = received_apart([action(2, 20, "forward", 0, reads=changed())])
    first = origin(action(2, 20, "forward", 0), ReceivedOrigin)
    placed = ReceivedOrigin(
        first.difference, (0,), place=StagePlace(2, 0, "forward"), source=(3, 1)
    )
    assert EDGES.placed(first, received) == placed
    assert EDGES.placed(first, {}) == replace(placed, source=None)
    other_way = EDGES.placed(origin(action(2, 25, "backward_input", 0), ReceivedOrigin), received)
    assert isinstance(other_way, ReceivedOrigin)
    assert (other_way.place, other_way.source) == (StagePlace(2, 0, "input"), None)
    assert EDGES.placed(origin(parameter("w", 1, root=1)), received).place == StagePlace(2)
    assert EDGES.placed(origin(call("m", 15, root=1)), received).place == placed.place


def test_ranks_of_an_answer_are_the_candidates_where_stages_were_compared() -> None:
    """Stages 0 to 3 in two copies of two: in the candidate they lie on ranks 5, 4, 7 and 6."""
    stages = Stages({"baseline": {}, "candidate": {0: 5, 1: 4, 2: 7, 3: 6}}, 2)
    reached = Reached(3, 0, "stage", {"stage_index": 9})
    found = replace(ReceivedOrigin(call("m", 5, rank=2), (2, 3), source=(3, 1)), reached=(reached,))
    origin_of = on_ranks(found, stages)
    assert (origin_of.ranks, origin_of.source, origin_of.place) == ((7, 6), (6, 1), StagePlace(0))
    assert [(r.rank, r.key["stage_index"]) for r in origin_of.reached] == [(6, 1)]
    assert origin_of.difference.key["backward_index"] is None  # it numbered microbatches
    assert on_ranks(replace(found, place=StagePlace(1, 4)), stages).place == StagePlace(1, 4)
    assert on_ranks(found, None) is found and on_ranks(None, stages) is None


def acted(rank: int, stage: int, kind: str, value: float, **more: Any) -> dict[str, Any]:
    sent, received = (summary_columns([value + n], p) for n, p in enumerate(("sent_", "received_")))
    at = {"rank": rank, "stage_index": stage, "kind": kind, "occurrence": 0, "end_ns": 1}
    return {**at, "start_ns": 0, **sent, **received, **more}


def test_edges_are_read_of_one_step() -> None:
    calls = [
        {
            "rank": rank,
            "root": 0,
            "module_fqn": "",
            "phase": "forward",
            "call_index": 0,
            "depth": 0,
            "start_ns": 0,
            "end_ns": 1,
            "step": 1,
        }
        for rank in (0, 1)
    ]
    events = [
        acted(0, 0, "forward", 5.0, step=1),
        acted(0, 0, "backward_full", 7.0, step=1, microbatch=2),
        acted(0, 0, "wait", 7.0, step=1),
        acted(0, 0, "forward", 7.0, step=2),
        acted(1, 1, "forward", 4.0, step=1),
    ]
    connection = paired({"module_calls": calls, "stage_events": events})
    edges = stage_edges(connection, 1)
    assert edges is not None
    assert edges.actions["baseline", 0] == [
        (1.0, StagePlace(0, 0, "forward")),
        (2.0, StagePlace(0, 2, "backward")),
    ]
    assert edges.actions["candidate", 1] == [(1.0, StagePlace(1, 0, "forward"))]
    assert edges.stages == {(0, 0): 0, (1, 0): 1}
    assert edges.sources == {(1, 1, True): (0, 0), (0, 0, False): (1, 1)}
    assert stage_edges(connection, 1) == edges  # asked again it makes no table anew
    assert stage_edges(connection, 7) is None
