"""The query that holds rows against what they are allowed, and what it does without an allowance."""

from __future__ import annotations

from typing import Any

import duckdb
import pytest

from gradtrace_analyzer.diff.links import LINK_TABLES, LinkTable
from gradtrace_analyzer.diff.tolerances.held_rows import as_given, judged_links
from gradtrace_analyzer.diff.tolerances.judgement import Judgement
from support.synthetic_runs.differences import Row, Rows, paired, run_of, sides

BY_NAME: dict[str, LinkTable] = {table.table: table for table in LINK_TABLES}


def node(index: int, error: float, *, name: str = "MmBackward0", **more: Any) -> tuple[Row, Row]:
    key = {"root": 0, "module_fqn": "m", "call_index": 0, "backward_index": 0, "occurrence": 0}
    key |= {"event_index": index, "record_index": 10 + index, "node_name": name}
    came, gave = sides(1e-3, "grad_output_", lanes=4), sides(error, "grad_input_", lanes=4, **more)
    return key | came[0] | gave[0], key | came[1] | gave[1]


def call(error: float) -> tuple[Row, Row]:
    key = {"root": 0, "module_fqn": "m", "phase": "forward", "call_index": 0, "record_index": 5}
    came, gave = sides(0.0, "input_"), sides(error, "output_")
    return key | came[0] | gave[0], key | came[1] | gave[1]


def weight(error: float) -> tuple[Row, Row]:
    key = {
        "root": 0,
        "parameter_fqn": "m.weight",
        "point": "before",
        "kind": "parameter",
        "shape": [10, 10],
    }
    a, b = sides(error)
    return key | a, key | b


def judged(*without: str, forward: float = 1e-4) -> duckdb.DuckDBPyConnection:
    """A drifted weight, a forward that shows it, a ReLU, and a gradient far below the others."""
    nodes = [
        node(0, 2e-3, name="ReluBackward0", numel=400),
        node(1, 2e-3),
        node(2, 2e-3, norm=1e-6),
    ]
    both: list[Rows] = [
        {
            "parameters": [weight(1e-4)[side]],
            "module_calls": [call(forward)[side]],
            "node_events": [n[side] for n in nodes],
        }
        for side in (0, 1)
    ]
    connection = paired(*both)
    Judgement(connection, {s: run_of() for s in ("baseline", "candidate")}, without=without).write()
    return connection


def tolerances(table: str, *without: str, forward: float = 1e-4) -> list[float]:
    query = f"SELECT writes_tolerance FROM differing_{table} ORDER BY place"
    return [
        float(tolerance)
        for (tolerance,) in judged(*without, forward=forward).execute(query).fetchall()
    ]


@pytest.mark.parametrize(
    ("name", "table", "row"),
    [("drift", "module_calls", 0), ("kinks", "node_events", 1), ("noise_floor", "node_events", 2)],
)
def test_row_is_allowed_less_without_what_is_allowed_for_it(
    name: str, table: str, row: int
) -> None:
    assert tolerances(table, name)[row] < 0.9 * tolerances(table)[row]
    assert tolerances(table, "rounded_once") == tolerances(table)


def test_limit_that_is_switched_off_limits_nothing() -> None:
    quiet = 1e-9
    [limited, *_] = tolerances("node_events", forward=quiet)
    assert limited < 0.9 * tolerances("node_events", "seen_noise", forward=quiet)[0]


def test_rows_that_nobody_has_to_judge_count_as_they_are() -> None:
    groups = [
        {"group_index": 0, "optimizer_index": 0, "learning_rate": rate} for rate in (0.1, 0.2)
    ]
    both: list[Rows] = [{"optimizer_groups": [group], "steps": [{}]} for group in groups]
    connection = paired(*both)
    query = as_given(BY_NAME["optimizer_groups"])
    found = connection.execute(f"SELECT given, beyond, exceeds, shown_by FROM ({query})").fetchall()
    assert found == [(True, True, True, None)]


def test_query_names_the_tables_that_its_head_says() -> None:
    text = judged_links(BY_NAME["node_events"], scale=1.0, layers=2)
    assert "kept_node_events" in text and "arriving" in text
    assert "arriving" not in judged_links(BY_NAME["buckets"], scale=1.0, layers=2)
