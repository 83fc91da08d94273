"""The search of one step over pairs of rows: firsts, origins, and what single gradients tell of a Node."""

from __future__ import annotations

from typing import Any

from gradtrace_analyzer.diff.origin import CodeOrigin, ForwardOrigin, NodeOrigin, Origin
from gradtrace_analyzer.diff.origins.search import StepSearch
from gradtrace_analyzer.diff.origins.step_reader import StepReader
from gradtrace_analyzer.failures.failed_passes import OneSidedFailure
from support.synthetic_runs.builder import summary_columns
from support.synthetic_runs.differences import Row, cover, judged_rows, views

Values = dict[str, float]
MODULES = ("left", "right")


def step(changed: Values | None = None, rank: int = 0, count: int = 2) -> dict[str, list[Row]]:
    """Two modules that are called with the same tensor, and a Node of each; `changed` is what a value is times."""
    times = changed or {}
    calls, nodes, tensors = [], [], []

    def summary(prefix: str, name: str, value: float) -> Row:
        return summary_columns([value * times.get(name, 1.0), 3.0, -1.0], prefix, 4)

    for n, fqn in enumerate(MODULES):
        at = {"rank": rank, "root": 0, "module_fqn": fqn, "call_index": 0}
        sides = summary("input_", "x", 7.0) | summary("output_", f"call {fqn}", 2.0 + n)
        calls.append({**at, "phase": "forward", "depth": 1, **sides})
        place = {"rank": rank, "backward_index": 0, "event_index": n}
        gradients = [summary("", f"{fqn} {p}", 1.0 + 10 * n + p) for p in range(count)]
        left = summary("grad_input_", f"node {fqn}", 5.0 + n)
        nodes.append(
            {**at, **place, "node_name": "MmBackward0", "occurrence": 0, "outcome": "ok",
             "grad_input_count": count, "grad_output_count": 1, **summary("grad_output_", "g", 4.0), **left}
        )  # fmt: skip
        tensors += [
            {**place, "direction": "grad_input", "position": p, **gradient}
            for p, gradient in enumerate(gradients)
        ]
    root = {"rank": rank, "root": 0, "module_fqn": "", "call_index": 0, "phase": "forward"}
    calls.append(
        {**root, "depth": 0, **summary("input_", "x", 7.0), **summary("output_", "y", 8.0)}
    )
    passes = [{"rank": rank, "backward_index": 0, "kind": "backward", "loss": 0.5}]
    return {
        "module_calls": calls,
        "node_events": nodes,
        "node_tensors": tensors,
        "backward_passes": passes,
    }


def together(*steps: dict[str, list[Row]]) -> dict[str, list[Row]]:
    return {table: [row for s in steps for row in s[table]] for table in steps[0]}


def search(
    baseline: dict[str, list[Row]],
    candidate: dict[str, list[Row]],
    ranks: tuple[int, ...] = (0,),
    failures: tuple[OneSidedFailure, ...] = (),
) -> StepSearch:
    connection = views(baseline, candidate)
    rows = judged_rows(connection, ranks)
    here = StepReader(connection, cover(ranks=ranks), 0)
    return StepSearch(rows, here, failures, [0], exceeding=False)


def nodes(origins: list[Origin]) -> list[NodeOrigin]:
    return [origin for origin in origins if isinstance(origin, NodeOrigin)]


def origin_of(origins: list[Any]) -> list[tuple[Any, ...]]:
    return [(type(o), o.module_fqn, o.ranks) for o in origins]


def test_two_nodes_that_give_something_else_are_two_origins() -> None:
    everything = {"node left": 2.0, "left 0": 2.0, "left 1": 2.0}
    origins, _ = search(
        step(), step({**everything, "node right": 2.0, "right 0": 2.0, "right 1": 2.0})
    ).origins()
    assert origin_of(origins) == [
        (NodeOrigin, "left", (0,)),
        (NodeOrigin, "right", (0,)),
    ]
    assert not any(o.positions or o.shares_input for o in nodes(origins))


