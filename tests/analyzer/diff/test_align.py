"""Pairs of two runs: which steps there are, which differ first, and what is told of a step."""

from __future__ import annotations

from typing import Any

import pytest

import gradtrace_analyzer.diff.align as align
from gradtrace_analyzer.diff.scope.selection import chosen
from support.synthetic_runs.differences import (
    Row,
    Rows,
    aligned,
    call,
    each_step,
    node,
    run_of,
    sides,
    views,
)

NAMES = ("a", "b", "c")


def run(
    n: int, errors: dict[tuple[int, str], float], steps: range = range(3), **more: list[Row]
) -> Rows:
    """A call of three modules in each step; those named in `errors` (by step) give something else in the candidate."""
    calls = [
        {"step": s, "root": 0, "module_fqn": name, "module_class": "Linear", "phase": "forward", "call_index": 0,
         **sides(0.0, "input_")[n], **sides(errors.get((s, name), 0.0), "output_")[n]}
        for s in steps
        for name in NAMES
    ]  # fmt: skip
    return {"module_calls": calls, **more}


def both(errors: dict[tuple[int, str], float], **more: Any) -> Any:
    return aligned(views(run(0, errors), run(1, errors)), **more)


def test_first_step_with_a_difference_and_the_first_beyond_tolerance_are_told_apart() -> None:
    alignment = both({(1, "b"): 1e-9, (2, "c"): 0.5})
    assert alignment.first_step(exceeding=False) == 1
    assert alignment.first_step(exceeding=True) == 2
    assert both({}).first_step(exceeding=False) is None


def test_differences_of_a_step_come_in_program_order() -> None:
    alignment = both({(1, "b"): 0.5, (1, "a"): 0.5, (2, "c"): 0.5})
    found = alignment.differences_at(1)
    assert [(d.key["module_fqn"], d.order, d.exceeds) for d in found] == [
        ("a", 0, True),
        ("b", 1, True),
    ]
    assert alignment.differences_at(1) is found  # asked again it reads nothing
    assert alignment.left_out(1) == 0


