"""What makes rounding larger on its way back, as tables of the opened steps by place."""

from __future__ import annotations

from typing import Any

import duckdb
import pytest

from gradtrace_analyzer.diff.tolerances.amplification import (
    write_arriving,
    write_kinks,
    write_unsteady,
)
from support.synthetic_runs.differences import Row, Rows, paired, sides

END = 1e18


def node(
    place: int, name: str = "MmBackward0", *, came: float = 1.0, gave: float = 1.0, **more: Any
) -> tuple[Row, Row]:
    """A Node of which something else arrives and leaves, with these norms; it is its place's number in the pass."""
    key = {
        "record_index": place,
        "event_index": place,
        "backward_index": 0,
        "root": 0,
        "module_fqn": "m",
        "call_index": 0,
        "node_name": name,
        **more,
    }
    numel = more.pop("numel", 100)
    first = sides(0.1, "grad_output_", norm=came, lanes=4)
    left = sides(0.1, "grad_input_", norm=gave, lanes=4, numel=numel)
    key.pop("numel", None)
    return key | first[0] | left[0], key | first[1] | left[1]


def pairs(*nodes: tuple[Row, Row], **tables: list[Row]) -> duckdb.DuckDBPyConnection:
    both: list[Rows] = [{"node_events": [n[side] for n in nodes], **tables} for side in (0, 1)]
    return paired(*both)


def test_largest_gradient_that_arrives_at_a_modules_nodes_is_kept() -> None:
    connection = pairs(
        node(0, came=2.0),
        node(1, came=5.0),
        node(2, came=9.0, parameter_fqn="m.w"),  # what arrives at a parameter is what is summed already
        node(3, came=7.0, module_fqn="n", step=1),
        node(4, came=8.0, module_fqn=None),
    )  # fmt: skip
    write_arriving(connection)
    found = connection.execute(
        "SELECT rank, step, root, module_fqn, norm FROM arriving ORDER BY ALL"
    )
    assert found.fetchall() == [(0, 0, 0, "m", 5.0), (0, 1, 0, "n", 7.0)]


def normalised(size: float) -> Row:
    """A forward of module m with a hundred inputs of this size each."""
    key = {"root": 0, "module_fqn": "m", "phase": "forward", "call_index": 0, "record_index": 9}
    return key | sides(0.0, "input_", norm=10 * size)[0]


@pytest.mark.parametrize(
    ("came", "gave", "size", "times"),
    [
        (1.0, 0.25, 1.0, 4.0),  # what is left is a quarter of what came in
        (1.0, 0.25, 0.5, 8.0),  # small inputs are made large: their gradients too
        (1.0, 4.0, 1.0, 1.0),  # nothing cancels
        (1.0, 1e-9, 1.0, 1e4),  # no more than that is believed
    ],
)
def test_normalisation_amplifies_by_what_cancels_in_it(
    came: float, gave: float, size: float, times: float
) -> None:
    rows = [node(3, "NativeLayerNormBackward0", came=came, gave=gave), node(4)]
    connection = pairs(*rows, module_calls=[normalised(size)])
    write_arriving(connection)
    assert connection.execute("FROM cancelling").fetchall() == [
        (0, 0, 0.0, END, pytest.approx(times))
    ]


def test_normalisations_in_a_row_multiply_what_they_amplify() -> None:
    rows = [node(3 + n, "NativeBatchNormBackward0", gave=0.25) for n in range(2)]
    connection = pairs(*rows, module_calls=[normalised(1.0)])
    write_arriving(connection)
    found = connection.execute(
        "SELECT place, until, times FROM cancelling ORDER BY place"
    ).fetchall()
    assert found == [(0.0, 1.0, pytest.approx(4.0)), (1.0, END, pytest.approx(16.0))]


def with_noise(connection: duckdb.DuckDBPyConnection, change: float) -> None:
    connection.execute(
        f"CREATE TEMP TABLE seen_noise AS SELECT 0 AS rank, 0 AS step, {change}::DOUBLE AS change"
    )


@pytest.mark.parametrize(
    ("name", "is_kinked"),
    [
        ("ReluBackward0", True),
        ("HardtanhBackward0", True),
        ("AdaptiveMaxPool2DBackward0", True),
        ("AdaptiveAvgPool2DBackward0", False),
        ("GeluBackward0", False),
        ("SoftmaxBackward0", False),
    ],
)
def test_elements_on_the_wrong_side_of_a_kink_are_allowed_for_from_there_on(
    name: str, is_kinked: bool
) -> None:
    connection = pairs(node(3, name, numel=400), node(4))
    with_noise(connection, 0.01)
    write_kinks(connection)
    share = 0.64 * 0.01 + 2 / 400
    found = connection.execute("SELECT place, until, extra FROM kinked").fetchall()
    assert found == ([(0.0, END, pytest.approx(2 * share**0.5))] if is_kinked else [])


def test_kinks_in_a_row_add_up_and_one_of_which_no_element_turns_is_none() -> None:
    connection = pairs(*(node(3 + n, "ReluBackward0", numel=400) for n in range(2)))
    with_noise(connection, 0.01)
    write_kinks(connection)
    share = 0.64 * 0.01 + 2 / 400
    extras = connection.execute("SELECT extra FROM kinked ORDER BY place").fetchall()
    assert extras == [(pytest.approx(2 * share**0.5),), (pytest.approx(2 * (2 * share) ** 0.5),)]
    few = pairs(node(3, "ReluBackward0", numel=400))
    with_noise(few, 1e-5)  # 0.0026 of an element
    write_kinks(few)
    assert few.execute("SELECT extra FROM kinked").fetchall() == [(0.0,)]


def test_nodes_that_disagreed_with_themselves_may_err_by_four_times_that_from_there_on() -> None:
    replayed = [
        node(3, replay_equal=False, replay_error=1e-3),
        node(4, replay_equal=True, replay_error=0.0),
        node(5, replay_equal=False, replay_error=1e-4),
        node(6, replay_equal=False, replay_error=1e-2),
    ]
    connection = pairs(*replayed)
    write_unsteady(connection)
    found = connection.execute("SELECT place, until, extra FROM unsteady ORDER BY place").fetchall()
    assert found == [
        (0.0, 2.0, pytest.approx(4e-3)),
        (2.0, 3.0, pytest.approx(4e-3)),
        (3.0, END, pytest.approx(4e-2)),
    ]


def test_either_side_may_be_the_one_that_disagreed_with_itself() -> None:
    a, b = node(3, replay_equal=True, replay_error=0.0)
    connection = pairs((a, b | {"replay_equal": False, "replay_error": 1e-3}))
    write_unsteady(connection)
    assert connection.execute("SELECT extra FROM unsteady").fetchall() == [(pytest.approx(4e-3),)]
