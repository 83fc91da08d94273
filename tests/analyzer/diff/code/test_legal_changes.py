"""What a legal change of the code leaves behind: loss scales that are divided out, rows that change nothing."""

from __future__ import annotations

from typing import Any

import duckdb
import pytest

from gradtrace_analyzer.diff.code.legal_changes import (
    LossScale,
    SetAside,
    aside_sentence,
    divide_out_loss_scales,
    set_aside,
)
from gradtrace_analyzer.diff.links import LINK_TABLES
from gradtrace_analyzer.diff.note import DividedOut
from gradtrace_analyzer.reports.diff.notes import note_sentence
from gradtrace_analyzer.reports.diff.wording import Wording
from support.synthetic_runs.differences import Row, Rows, paired, sides

NAMES = ("a.w", "b.w", "c.w")


def gradients(point: str, times: float, step: int = 0, **one: float) -> tuple[list[Row], list[Row]]:
    """All parameters' gradients at a point, `times` the baseline's; those named in `one` otherwise."""
    both: tuple[list[Row], list[Row]] = ([], [])
    for name in NAMES:
        key = {"step": step, "root": 0, "parameter_fqn": name, "point": point, "backward_index": 0}
        for rows, own in zip(both, sides(times=one.get(name[0], times)), strict=True):
            rows.append(key | own)
    return both


def scaled(
    loss: float, local: float = 1.0, final: float = 1.0, step: int = 0, **one: float
) -> tuple[dict[str, list[Row]], dict[str, list[Row]]]:
    """A step in which the candidate's loss and gradients are so many times the baseline's."""
    node = {"step": step, "root": 0, "module_fqn": "a", "node_name": "A", "backward_index": 0}
    made: tuple[dict[str, list[Row]], dict[str, list[Row]]] = ({}, {})
    for n, side in enumerate(made):
        passes = {
            "step": step,
            "backward_index": 0,
            "kind": "backward",
            "loss": 2.0 * (loss if n else 1.0),
        }
        side["backward_passes"] = [passes]
        side["node_events"] = [node | sides(prefix="grad_input_", times=local, lanes=4)[n]]
        side["gradients"] = [
            *gradients("local", local, step, **one)[n],
            *gradients("final", final, step)[n],
        ]
    return made


def unscaled(a: Rows, b: Rows) -> tuple[list[LossScale], duckdb.DuckDBPyConnection]:
    connection = paired(a, b)
    return divide_out_loss_scales(connection), connection


def test_loss_scale_that_was_taken_back_is_divided_out() -> None:
    found, connection = unscaled(*scaled(1024.0, 1024.0))
    assert found == [LossScale(1024.0, 0, 1)]
    query = "SELECT writes_c_norm, writes_c_sketch[1], writes_error, error FROM paired_{}"
    for table in ("gradients", "node_events"):
        rows = connection.execute(query.format(table)).fetchall()
        assert rows and set(rows) == {(1.0, 1.0, 0.0, 0.0)}
    assert connection.execute(
        "SELECT value_c_loss, error FROM paired_backward_passes"
    ).fetchall() == [(2.0, 0.0)]


def test_error_that_is_left_when_the_scale_is_divided_out_is_seen() -> None:
    _, connection = unscaled(*scaled(1024.0, 1024.0, a=2048.0))
    found = connection.execute(
        "SELECT key_parameter_fqn, writes_error FROM paired_gradients WHERE writes_error > 0"
    )
    assert found.fetchall() == [("a.w", 0.5)]


@pytest.mark.parametrize(
    ("loss", "local", "final"),
    [
        (3.0, 3.0, 1.0),  # no power of two
        (1024.0, 1.0, 1.0),  # the gradients are not scaled
        (1024.0, 1024.0, 1024.0),  # it was never taken back: that is a fault
        (0.999, 1.0, 1.0),  # no factor at all
    ],
)
def test_what_is_no_loss_scale_stays_as_it_is(loss: float, local: float, final: float) -> None:
    found, connection = unscaled(*scaled(loss, local, final))
    assert found == []
    values = connection.execute("SELECT value_c_loss FROM paired_backward_passes").fetchall()
    assert values == [(2 * loss,)]


