"""A Node that ran in both halves of a backward pass, as the one that it is in a whole pass."""

from __future__ import annotations

from typing import Any

from gradtrace_analyzer.diff.divided.halves import whole_nodes
from gradtrace_schemas.summary import multipliers, signed
from support.synthetic_runs.differences import Row, views

NODE: Row = {
    "rank": 5, "step": 0, "microbatch": 2, "stage_index": 1, "root": 0, "module_fqn": "m", "call_index": 0,
    "outcome": "ok", "node_name": "MmBackward0", "autograd_seq": 3,
}  # fmt: skip


def gradient(norm: float, fingerprint: int, prefix: str = "") -> Row:
    values = {
        "numel": 4,
        "dtype": "float32",
        "norm": norm,
        "abs_max": norm,
        "sum": norm,
        "nan_count": 0,
        "inf_count": 1,
        "fingerprint": fingerprint,
        "sketch": [norm, 0.0, 0.0, 2.0],
    }
    return {f"{prefix}{name}": value for name, value in values.items()}


def ran(
    record_index: int, backward_index: int, *left: Row, came: float = 1.0, **more: Any
) -> tuple[Row, list[Row]]:
    """A run of the Node in a pass, and the rows of its gradients where there are several."""
    place = {"record_index": record_index, "backward_index": backward_index, "event_index": 0}
    own = {
        **NODE,
        **place,
        "grad_input_count": len(left),
        **gradient(came, 50 + backward_index, "grad_output_"),
    }
    if len(left) == 1:
        own |= {f"grad_input_{name}": value for name, value in left[0].items()}
    tensors = [
        {"rank": 5, **place, "direction": "grad_input", "position": n, **one}
        for n, one in enumerate(left)
        if one
    ]
    return {**own, **more}, tensors if len(left) > 1 else []


def whole_value(*runs: tuple[Row, list[Row]]) -> list[dict[str, Any]]:
    nodes, tensors = [n for n, _ in runs], [t for _, own in runs for t in own]
    connection = views({"node_events": nodes, "node_tensors": tensors})
    connection.execute(
        "CREATE TABLE baseline_holders AS SELECT 1 AS stage, 5 AS rank, 1 AS stage_index;"
        "CREATE TABLE baseline_begins AS SELECT 5 AS rank, 0 AS step, 100 AS begins"
    )
    query = whole_nodes("baseline", lambda microbatch: f"(7000 + {microbatch})")
    cursor = connection.execute(f"SELECT * FROM ({query}) ORDER BY record_index")
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def test_runs_of_one_node_are_one_row_with_what_left_it_in_either() -> None:
    first = ran(110, 0, gradient(3.0, 11), came=1.0)
    second = ran(120, 1, gradient(4.0, 12), came=2.0)
    [node] = whole_value(first, second)
    assert (node["grad_input_norm"], node["grad_input_numel"], node["grad_input_sum"]) == (
        5.0,
        8,
        7.0,
    )
    assert (node["grad_input_abs_max"], node["grad_input_inf_count"]) == (4.0, 2)
    assert (node["grad_input_fingerprint"], node["grad_input_count"]) == (23, 2)
    assert node["grad_input_sketch"] == [7.0, 0.0, 0.0, 4.0]
    # What came in last is all of it.
    assert (node["grad_output_norm"], node["grad_output_fingerprint"]) == (2.0, 51)


def test_node_is_of_its_stage_and_microbatch_at_the_place_of_its_first_run() -> None:
    [node] = whole_value(ran(110, 0, gradient(3.0, 11)), ran(120, 1, gradient(4.0, 12)))
    assert (node["rank"], node["root"], node["backward_index"]) == (1, 1, 2)
    assert (node["record_index"], node["event_index"], node["occurrence"]) == (
        7002 + 110 - 100,
        0,
        0,
    )


def test_gradient_that_both_halves_gave_counts_once() -> None:
    [node] = whole_value(ran(110, 0, gradient(3.0, 11)), ran(120, 1, gradient(3.0, 11)))
    assert (node["grad_input_norm"], node["grad_input_count"]) == (3.0, 1)


def test_nodes_of_one_name_are_numbered_in_the_order_in_which_forward_made_them() -> None:
    later = ran(110, 0, gradient(3.0, 11), autograd_seq=9, occurrence=5)
    earlier = ran(120, 0, gradient(3.0, 12), autograd_seq=3, occurrence=7)
    assert [(n["autograd_seq"], n["occurrence"], n["event_index"]) for n in whole_value(later, earlier)] == [
        (9, 1, 0),
        (3, 0, 1),
    ]  # fmt: skip


def test_single_gradients_are_taken_as_if_each_were_alone() -> None:
    """A fingerprint among several is weighted by its position, and its lanes are turned by it."""
    pair = ran(110, 0, gradient(3.0, 11), gradient(4.0, 12))
    [node] = whole_value(pair)
    weights = multipliers(1 << 40, 2)
    expected = 11 + signed(12 * int(weights[1]) % (1 << 64))
    sum_of = expected - (1 << 61) * int(expected / (1 << 61))  # as SQL's remainder does: to zero
    assert node["grad_input_fingerprint"] == sum_of
    turned = [4.0, 0.0, 0.0, 2.0]
    turned = [turned[(lane - 1) % 4] for lane in range(4)]
    assert node["grad_input_sketch"] == [
        a + b for a, b in zip([3.0, 0.0, 0.0, 2.0], turned, strict=True)
    ]


def test_half_that_gave_no_gradient_leaves_what_the_other_gave() -> None:
    [node] = whole_value(ran(110, 0), ran(120, 1, gradient(4.0, 12)))
    assert (node["grad_input_norm"], node["grad_input_count"]) == (4.0, 1)
    [nothing] = whole_value(ran(110, 0))
    assert (nothing["grad_input_norm"], nothing["grad_input_count"]) == (None, 0)


def test_half_that_failed_is_the_nodes_outcome() -> None:
    [node] = whole_value(ran(110, 0, outcome="ok"), ran(120, 1, outcome="raised"))
    assert node["outcome"] == "raised"


def test_nodes_that_add_to_parameters_and_those_of_no_stage_are_left_out() -> None:
    assert whole_value(ran(110, 0, node_name="AccumulateGrad"), ran(120, 0, stage_index=None)) == []
