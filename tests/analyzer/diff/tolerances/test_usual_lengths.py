"""By how much Nodes and modules lengthen what they hand on: what is usual in a step, and what comes back each time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import duckdb
import pytest

from gradtrace_analyzer.diff.tolerances.lengths import HERE, write_steady, write_usual_gain
from gradtrace_analyzer.sql.derived import derived
from support.synthetic_runs.differences import Row, Rows, paired, sides


def node(index: int, gain: float, *, step: int = 0, **more: Any) -> tuple[Row, Row]:
    """A Node that hands on `1 + gain` times as much as in the baseline, of what arrives alike."""
    came = sides(0.0, "grad_output_", lanes=4)
    gave = sides(1e-3, "grad_input_", times=1 + gain, lanes=4)
    key: Row = {
        "root": 0,
        "module_fqn": f"m{index}",
        "call_index": 0,
        "occurrence": 0,
        "step": step,
    }
    key |= {"backward_index": 0, "event_index": index, "node_name": "MmBackward0"}
    return key | came[0] | gave[0] | more, key | came[1] | gave[1] | more


def call(index: int, gain: float) -> tuple[Row, Row]:
    came, gave = sides(0.0, "input_"), sides(1e-3, "output_", times=1 + gain)
    key = {"root": 0, "module_fqn": f"m{index}", "phase": "forward", "call_index": 0}
    return key | came[0] | gave[0], key | came[1] | gave[1]


def pairs(
    nodes: Sequence[tuple[Row, Row]], calls: Sequence[tuple[Row, Row]] = ()
) -> duckdb.DuckDBPyConnection:
    both: list[Rows] = [
        {"node_events": [n[side] for n in nodes], "module_calls": [c[side] for c in calls]}
        for side in (0, 1)
    ]
    return paired(*both)


GAINS = [1e-3, -2e-3, 3e-3, 1e-3, -2e-3, 0.5]


def usual(connection: duckdb.DuckDBPyConnection) -> dict[str, float]:
    write_usual_gain(connection)
    found = connection.execute("SELECT link_table, gain FROM usual_gain").fetchall()
    return dict(found)


def test_usual_of_nodes_is_their_mean_square_without_the_largest() -> None:
    nodes = [node(n, gain) for n, gain in enumerate(GAINS)]
    rest = (sum(g * g for g in GAINS[:5]) / 5) ** 0.5
    assert usual(pairs(nodes)) == {"node_events": pytest.approx(rest, rel=1e-3)}


def test_usual_of_modules_which_hold_each_other_is_the_median() -> None:
    calls = [call(n, gain) for n, gain in enumerate(GAINS)]
    assert usual(pairs([], calls)) == {"module_calls": pytest.approx(2e-3, rel=1e-3)}


def test_nothing_is_usual_of_a_few_or_of_those_that_show_no_noise() -> None:
    assert usual(pairs([node(n, 1e-3) for n in range(5)])) == {}
    exact = [node(5, 1e-9), node(6, 1e-3, grad_input_numel=32), node(7, 1e-3, parameter_fqn="w")]
    assert usual(pairs([*(node(n, 1e-3) for n in range(5)), *exact])) == {}


def steady(*gains: float, others: Sequence[tuple[Row, Row]] = (), **more: Any) -> list[int]:
    """The steps in which one Node is told by its length, which it changes by these in as many steps."""
    nodes = [node(0, gain, step=step, **more) for step, gain in enumerate(gains)]
    connection = pairs([*nodes, *others])
    write_steady(connection)
    found = connection.execute(
        "SELECT step FROM kept_node_events JOIN steady USING (id) WHERE key_module_fqn = 'm0' ORDER BY step"
    ).fetchall()
    return [step for (step,) in found]


ALIKE = [0.01, 0.010001, 0.009999, 0.01]


def test_same_factor_four_times_in_a_row_is_told_in_all_of_them() -> None:
    assert steady(*ALIKE) == [0, 1, 2, 3]
    assert steady(0.3, *ALIKE, -0.2) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "gains",
    [
        ALIKE[:3],  # three times may be chance
        [0.01, 0.01, 0.3, 0.01, 0.01, 0.01],
        [0.01, 0.0101, 0.0102, 0.0103],  # alike to no thousandth
        [0.01, -0.01, 0.01, -0.01],
        [4e-4] * 4,  # what is given to 1e-7 is not the same to a thousandth
    ],
)
def test_factor_that_does_not_come_back_each_time_is_rounding(gains: list[float]) -> None:
    assert steady(*gains) == []


def test_constant_that_was_rounded_to_the_rows_dtype_is_legal() -> None:
    coarse: dict[str, Any] = {"grad_input_dtype": "bfloat16"}  # 2^-8: twice that is 0.0078
    assert steady(*[0.007] * 4, **coarse) == []
    assert steady(*[0.009] * 4, **coarse) == [0, 1, 2, 3]


def test_noise_that_comes_back_everywhere_is_no_factor() -> None:
    """The same batch at every step: a quarter of the Nodes that show noise may be steady, and no more."""
    again = [node(n, 0.02, step=step) for n in (1, 2) for step in range(4)]
    noisy = [node(n, (-1) ** step * 0.02, step=step) for n in range(3, 12) for step in range(4)]
    assert steady(*ALIKE, others=again) == []
    assert steady(*ALIKE, others=[*again, *noisy]) == [0, 1, 2, 3]


def test_tolerance_of_what_is_steady_is_the_smallest_factor_that_counts() -> None:
    connection = pairs([node(0, gain, step=step) for step, gain in enumerate(ALIKE)])
    write_steady(connection)
    found = connection.execute("SELECT DISTINCT least FROM steady")
    assert found.fetchall() == [(5e-4,)]


def test_what_is_beyond_its_tolerance_already_is_told_by_that() -> None:
    connection = pairs([node(0, gain, step=step) for step, gain in enumerate(ALIKE)])
    write_steady(connection)
    judged = (
        "SELECT *, step = 2 AS exceeds, step = 2 AS beyond, NULL::VARCHAR AS shown_by, 0.1 AS writes_tolerance "
        "FROM kept_node_events"
    )
    query = derived(HERE, "judged_steady").rows(judged=judged, steady="s.least")
    found = connection.execute(
        f"SELECT shown_by, beyond AND exceeds, writes_tolerance FROM ({query}) ORDER BY step"
    ).fetchall()
    told = ("steady", True, 5e-4)
    assert found == [told, told, (None, True, 0.1), told]
