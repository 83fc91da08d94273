"""The rows around a difference, equal ones too: what a person looks at to see it enter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gradtrace_analyzer.diff.difference import Difference
from gradtrace_analyzer.diff.origins.chain_rows import ChainRow, chain_rows
from support.synthetic_runs.differences import call, changed, loss, node, started, unchanged


def called(fqn: str, came: float, gave: float, **more: Any) -> dict[str, Any]:
    key = {"root": 0, "module_fqn": fqn, "phase": "forward", "call_index": 0}
    return {**key, "input_norm": came, "output_norm": gave, **more}


ROWS = {
    "module_calls": [called("a", 1.0, 2.0), called("b", 2.0, 3.0), called("c", 3.0, 4.0)],
    "backward_passes": [{"backward_index": 0, "kind": "backward", "loss": 0.5}],
}


def around(
    origin: Difference, *others: Difference, before: int = 9, after: int = 9
) -> list[ChainRow]:
    return chain_rows(started(ROWS), origin, [origin, *others], before, after)


def said(found: list[ChainRow]) -> list[tuple[Any, ...]]:
    return [(p.key.get("module_fqn"), p.way, p.baseline, p.candidate, p.error) for p in found]


def test_rows_that_agree_are_shown_with_the_norm_that_both_have() -> None:
    added_up_otherwise = replace(unchanged(2.0), error=1e-8)
    found = around(call("b", 1, reads=added_up_otherwise, writes=changed(0.25, norm=3.0)))
    assert said(found) == [
        ("a", "receives", 1.0, 1.0, 0.0),
        ("a", "returns", 2.0, 2.0, 0.0),
        ("b", "receives", 2.0, 2.0, 0.0),
        ("b", "returns", 3.0, 3.0, 0.25),
        ("c", "receives", 3.0, 3.0, 0.0),
        ("c", "returns", 4.0, 4.0, 0.0),
        (None, "is", 0.5, 0.5, 0.0),
    ]
    assert [p.is_origin for p in found] == [False, False, True, True, False, False, False]
    assert (found[3].tolerance, found[0].tolerance) == (1e-6, None)
    assert [p.link for p in found] == ["forward"] * 6 + ["loss"]


def test_so_many_rows_are_shown_before_the_origin_and_after_it() -> None:
    found = around(call("b", 1), before=1, after=0)
    assert [p.key["module_fqn"] for p in found] == ["a", "a", "b", "b"]
    assert [p.key["module_fqn"] for p in around(call("b", 1), before=0, after=1)] == [
        "b",
        "b",
        "c",
        "c",
    ]


def test_loss_that_differs_is_shown_as_a_number() -> None:
    found = around(call("b", 1), loss(3, 0.5, 2.0))[-1]
    assert (found.way, found.baseline, found.candidate, found.error) == ("is", 0.5, 2.0, 0.75)


def test_row_of_one_side_alone_stands_where_it_ran() -> None:
    writes = changed(norm=7.0)
    lone = type(writes)(True, None, 0.0, None, writes.candidate)
    extra = node("n", 0.5, only_in="candidate", reads=None, writes=lone)
    found = around(call("b", 1), extra)
    assert [p.key.get("module_fqn") for p in found][:4] == ["a", "a", "n", "b"]
    assert (found[2].way, found[2].only_in, found[2].baseline, found[2].candidate) == (
        "leaves",
        "candidate",
        None,
        7.0,
    )


def test_origin_that_is_no_row_of_the_baseline_is_looked_for_by_its_place() -> None:
    failed = Difference("failures", 0, 0, 1.5, None, {"node_name": "A"})
    found = chain_rows(started(ROWS), failed, [], 1, 0)
    assert [p.key["module_fqn"] for p in found] == ["b", "b", "c", "c"]
    assert not any(p.is_origin for p in found)


def test_other_ranks_are_left_out() -> None:
    found = around(call("b", 1), call("a", 0, rank=1))
    assert found[1].error == 0.0