def test_of_many_differences_the_first_are_followed_and_those_that_tell_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So are the first beyond their tolerance, and the first that read nothing that differs."""
    names = [f"m{n:03}" for n in range(90)]
    rows: list[Row] = []
    others: list[Row] = []
    for n, name in enumerate(names):
        key = {"root": 0, "module_fqn": name, "phase": "forward", "call_index": 0}
        came, gave = (
            sides(1e-9 if n < 80 else 0.0, "input_"),
            sides(0.5 if n >= 60 else 1e-9, "output_"),
        )
        rows.append(key | came[0] | gave[0])
        others.append(key | came[1] | gave[1])
    monkeypatch.setattr(align, "MOST_DIFFERENCES", 60)
    alignment = aligned(views({"module_calls": rows}, {"module_calls": others}))
    followed = {d.key["module_fqn"] for d in alignment.differences_at(0)}
    assert followed == {*names[:20], *names[60:80], *names[80:]}
    assert alignment.left_out(0) == 40


def test_steps_are_told_by_where_they_were_seen() -> None:
    connection = views(run(0, {}, range(3)), run(1, {}, range(1, 4)))
    assert aligned(connection).steps() == {
        "both": {0: [1, 2]},
        "baseline": {0: [0]},
        "candidate": {0: [3]},
    }
    connection = views(run(0, {}, range(3)), run(1, {}, range(1, 4)))
    assert aligned(connection, chosen=chosen(step=2)).steps()["both"] == {0: [2]}


def test_rows_that_were_held_against_each_other_are_counted() -> None:
    extra: Row = {"root": 0, "module_fqn": "d", "phase": "forward", "call_index": 0, "step": 1}
    a, b = run(0, {}, range(3)), run(1, {}, range(1, 3))
    connection = views({"module_calls": [*a["module_calls"], extra]}, b)
    counts = aligned(connection).compared()
    assert (
        counts["module_calls"] == 6 and counts["gradients"] == 0
    )  # of common steps, but the lone one
    connection = views(a, a)
    assert aligned(connection, chosen=chosen(modules=["b"])).compared()["module_calls"] == 3
    connection = views(a, a)
    assert aligned(connection, unread=[("module_calls", 0)]).compared()["module_calls"] == 0


def test_sides_are_summarised_where_both_have_a_norm_of_anything() -> None:
    assert both({}).summarised()
    names = [
        {k: v for k, v in row.items() if not k.endswith("norm")}
        for row in run(1, {})["module_calls"]
    ]
    assert not aligned(views(run(0, {}), {"module_calls": names})).summarised()


def test_equal_rows_of_the_same_kind_in_front_of_a_difference_are_counted() -> None:
    nodes = [
        {"step": 0, "root": 0, "module_fqn": "m", "node_name": name, "event_index": n, "record_index": 50 + n}
        for n, name in enumerate("ABAA")
    ]  # fmt: skip
    alignment = aligned(views({**run(0, {}), "node_events": nodes}))
    first = alignment.equal_before(node("m", 52, node_name="A", step=0))
    assert first == 2  # the A Nodes before place 52 of the step, which begins at 1
    assert alignment.equal_before(call("c", 2, step=0)) == 2
    assert alignment.equal_before(call("a", 0, step=0)) == 0


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
    alignment = aligned(views(a, b))
    assert [alignment.rng_differs(step) for step in range(5)] == [set(), {0}, {0}, set(), {0}]
    assert [alignment.rng_to_blame(step) for step in range(5)] == [set(), {0}, set(), set(), set()]


def test_value_that_is_not_finite_on_one_side_is_found_by_step_and_order() -> None:
    a, b = run(0, {(1, "a"): 0.5}), run(1, {(1, "a"): 0.5})
    for row in b["module_calls"]:
        if row["step"] >= 1 and row["module_fqn"] in "bc":
            row |= {"output_nan_count": 2, "output_fingerprint": 9}
    found = aligned(views(a, b)).first_nonfinite()
    assert found is not None and (found.step, found.key["module_fqn"]) == (1, "b")
    assert both({(1, "a"): 0.5}).first_nonfinite() is None


def test_modules_that_a_root_called_are_those_of_the_step() -> None:
    extra = {"root": 1, "module_fqn": "z", "phase": "forward", "call_index": 0, "step": 1}
    rows = run(0, {})
    alignment = aligned(views({"module_calls": [*rows["module_calls"], extra]}))
    assert alignment.module_fqns(1, 0, 0) == {"a", "b", "c"}
    assert alignment.module_fqns(1, 0, 1) == {"z"}
    assert alignment.module_fqns(2, 0, 1) == set()


def test_forwards_that_no_pass_followed_are_told_of_both_sides() -> None:
    a = {"steps": [{"abandoned_forwards": 1}], **run(0, {}, range(1))}
    b = {"steps": [{"abandoned_forwards": 3}], **run(1, {}, range(1))}
    assert aligned(views(a, b)).abandoned_forwards(0, 0) == (1, 3)
    assert aligned(views(a, b)).abandoned_forwards(5, 0) is None


def test_what_was_not_asked_for_is_taken_out_of_the_differences() -> None:
    alignment = both({(1, "b"): 0.5, (1, "a"): 0.5}, chosen=chosen(modules=["b"]))
    assert [d.key["module_fqn"] for d in alignment.differences_at(1)] == ["b"]


def test_first_row_that_changed_code_left_is_told_with_its_names() -> None:
    extra = {
        "root": 0,
        "module_fqn": "new",
        "phase": "forward",
        "call_index": 0,
        "record_index": 99,
    }
    rows = run(0, {})
    connection = views(
        rows, {"module_calls": [*rows["module_calls"], *each_step(range(3), [extra])]}
    )
    found = aligned(connection).first_changed(1)
    assert found is not None
    assert (found.table, found.only_in, found.key["module_fqn"], found.step) == (
        "module_calls",
        "candidate",
        "new",
        1,
    )
    assert aligned(views(rows)).structure.one_sided == ()


def test_failures_are_those_of_the_ranks_steps_and_links_that_were_asked_for() -> None:
    failed = {"step": 1, "backward_index": 0, "exception_type": "E", "exception_text": ""}
    b = {**run(1, {}), "failures": [failed]}

    def found(**asked: Any) -> list[int]:
        alignment = aligned(views(run(0, {}), b), chosen=chosen(**asked))
        return [f.step for f in alignment.failures()]

    assert found() == found(step=1) == found(links=["backward"]) == [1]
    assert found(step=2) == found(links=["forward"]) == found(modules=["a"]) == []


def test_parts_prove_steps_equal_by_their_digests() -> None:
    digests = {"digest_forward": 1}
    a = {"steps": each_step(range(3), [digests]), **run(0, {(1, "b"): 0.5})}
    b = {
        "steps": [
            d | {"digest_forward": 1 + (d["step"] == 1)} for d in each_step(range(3), [digests])
        ],
        **run(1, {(1, "b"): 0.5}),
    }
    sides_of = {
        side: run_of(name=side, recorded={"steps": 3}) for side in ("baseline", "candidate")
    }
    alignment = aligned(views(a, b), runs=sides_of)
    assert alignment.proves_any and alignment.may_differ("module_calls")
    assert not alignment.may_differ("gradients")
    assert alignment.counted_steps == 0
