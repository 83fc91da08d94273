"""The origins of a step over all ranks: what has no cause, what ranks inherit, and what each origin reached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradtrace_analyzer.diff.difference import Difference
from gradtrace_analyzer.diff.origin import Origin
from gradtrace_analyzer.diff.origins.dataflow import Dataflow
from gradtrace_analyzer.diff.origins.first_differences import by_rank, first_origins, origin_of
from gradtrace_analyzer.diff.origins.independent import Join, independent, same_place_merged
from gradtrace_analyzer.diff.origins.step_facts import StepFacts
from gradtrace_analyzer.failures.failed_passes import OneSidedFailure
from support.synthetic_runs.differences import (
    accumulating,
    bucket,
    call,
    changed,
    given,
    gradient,
    loss,
    node,
    parameter,
)

READS = {"reads": changed()}


def search(
    *differences: Difference,
    failures: dict[int, OneSidedFailure] | None = None,
    unused: dict[int, Sequence[tuple[float, float]]] | None = None,
    joins: Sequence[Join] = (),
    **known: Any,
) -> tuple[list[Origin], list[Origin]]:
    """(origins, inherited) of a step with these rows."""
    rows = by_rank(differences, exceeding=False)
    begun = first_origins(rows, (), {}, exceeding=False, failures=failures, unused=unused)

    def of_rest(rank: int, own: list[Difference]) -> Origin:
        return origin_of(own, rng_differs=False, modules=(), exceeding=False)

    facts = StepFacts(**known)
    return independent(begun, rows, Dataflow(), facts, of_rest, joins=joins, exceeding=False)


def places(origins: Sequence[Origin]) -> list[tuple[str, tuple[int, ...], str | None]]:
    return [(o.link, o.ranks, o.parameter_fqn or o.module_fqn) for o in origins]


def test_two_branches_are_two_origins_and_what_both_reach_is_counted_as_shared() -> None:
    origins, inherited = search(
        node("left", 1), node("right", 2), node("trunk", 3, **READS), node("trunk", 4, **READS)
    )
    assert places(origins) == [("backward", (0,), "left"), ("backward", (0,), "right")]
    assert inherited == []
    # Itself, and the two rows that both can have changed.
    assert [o.inherited_counts for o in origins] == [{"backward": (1, 2)}] * 2


def test_rows_that_follow_from_one_alone_are_its_own() -> None:
    [origin], _ = search(call("a", 1), call("b", 2, **READS), loss(9))
    assert origin.inherited_counts == {"forward": (2, 0), "loss": (1, 0)}


def test_difference_that_crosses_a_bucket_is_inherited_by_the_other_rank() -> None:
    rows = [
        node("m", 1, rank=1),
        accumulating("m.w", 2, rank=1),
        bucket(["m.w"], 3, rank=1, bucket_index=7, **READS),
        bucket(["m.w"], 3, rank=0, bucket_index=7),
        gradient("m.w", 4, "reduced", rank=0),
    ]
    origins, inherited = search(*rows)
    assert places(origins) == [("backward", (1,), "m")]
    assert places(inherited) == [("bucket", (0,), "")]
    [reached] = origins[0].reached
    assert (reached.rank, reached.link, reached.bucket_index) == (0, "bucket", 7)
    # A bucket has two vertices on the rank that put something else in, and is one row all the same.
    assert origins[0].inherited_counts == {
        "backward": (2, 0),
        "bucket": (2, 0),
        "reduced_gradient": (1, 0),
    }


def test_each_rank_is_reached_where_it_first_inherits() -> None:
    own = [gradient("w", 1, rank=2), bucket(["w"], 2, rank=2, **READS)]
    others = [
        row
        for rank in (1, 0)
        for row in (bucket(["w"], 2, rank=rank), gradient("w", 3, "reduced", rank=rank))
    ]
    [origin], _ = search(*own, *others)
    assert [(r.rank, r.link) for r in origin.reached] == [(0, "bucket"), (1, "bucket")]


def test_same_place_on_several_ranks_is_one_origin() -> None:
    origins, inherited = search(call("m", 1), call("m", 2, rank=3), call("m", 1, rank=1))
    assert places(origins) == [("forward", (0, 1, 3), "m")]
    assert origins[0].inherited_counts == {"forward": (3, 0)} and not inherited


def test_same_module_otherwise_is_another_origin() -> None:
    origins, _ = search(call("m", 1), call("m", 1, rank=1, **READS))
    assert len(origins) == 2  # one gives something else, before the other something else comes in
    losses, _ = search(
        *(
            row
            for rank, factor in enumerate([2.0, 4.0])
            for row in (
                loss(1, 1.0, factor, rank=rank),
                node("m", 2, rank=rank, reads=changed(factor=factor, lanes=4)),
            )
        )
    )
    assert [o.factor for o in losses] == [2.0, 4.0]


def test_same_place_in_other_passes_is_a_repeat() -> None:
    rows = [call("m", n, microbatch=n) for n in range(3)]
    [origin], _ = search(*rows, call("m", 0, rank=1))
    assert (origin.ranks, origin.repeat_count) == ((0, 1), 2)


def failure(rank: int, node_name: str | None, backward_index: int = 0) -> OneSidedFailure:
    row = {
        "microbatch": 0, "root": 0, "module_fqn": "m", "call_index": 0, "node_name": node_name,
        "parameter_fqn": None, "event_index": 3, "exception_type": "E", "exception_text": "",
    }  # fmt: skip
    return OneSidedFailure(rank, 0, backward_index, row)


def test_failures_in_other_passes_are_no_repeat() -> None:
    def failed(rank: int, backward_index: int) -> Origin:
        passes = {rank: failure(rank, "A", backward_index)}
        [first] = first_origins({}, (), {}, exceeding=False, failures=passes)
        return first

    merged = same_place_merged([failed(0, 1), failed(1, 1), failed(1, 2)])
    assert [(o.ranks, o.repeat_count) for o in merged] == [((0, 1), 0), ((1,), 0)]


def test_ranks_that_failed_while_they_waited_inherit() -> None:
    origins, inherited = search(failures={0: failure(0, None), 1: failure(1, "A")})
    assert [o.ranks for o in origins] == [(1,)] and [o.ranks for o in inherited] == [(0,)]


def test_others_are_counted_of_the_origin_that_they_follow_alone() -> None:
    """Parameters that differ before the step are one origin; a further one is told with those of its kind."""
    first = node("m", 0, rank=0)
    own = [parameter(name, 5 + n, "after") for n, name in enumerate("abc")]
    origins, _ = search(first, *own, untouched={0})
    assert [(o.link, o.other_count) for o in origins] == [("backward", 0), ("optimizer", 2)]


def test_inputs_are_told_in_front_of_the_calls_that_read_them() -> None:
    """Keyword arguments leave their row late; the call that reads them is no origin then."""
    [origin], _ = search(call("m", 1, **READS), given(4))
    assert origin.link == "inputs" and origin.inherited_counts == {
        "inputs": (1, 0),
        "forward": (1, 0),
    }


def test_unused_forward_in_front_of_a_scaled_loss_is_left_out() -> None:
    rows = [
        call("m", 2),
        loss(9, 1.0, 2.0),
        node("m", 6, reads=changed(factor=2.0, lanes=4), writes=changed(factor=2.0, lanes=4)),
    ]
    [origin], _ = search(*rows, unused={0: [(1.0, 3.0)]})
    assert (origin.link, origin.aside) == ("loss", rows[0])
    assert "forward" not in origin.inherited_counts


def test_what_a_row_that_is_one_with_another_has_fed_follows_from_that() -> None:
    rows = [node("m", 1), parameter("m.w", 9, "after")]
    [origin], _ = search(
        *rows, joins=[lambda _, known: (0, known[0]) if known else None], untouched={0}
    )
    assert origin.difference is rows[0]
    assert origin.inherited_counts == {"backward": (1, 0), "optimizer": (1, 0)}


def test_what_follows_from_something_else_too_is_none_of_the_others() -> None:
    rows = [
        call("first", 0),
        gradient("w", 2),
        node("m", 7, backward_index=1),
        accumulating("w", 8, backward_index=1),
        gradient("w", 8, backward_index=1),  # on top of the first, and of what the Node gave
        parameter("q.a", 20, "after"),
        gradient("b", 3),
        parameter("b", 21, "after"),  # it follows from its gradient
    ]
    known: dict[str, Any] = {"untouched": {0}, "accumulated": [(0, 0, "w"), (0, 0, "b")]}
    origins, _ = search(*rows, **known)
    counts = [(o.link, o.parameter_fqn, o.other_count) for o in origins if o.parameter_fqn]
    assert counts == [
        ("local_gradient", "w", 0),
        ("local_gradient", "b", 0),
        ("optimizer", "q.a", 0),
    ]


def test_where_ranks_only_feed_each_other_the_first_of_each_is_told() -> None:
    rows = [
        call("n", 1),
        call("m", 2, **READS),
        call("m", 1, rank=1),
        call("n", 2, rank=1, **READS),
    ]
    origins, inherited = search(*rows, collective={(0, "m"), (0, "n")})
    assert places(origins) == [("forward", (0,), "n"), ("forward", (1,), "m")]
    assert inherited == [] and [o.inherited_counts for o in origins] == [{}, {}]


def test_ranks_that_put_something_else_into_a_bucket_are_one_origin() -> None:
    rows = [bucket(["w"], 2, rank=rank, **READS) for rank in (0, 1)]
    origins, inherited = search(*rows)
    assert [(o.ranks, o.between) for o in origins] == [((0, 1), True)] and inherited == []


def test_origins_of_other_rows_come_after_the_firsts_of_ranks() -> None:
    origins, _ = search(gradient("w", 1, rank=1), node("a", 1), node("b", 2))
    assert [o.module_fqn or o.parameter_fqn for o in origins] == ["a", "w", "b"]