def test_gradients_of_a_node_that_differ_are_told_by_position_and_one_alone_by_its_number() -> None:
    found, _ = search(step(), step({"node left": 2.0, "left 1": 4.0})).origins()
    [origin] = nodes(found)
    assert (origin.positions, origin.position_count) == ((1,), 2)
    assert origin.change is not None and origin.change.candidate is not None
    assert origin.change.candidate["abs_max"] == 8.0  # of the gradient, not of the whole


def test_node_with_another_number_of_gradients_is_told_by_both_numbers() -> None:
    found, _ = search(step(), step({"node left": 2.0, "node right": 1.0}, count=3)).origins()
    [origin] = nodes(found)
    assert origin.gradient_counts == (2, 3)


def test_nodes_of_modules_called_with_one_tensor_share_it() -> None:
    changed = {"node left": 2.0, "left 1": 4.0, "node right": 2.0, "right 0": 4.0}
    origins, _ = search(step(), step(changed)).origins()
    assert [o.shares_input for o in nodes(origins)] == [True, True]
    alone, _ = search(step(), step({"node left": 2.0, "left 1": 4.0})).origins()
    assert [o.shares_input for o in nodes(alone)] == [False]


def test_firsts_are_the_same_place_on_all_ranks() -> None:
    good = together(step(), step(rank=1))
    bad = together(step({"call left": 2.0}), step({"call left": 2.0}, rank=1))
    assert origin_of(search(good, bad, (0, 1)).first_origins) == [(ForwardOrigin, "left", (0, 1))]


def bucket(rank: int, after: float, before: float = 1.0) -> Row:
    key = {"backward_index": 0, "root": 0, "module_fqn": "", "parameter_fqns": ["w"]}
    sides = summary_columns([before], "before_") | summary_columns([after], "after_")
    return {"rank": rank, "kind": "all_reduce", "bucket_index": 0, **key, **sides}


def test_rank_that_first_differs_where_ranks_meet_is_no_first_beside_one_that_did_before() -> None:
    good = {**together(step(), step(rank=1)), "buckets": [bucket(0, 2.0), bucket(1, 2.0)]}
    bad = together(step({"call left": 2.0}), step(rank=1))
    bad["buckets"] = [bucket(0, 3.0), bucket(1, 3.0)]
    assert [o.ranks for o in search(good, bad, (0, 1)).first_origins] == [(0,)]
    alone = {**good, "buckets": bad["buckets"]}
    assert [(o.link, o.ranks) for o in search(good, alone, (0, 1)).first_origins] == [
        ("bucket", (0, 1))
    ]


def failure(rank: int, node_name: str | None) -> OneSidedFailure:
    row = {
        "microbatch": 0, "root": 0, "module_fqn": "m", "call_index": 0, "node_name": node_name,
        "parameter_fqn": None, "event_index": 3, "exception_type": "E", "exception_text": "",
    }  # fmt: skip
    return OneSidedFailure(rank, 0, 0, row)


def test_rank_that_failed_while_it_waited_is_no_first_beside_one_that_failed_in_a_node() -> None:
    good = together(step(), step(rank=1))
    both = (failure(0, None), failure(1, "A"))
    assert [o.ranks for o in search(good, good, (0, 1), both).first_origins] == [(1,)]
    assert [o.ranks for o in search(good, good, (0, 1), both[:1]).first_origins] == [(0,)]


def test_of_two_passes_that_failed_on_a_rank_the_first_is_the_reason() -> None:
    passes = (failure(0, "A"), failure(0, "B"))
    [origin] = search(step(), step(), failures=passes).first_origins
    assert origin.node_name == "A"


def test_where_all_follows_from_changed_code_that_is_the_origin() -> None:
    """A Node that one side alone runs in every step, and what comes behind it."""
    bad = step({"node left": 2.0, "left 0": 2.0, "left 1": 2.0})
    bad["node_events"].insert(0, {**bad["node_events"][0], "node_name": "GeluBackward0"})
    found = search(step(), bad)
    [origin], inherited = found.origins()
    assert (origin.link, origin.module_fqn, inherited) == ("structure", "left", [])
    assert isinstance(origin, CodeOrigin)
    assert [entry.name for entry in origin.code] == ["GeluBackward0"]
    assert found.first_origins == [origin]
