"""Where ranks meet a difference crosses: through buckets, stages, collectives, and reductions nobody recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gradtrace_analyzer.diff.difference import Difference
from gradtrace_analyzer.diff.origins.across_ranks import joined
from gradtrace_analyzer.diff.origins.dataflow import Dataflow
from gradtrace_analyzer.diff.origins.stage_edges import StageEdges
from gradtrace_analyzer.diff.origins.step_facts import StepFacts
from support.synthetic_runs.differences import (
    action,
    bucket,
    call,
    changed,
    given,
    gradient,
    node,
    parameter,
    unchanged,
)

READS = {"reads": changed()}


def origins(
    *rows: Difference,
    failed: Mapping[int, bool] | None = None,
    edges: StageEdges | None = None,
    **known: Any,
) -> list[int]:
    """The places in the arguments of the rows that nothing explains."""
    by_rank: dict[int, list[Difference]] = {}
    for d in rows:
        by_rank.setdefault(d.rank, []).append(d)
    graph = joined(by_rank, Dataflow(), StepFacts(**known), failed or {}, edges, exceeding=False)
    found = [graph.rows[v] for v in graph.origins()]
    return [n for n, d in enumerate(rows) if any(row is d for row in found)]


def test_what_comes_out_of_a_bucket_follows_from_what_any_rank_put_in() -> None:
    rows = (
        gradient("w", 1, rank=0),
        bucket(["w"], 2, rank=0, **READS),
        bucket(["w"], 2, rank=1),
        gradient("w", 3, "reduced", rank=1),
    )
    assert origins(*rows) == [0]


def test_bucket_of_other_parameters_is_another_meeting() -> None:
    rows = (gradient("w", 1), bucket(["w"], 2, **READS), bucket(["v"], 2, rank=1))
    assert origins(*rows) == [0, 2]
    of_another_pass = bucket(["w"], 2, rank=1, backward_index=1)
    assert origins(*rows[:2], of_another_pass) == [0, 2]


def test_bucket_that_gave_otherwise_though_all_put_in_the_same_is_an_origin() -> None:
    assert origins(bucket(["w"], 2), bucket(["w"], 2, rank=1)) == [0, 1]


def test_bucket_may_follow_from_a_rank_whose_own_was_not_recorded_where_not_all_were_seen() -> None:
    rows = (node("m", 1, rank=1), bucket(["w"], 2))
    assert origins(*rows) == [0, 1]
    assert origins(*rows, is_whole=False) == [0]
    failing = (call("m", 0, rank=2), *rows)
    assert origins(*failing, failed={2: False}) == [0, 1]


def test_reduced_gradient_without_a_bucket_follows_from_ranks_that_differed_before() -> None:
    rows = (gradient("w", 1, rank=1), gradient("w", 3, "reduced"))
    assert origins(*rows) == [0]
    assert origins(*rows, bucketed=[(0, 0, "w")]) == [0, 1]  # its bucket is equal
    assert origins(*rows, bucketed=[(0, 0, "w")], is_whole=False) == [0]


@pytest.mark.parametrize("point", ["final", "after"])
def test_rank_that_first_differs_behind_a_reduction_nobody_recorded_inherits(point: str) -> None:
    late = gradient("w", 3, "final") if point == "final" else parameter("w", 3, "after")
    assert origins(gradient("w", 1, rank=1), late) == [0]


def test_rank_with_a_difference_of_its_own_is_not_excused_by_others() -> None:
    known: dict[str, Any] = {"accumulated": [(0, 0, "w"), (1, 0, "w")], "bucketed": [(0, 0, "w")]}
    rows = (parameter("u", 0), gradient("w", 1, rank=1), parameter("v", 5, "after"))
    assert origins(*rows, untouched={0}, **known) == [0, 1, 2]
    # Where its reduced gradients differ, these are what came from other ranks.
    rows = (gradient("w", 1, rank=1), gradient("w", 2, "reduced"), parameter("v", 5, "after"))
    assert origins(*rows, untouched={0}) == [0, 2]
    assert origins(rows[0], rows[2], untouched={0}) == [0]


def test_module_that_talks_to_other_ranks_follows_from_what_they_put_in() -> None:
    rows = (given(0, rank=1), call("norm", 1, rank=1, **READS), call("norm", 1))
    assert origins(*rows) == [0, 2]
    assert origins(*rows, collective={(0, "norm")}) == [0]
    assert origins(*rows, together=[[0, 1]]) == [0]
    assert origins(*rows, together=[[0, 2], [1, 3]]) == [0, 2]
    other = call("other", 1)
    assert origins(rows[0], rows[1], other, together=[[0, 1]]) == [0, 2]


@pytest.mark.parametrize(
    "name", ["_AllReduceBackward", "SyncBatchNormFunctionBackward", "all_gather_tensorBackward"]
)
def test_node_of_a_collective_follows_from_what_other_ranks_put_in(name: str) -> None:
    reading = node("m", 1, rank=1, node_name=name, reads=changed())
    rows = (node("x", 0, rank=1), reading, node("m", 1, node_name=name, reads=unchanged()))
    assert origins(*rows) == [0]
    plain = [node("m", 1, rank=r, reads=changed() if r else unchanged()) for r in (0, 1)]
    assert origins(rows[0], *plain) == [0, 1]


def edges(source: tuple[int, int]) -> StageEdges:
    return StageEdges({}, {}, {(1, 1, True): source})


def test_what_a_stage_received_follows_from_what_its_neighbour_sent() -> None:
    rows = (call("m", 1), action(0, 2), action(1, 2, rank=1, reads=changed(), writes=changed()))
    assert origins(*rows, edges=edges((0, 0))) == [0]
    assert origins(*rows, edges=edges((2, 0))) == [0, 2]  # it receives from another copy
    other = action(1, 2, rank=1, reads=changed(), microbatch=1)
    assert origins(*rows[:2], other, edges=edges((0, 0))) == [0, 2]


def test_rows_of_a_failed_rank_follow_its_first() -> None:
    rows = (node("m", 1, rank=1), node("n", 2, rank=1), node("m", 1))
    assert origins(*rows, failed={1: False}) == [0, 2]


def test_rank_that_failed_while_it_waited_follows_from_any_other() -> None:
    rows = (node("m", 1, rank=1), node("m", 1))
    assert origins(*rows, failed={1: True}) == [1]
    assert origins(rows[0], failed={1: True}) == [0]
    both = (node("m", 1, rank=0), node("m", 1, rank=1))
    assert origins(*both, failed={0: True, 1: True}) == [0, 1]  # none of them is the reason


def test_parameters_that_differ_together_are_one_origin_of_each_rank() -> None:
    own = [parameter(name, n) for n, name in enumerate("ab")]
    assert origins(*own, parameter("a", 0, rank=1)) == [0, 2]


def test_what_is_set_otherwise_is_another_kind_than_what_differs() -> None:
    rows = (
        parameter("a", 0),
        parameter("b", 1, writes=None, values={"requires_grad": (True, False)}),
    )
    assert origins(*rows) == [0, 1]


def test_inputs_of_one_call_are_one_origin() -> None:
    assert origins(given(0, "x"), given(1, "y"), given(2, "x", microbatch=1)) == [0, 2]


def test_what_one_side_alone_has_is_no_member_of_a_group() -> None:
    assert origins(parameter("a", 0), parameter("b", 1, only_in="candidate")) == [0]
    lone = [gradient(name, n, "carried", only_in="candidate") for n, name in enumerate("ab")]
    assert origins(*lone) == [0]


def test_calls_and_nodes_are_no_group() -> None:
    assert origins(call("a", 0), call("b", 1)) == [0, 1]
