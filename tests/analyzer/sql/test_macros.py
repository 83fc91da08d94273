"""The macros that every connection has: each says the same as its function in Python, and costs what its text does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

import gradtrace_analyzer
from gradtrace_analyzer.numerics.sketches import (
    closest_multiple,
    on_node_lanes,
    relative_error,
    relative_error_sql,
)
from gradtrace_analyzer.numerics.tolerance import PRECISIONS, ROUNDOFF, roundoff
from gradtrace_analyzer.runs.opening import open_run
from gradtrace_analyzer.sql.views import connect, connect_pair
from gradtrace_schemas.table import NODE_SKETCH_LANES, SKETCH_LANES
from support.synthetic_runs.builder import build_run

ROOT = Path(gradtrace_analyzer.__file__).parent


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    with connect([open_run(build_run(tmp_path / "a"))], tables=()) as opened:
        yield opened


def one(connection: duckdb.DuckDBPyConnection, expression: str, *values: Any) -> Any:
    [(found,)] = connection.execute(f"SELECT {expression}", list(values)).fetchall()
    return found


def test_pairs_of_runs_have_them_too(tmp_path: Path) -> None:
    run = open_run(build_run(tmp_path / "a"))
    with connect_pair(run, run) as pair:
        assert one(pair, "owner_of('blocks.0.weight')") == "blocks.0"


def test_unit_roundoff_is_that_of_the_table(connection: duckdb.DuckDBPyConnection) -> None:
    for dtype in (*ROUNDOFF, "float8_of_tomorrow", "int64", "bool", "", None):
        assert one(connection, "roundoff(?)", dtype) == roundoff(dtype)
    assert set(PRECISIONS.values()) < set(ROUNDOFF.values())


@pytest.mark.parametrize("parameter", ["weight", "0.weight", "blocks.0.attn.wq.weight", "", "a."])
def test_owner_is_what_stands_before_the_last_dot(
    parameter: str, connection: duckdb.DuckDBPyConnection
) -> None:
    assert one(connection, "owner_of(?)", parameter) == parameter.rpartition(".")[0]
    assert one(connection, "owner_of(NULL)") is None


def relative(connection: duckdb.DuckDBPyConnection, *sides: dict[str, Any]) -> Any:
    """The macro's answer for two summaries as columns."""
    columns = ", ".join(f"{{}}::{type} AS {name}" for name, type in _TYPES.items())
    a, b = (f"(SELECT {columns.format(*('?' * len(_TYPES)))})" for _ in "ab")
    values = [side.get(name) for side in sides for name in _TYPES]
    [(found,)] = connection.execute(
        f"SELECT {relative_error_sql('a.', 'b.')} FROM {a} a, {b} b", values
    ).fetchall()
    return found


_TYPES = {"norm": "DOUBLE", "sketch": "FLOAT[]", "nan_count": "BIGINT", "inf_count": "BIGINT"}


def test_relative_error_is_that_of_python(connection: duckdb.DuckDBPyConnection) -> None:
    draw = np.random.default_rng(0)
    for lanes, others in ((4, 4), (16, 16), (16, 4)):
        a, b = (
            {"norm": float(norm), "sketch": draw.standard_normal(count).astype("f4").tolist()}
            for norm, count in zip(draw.random(2), (lanes, others), strict=True)
        )
        # What the norms alone show where there are no sketches of one width: the sums are left out.
        expected = relative_error({**a, "sum": 0.0}, {**b, "sum": 0.0})
        assert relative(connection, a, b) == pytest.approx(expected, rel=1e-15)


def test_relative_error_is_null_of_other_counts_and_zero_of_nothing(
    connection: duckdb.DuckDBPyConnection,
) -> None:
    some = {"norm": 1.0, "sketch": [1.0] * 4, "nan_count": 0, "inf_count": 0}
    for count in ("nan_count", "inf_count"):
        assert relative(connection, some, {**some, count: 1}) is None
        assert relative(connection, some, {**some, count: None}) == 0.0
    nothing = {"norm": 0.0, "sketch": [1.0] * 4}
    assert relative(connection, nothing, {**nothing, "sketch": [2.0] * 4}) == 0.0
    assert relative(connection, nothing, {"norm": 2.0}) == 1.0


def test_factor_and_what_it_leaves_over_are_those_of_python(
    connection: duckdb.DuckDBPyConnection,
) -> None:
    a, b = np.random.default_rng(1).standard_normal((2, 16)).tolist()
    expected = closest_multiple(a, b)
    assert expected is not None
    found = connection.execute(
        "SELECT least_squares_factor(a, b) AS factor, left_over(a, b, factor) "
        "FROM (SELECT $1::DOUBLE[] AS a, $2::DOUBLE[] AS b)",
        [a, b],
    ).fetchone()
    assert found == pytest.approx((expected.factor, expected.left_over / expected.norm), rel=1e-12)


def test_sketch_folds_onto_the_lanes_of_nodes_as_in_python(
    connection: duckdb.DuckDBPyConnection,
) -> None:
    lanes = np.random.default_rng(2).integers(-1000, 1000, SKETCH_LANES).astype(float).tolist()
    found = one(connection, "on_node_lanes(?::FLOAT[])", lanes)
    assert len(found) == NODE_SKETCH_LANES and found == on_node_lanes(lanes)


def test_call_is_replaced_by_the_text_of_the_macro(connection: duckdb.DuckDBPyConnection) -> None:
    """So that a query costs what it does with everything written out."""
    connection.execute(
        "CREATE TABLE t AS SELECT 'w.b' AS fqn, [1.0::FLOAT] AS a, [2.0::FLOAT] AS b"
    )
    plans = [
        connection.execute(f"EXPLAIN SELECT {expression} FROM t").fetchall()
        for expression in (
            "owner_of(fqn), sketch_distance(a, b)",
            r"regexp_replace(fqn, '\.?[^.]*$', ''), list_distance(a::DOUBLE[], b::DOUBLE[])",
        )
    ]
    assert plans[0] == plans[1]


# What a macro says, by how it would be written out.
_WRITTEN_OUT = (
    r"\[\^\.\]\*\$",
    r"list_distance\(",
    r"/ list_dot_product|sqrt\(list",
    r"'float64' THEN",
    r"sketch\[\{",
)


def test_no_query_writes_out_what_a_macro_says() -> None:
    written = {
        (str(path.relative_to(ROOT)), pattern)
        for path in [*ROOT.rglob("*.py"), *(ROOT / "sql" / "queries").glob("*.sql")]
        for pattern in _WRITTEN_OUT
        if re.search(pattern, path.read_text(encoding="utf-8"))
    }
    # The sums over parts of Nodes in halves are of one lane each.
    assert written == {("diff/divided/halves.py", r"sketch\[\{")}
