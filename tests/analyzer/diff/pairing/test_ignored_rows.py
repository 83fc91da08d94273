"""Rows that one side alone has and that are no difference."""

from __future__ import annotations

import duckdb
import pytest

from gradtrace_analyzer.diff.pairing.ignored_rows import ignore_rows
from support.synthetic_runs.builder import summary_columns
from support.synthetic_runs.differences import Row, Rows, paired


def carried(name: str, values: list[float]) -> Row:
    key = {"root": 0, "parameter_fqn": name, "backward_index": 0}
    return {**key, "point": "carried", **summary_columns(values)}


def bucket(names: list[str], backward_index: int) -> Row:
    key = {"root": 0, "module_fqn": "", "backward_index": backward_index}
    return {**key, "kind": "all_reduce", "parameter_fqns": names, "step": 1}


def node(rank: int, step: int) -> Row:
    return {"root": 0, "module_fqn": "m", "node_name": "A", "rank": rank, "step": step}


STEPS = [{"rank": rank, "step": step} for rank in (0, 1) for step in (0, 1)]
BASELINE: Rows = {
    "steps": STEPS,
    "gradients": [
        carried("zeros", [0.0, 0.0]),
        carried("values", [0.0, 1.0]),
        carried("nan", [0.0, float("nan")]),
        {**carried("local", [0.0, 0.0]), "point": "local"},
    ],
    "buckets": [bucket(["a", "b"], 0), bucket(["c"], 2)],
    "node_events": [node(rank, step) for rank in (0, 1) for step in (0, 1)],
}
CANDIDATE: Rows = {"steps": STEPS, "buckets": [bucket(["a"], 0), bucket(["b"], 0)]}


@pytest.fixture(scope="module")
def pairs() -> duckdb.DuckDBPyConnection:
    return paired(BASELINE, CANDIDATE)


def left(
    connection: duckdb.DuckDBPyConnection, table: str, columns: str
) -> list[tuple[object, ...]]:
    return connection.execute(f"SELECT {columns} FROM kept_{table} ORDER BY ALL").fetchall()


def test_rows_of_one_side_are_kept_unless_they_mean_nothing(
    pairs: duckdb.DuckDBPyConnection,
) -> None:
    pairs.execute("BEGIN")
    ignore_rows(pairs, {}, unmatched=True)
    # A carried gradient of zeros is none; one that holds NaN is one.
    assert left(pairs, "gradients", "key_parameter_fqn") == [("local",), ("nan",), ("values",)]
    # The candidate reduced the same pass in other buckets; a pass without any of its own stays.
    assert left(pairs, "buckets", "key_parameter_fqns") == [(["c"],)]
    assert len(left(pairs, "node_events", "rank, step")) == 4
    pairs.execute("ROLLBACK")


def test_what_one_side_alone_has_counts_for_nothing_where_they_were_asked_differently(
    pairs: duckdb.DuckDBPyConnection,
) -> None:
    pairs.execute("BEGIN")
    ignore_rows(pairs, {}, unmatched=False)
    assert left(pairs, "gradients", "rank") == left(pairs, "node_events", "rank") == []
    pairs.execute("ROLLBACK")


@pytest.mark.parametrize(
    ("ends", "kept"),
    [
        (
            {"candidate": {1: [1]}},
            [(0, 0), (0, 1), (1, 0)],
        ),  # it was cut off there: the rest is missing
        ({"candidate": {0: [0], 1: [1]}}, [(0, 1), (1, 0)]),
        (
            {"baseline": {1: [1]}},
            [(0, 0), (0, 1), (1, 0), (1, 1)],
        ),  # what it does have is no less there
    ],
)
def test_what_is_missing_at_the_torn_end_of_a_side_is_no_difference(
    ends: dict[str, dict[int, list[int]]],
    kept: list[tuple[int, int]],
    pairs: duckdb.DuckDBPyConnection,
) -> None:
    pairs.execute("BEGIN")
    ignore_rows(pairs, ends, unmatched=True)
    assert left(pairs, "node_events", "rank, step") == kept
    pairs.execute("ROLLBACK")


@pytest.mark.parametrize(("has_any", "count"), [(False, 0), (True, 1)])
def test_parameters_of_a_side_are_alone_where_the_other_recorded_some(
    has_any: bool, count: int
) -> None:
    def weight(name: str) -> Row:
        return {"root": 0, "parameter_fqn": name, "point": "before", **summary_columns([1.0])}

    steps = [{"step": 0}]
    other: Rows = {"steps": steps, "parameters": [weight("a")] if has_any else []}
    connection = paired({"steps": steps, "parameters": [weight("a"), weight("b")]}, other)
    ignore_rows(connection, {}, unmatched=True)
    query = "SELECT count(*) FROM kept_parameters WHERE only_in IS NOT NULL"
    assert connection.execute(query).fetchall() == [(count,)]