def test_scale_is_told_by_the_first_step_that_has_it() -> None:
    a: dict[str, list[Row]] = {}
    b: dict[str, list[Row]] = {}
    for step, factor in enumerate([1.0, 64.0, 64.0, 128.0]):
        for whole, own in zip((a, b), scaled(factor, factor, step=step), strict=True):
            for table, rows in own.items():
                whole.setdefault(table, []).extend(rows)
    assert unscaled(a, b)[0] == [LossScale(64.0, 1, 2), LossScale(128.0, 3, 1)]


def test_losses_that_drift_apart_are_no_scale() -> None:
    """Of runs that have parted a loss may be about four times the other's, and clipping takes the gradients back."""
    a: dict[str, list[Row]] = {}
    b: dict[str, list[Row]] = {}
    for step, factor in enumerate([1.0, 1.3, 3.9, 4.1]):
        for whole, own in zip((a, b), scaled(factor, factor, step=step), strict=True):
            for table, rows in own.items():
                whole.setdefault(table, []).extend(rows)
    assert unscaled(a, b)[0] == []
    # A scaler that skipped a step is known to be one.
    for side in (a, b):
        side["steps"] = [{"step": step, "skipped": step == 1} for step in range(4)]
    assert unscaled(a, b)[0] == [LossScale(4.0, 2, 2)]


def test_each_scale_is_named_with_its_first_step() -> None:
    said = note_sentence(
        DividedOut((LossScale(65536.0, 2, 5), LossScale(32768.0, 7, 1))), Wording()
    )
    assert (
        "65536 times the baseline's until they are unscaled, from step 2 on, 32768 times from step 7 on"
        in said
    )


def test_spoilt_gradients_hide_no_scale() -> None:
    """Where a fault left no finite gradient the loss alone tells."""
    a, b = scaled(1024.0, 1024.0)
    for row in b["gradients"]:
        if row["point"] == "local":
            row["nan_count"] = 1
    assert unscaled(a, b)[0] == [LossScale(1024.0, 0, 1)]


def test_without_what_the_optimizer_saw_nothing_tells_a_scale_from_a_fault() -> None:
    a, b = scaled(1024.0, 1024.0)
    for side in (a, b):
        side["gradients"] = [row for row in side["gradients"] if row["point"] != "final"]
    assert unscaled(a, b)[0] == []


def lone(name: str, module: str = "m", step: int = 0, **more: Any) -> Row:
    key = {"root": 0, "module_fqn": module, "call_index": 0, "backward_index": 0, "occurrence": 0}
    return {"step": step, **key, "node_name": name, **more}


def aside(
    b: Rows, a: Rows | None = None, *, beyond: str = "", known_only: bool = False
) -> tuple[list[SetAside], list[tuple[Any, ...]]]:
    """What is set aside, and the lone Nodes that are left; `beyond` are differences beyond their tolerance."""
    connection = paired(a or anchors(), b)
    for table in LINK_TABLES:
        connection.execute(f"UPDATE judged_{table.table} SET beyond = false")
    if beyond:
        connection.execute(f"UPDATE judged_{beyond} SET beyond = true")
    found = set_aside(connection, known_only=known_only)
    query = "SELECT step, key_node_name FROM differing_node_events WHERE only_in IS NOT NULL ORDER BY ALL"
    return found, connection.execute(query).fetchall()


def anchors(times: float = 1.0, **more: list[Row]) -> dict[str, list[Row]]:
    """What the optimizer saw in two steps, and a module that is called."""
    finals = [row for step in (0, 1) for row in gradients("final", times, step)[1]]
    call = {"root": 0, "module_fqn": "m", "phase": "forward", "call_index": 0}
    return {"gradients": finals, "module_calls": [call | {"step": s} for s in (0, 1)], **more}


def test_nodes_of_one_side_change_nothing_where_what_the_optimizer_saw_agrees() -> None:
    found, left = aside(anchors(node_events=[lone("A"), lone("A", step=1), lone("B")]))
    assert found == [
        SetAside("node", "A", "candidate", 2, 0),
        SetAside("node", "B", "candidate", 1, 0),
    ]
    assert left == []


