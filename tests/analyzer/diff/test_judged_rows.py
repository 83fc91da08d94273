"""What was judged: which steps differ first, and what is told of a step."""

from __future__ import annotations

from typing import Any

import pytest

import gradtrace_analyzer.diff.judged_rows as judged_rows_module
from gradtrace_analyzer.diff.scope.selection import chosen
from support.synthetic_runs.differences import (
    Row,
    call,
    each_step,
    judged_rows,
    node,
    sides,
    three_calls,
    views,
)


def both(errors: dict[tuple[int, str], float], **more: Any) -> Any:
    return judged_rows(views(three_calls(0, errors), three_calls(1, errors)), **more)


def test_first_step_with_a_difference_and_the_first_beyond_tolerance_are_told_apart() -> None:
    rows = both({(1, "b"): 1e-9, (2, "c"): 0.5})
    assert rows.first_step(exceeding=False) == 1
    assert rows.first_step(exceeding=True) == 2
    assert both({}).first_step(exceeding=False) is None


def test_differences_of_a_step_come_in_program_order() -> None:
    rows = both({(1, "b"): 0.5, (1, "a"): 0.5, (2, "c"): 0.5})
    found = rows.differences_at(1)
    assert [(d.key["module_fqn"], d.order, d.exceeds) for d in found] == [
        ("a", 0, True),
        ("b", 1, True),
    ]
    assert rows.differences_at(1) is found  # asked again it reads nothing
    assert rows.left_out(1) == 0


def test_of_many_differences_the_first_are_followed_and_those_that_tell_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So are the first beyond their tolerance, and the first that read nothing that differs."""
    names = [f"m{n:03}" for n in range(90)]
    calls: list[Row] = []
    others: list[Row] = []
    for n, name in enumerate(names):
        key = {"root": 0, "module_fqn": name, "phase": "forward", "call_index": 0}
        came, gave = (
            sides(1e-9 if n < 80 else 0.0, "input_"),
            sides(0.5 if n >= 60 else 1e-9, "output_"),
        )
        calls.append(key | came[0] | gave[0])
        others.append(key | came[1] | gave[1])
    monkeypatch.setattr(judged_rows_module, "MOST_DIFFERENCES", 60)
    rows = judged_rows(views({"module_calls": calls}, {"module_calls": others}))
    followed = {d.key["module_fqn"] for d in rows.differences_at(0)}
    assert followed == {*names[:20], *names[60:80], *names[80:]}
    assert rows.left_out(0) == 40


def test_equal_rows_of_the_same_kind_in_front_of_a_difference_are_counted() -> None:
    nodes = [
        {"step": 0, "root": 0, "module_fqn": "m", "node_name": name, "event_index": n, "record_index": 50 + n}
        for n, name in enumerate("ABAA")
    ]  # fmt: skip
    rows = judged_rows(views({**three_calls(0, {}), "node_events": nodes}))
    first = rows.equal_before(node("m", 52, node_name="A", step=0))
    assert first == 2  # the A Nodes before place 52 of the step, which begins at 1
    assert rows.equal_before(call("c", 2, step=0)) == 2
    assert rows.equal_before(call("a", 0, step=0)) == 0


def test_spread_tells_of_each_link_where_it_begins_and_how_far_it_goes() -> None:
    found = both({(1, "b"): 1e-9, (2, "a"): 0.5, (2, "c"): 0.25}).spread()
    assert found == [
        {
            "rank": 0,
            "link": "forward",
            "first_step": 1,
            "row_count": 3,
            "largest_error": 0.5,
            "unmeasured_count": 0,
            "beyond_tolerance": True,
            "place": "b",
        }
    ]


def generators(*fingerprints: int) -> list[Row]:
    return [{"step": s, "rng_fingerprint": bits} for s, bits in enumerate(fingerprints)]


def test_generators_are_to_blame_in_the_first_step_in_which_they_stood_elsewhere() -> None:
    a = {"steps": generators(1, 1, 1, 1, 1)}
    b = {"steps": generators(1, 2, 2, 1, 2)}
    rows = judged_rows(views(a, b))
    assert [rows.rng_differs(step) for step in range(5)] == [set(), {0}, {0}, set(), {0}]
    assert [rows.rng_to_blame(step) for step in range(5)] == [set(), {0}, set(), set(), set()]


def test_value_that_is_not_finite_on_one_side_is_found_by_step_and_order() -> None:
    a, b = three_calls(0, {(1, "a"): 0.5}), three_calls(1, {(1, "a"): 0.5})
    for row in b["module_calls"]:
        if row["step"] >= 1 and row["module_fqn"] in "bc":
            row |= {"output_nan_count": 2, "output_fingerprint": 9}
    found = judged_rows(views(a, b)).first_nonfinite()
    assert found is not None and (found.step, found.key["module_fqn"]) == (1, "b")
    assert both({(1, "a"): 0.5}).first_nonfinite() is None


def test_modules_that_a_root_called_are_those_of_the_step() -> None:
    extra = {"root": 1, "module_fqn": "z", "phase": "forward", "call_index": 0, "step": 1}
    calls = three_calls(0, {})["module_calls"]
    rows = judged_rows(views({"module_calls": [*calls, extra]}))
    assert rows.module_fqns(1, 0, 0) == {"a", "b", "c"}
    assert rows.module_fqns(1, 0, 1) == {"z"}
    assert rows.module_fqns(2, 0, 1) == set()


def test_forwards_that_no_pass_followed_are_told_of_both_sides() -> None:
    a = {"steps": [{"abandoned_forwards": 1}], **three_calls(0, {}, range(1))}
    b = {"steps": [{"abandoned_forwards": 3}], **three_calls(1, {}, range(1))}
    assert judged_rows(views(a, b)).abandoned_forwards(0, 0) == (1, 3)
    assert judged_rows(views(a, b)).abandoned_forwards(5, 0) is None


def test_what_was_not_asked_for_is_taken_out_of_the_differences() -> None:
    rows = both({(1, "b"): 0.5, (1, "a"): 0.5}, chosen=chosen(modules=["b"]))
    assert [d.key["module_fqn"] for d in rows.differences_at(1)] == ["b"]


def test_first_row_that_changed_code_left_is_told_with_its_names() -> None:
    extra = {
        "root": 0,
        "module_fqn": "new",
        "phase": "forward",
        "call_index": 0,
        "record_index": 99,
    }
    rows = three_calls(0, {})
    connection = views(
        rows, {"module_calls": [*rows["module_calls"], *each_step(range(3), [extra])]}
    )
    found = judged_rows(connection).first_changed(1)
    assert found is not None
    assert (found.table, found.only_in, found.key["module_fqn"], found.step) == (
        "module_calls",
        "candidate",
        "new",
        1,
    )
    assert judged_rows(views(rows)).structure.one_sided == ()