def test_nodes_of_a_step_whose_final_gradients_differ_stay() -> None:
    b = anchors(1.5, node_events=[lone("A")])
    assert aside(b, beyond="gradients") == ([], [(0, "A")])
    assert aside(b)[1] == []  # they differ within their tolerance


def test_nodes_of_a_step_with_a_lone_parameter_or_pass_stay() -> None:
    parameter: Row = {"root": 0, "parameter_fqn": "new", "point": "before"}
    a_pass: Row = {"backward_index": 0, "kind": "grad"}
    nodes = [lone("A")]
    assert aside(anchors(node_events=nodes, parameters=[parameter]))[1] == [(0, "A")]
    assert aside(anchors(node_events=nodes, backward_passes=[a_pass]))[1] == [(0, "A")]


def test_same_node_in_a_step_where_it_changes_nothing_speaks_for_the_others() -> None:
    finals = [*gradients("final", 1.0, 0)[1], *gradients("final", 1.5, 1)[1]]
    b = {
        **anchors(),
        "gradients": finals,
        "node_events": [lone("A"), lone("A", step=1), lone("B", step=1)],
    }
    found, left = aside(b, beyond="gradients")
    assert found == [SetAside("node", "A", "candidate", 2, 0)] and left == [(1, "B")]


def test_casts_and_recomputed_forwards_of_known_modules_change_nothing_anywhere() -> None:
    again = {"root": 0, "phase": "recompute", "call_index": 0}
    b = anchors(1.5, node_events=[lone("ToCopyBackward0"), lone("A")])
    b["module_calls"] += [again | {"module_fqn": "m"}, again | {"module_fqn": "new"}]
    for known_only in (False, True):
        found, left = aside(b, beyond="gradients", known_only=known_only)
        assert found == [
            SetAside("node", "ToCopyBackward0", "candidate", 1, 0),
            SetAside("call", "m", "candidate", 1, 0),
        ]
        assert left == [(0, "A")]
    # Known kinds alone: what changes nothing elsewhere is left for later.
    assert aside(anchors(node_events=[lone("A")]), known_only=True) == ([], [(0, "A")])


@pytest.mark.parametrize(
    ("module", "is_aside"), [("m", True), ("m.fc", True), ("mm", False), ("n", False)]
)
def test_nodes_inside_what_the_other_side_compiled_change_nothing(
    module: str, is_aside: bool
) -> None:
    a = anchors(node_events=[lone("A", module)])
    b = anchors(1.5, node_events=[lone("CompiledFunctionBackward", "m")])
    _, left = aside(b, a, beyond="gradients")
    assert ((0, "A") not in left) == is_aside


def test_group_of_another_kernel_is_set_aside_and_one_of_another_setting_stays() -> None:
    def group(n: int, fused: str, momentum: float) -> Row:
        settings = f'{{"fused": {fused}, "momentum": {momentum}}}'
        return {"optimizer_index": 0, "group_index": n, "hyperparameters": settings}

    a = anchors(optimizer_groups=[group(0, "true", 0.9), group(1, "true", 0.9)])
    b = anchors(optimizer_groups=[group(0, "false", 0.9), group(1, "false", 0.5)])
    assert aside(b, a)[0] == [SetAside("optimizer kernel", "fused or foreach", "both", 1, 0)]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            [SetAside("node", "A", "candidate", 1200, 0), SetAside("call", "", "baseline", 1, 0)],
            "On one side alone, without effect on what the optimizer saw: 1,200 Nodes in the candidate (A); 1 module "
            "call in the baseline (the root).",
        ),
        (
            [SetAside("node", name, "baseline", 1, 0) for name in "ABCD"],
            "On one side alone, without effect on what the optimizer saw: 4 Nodes in the baseline (A, B, C, ...).",
        ),
        (
            [SetAside("optimizer kernel", "fused or foreach", "both", 3, 0)],
            "The optimizer computes its update with another kernel (fused, foreach).",
        ),
    ],
)
def test_what_was_set_aside_is_said_in_words(found: list[SetAside], said: str) -> None:
    assert aside_sentence(found) == said


def test_loss_scale_is_said_in_words() -> None:
    assert note_sentence(DividedOut((LossScale(65536.0, 2, 5),)), Wording()).startswith(
        "The candidate's loss and gradients are 65536 times the baseline's until they are unscaled, from step 2 on"
    )
