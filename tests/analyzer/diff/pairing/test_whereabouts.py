"""What a row is of: the same words from its key and from SQL."""

from __future__ import annotations

from typing import Any

import duckdb
import pytest

from gradtrace_analyzer.diff.pairing.whereabouts import whereabouts, whereabouts_sql


@pytest.mark.parametrize(
    ("table", "key", "said"),
    [
        ("parameters", {"parameter_fqn": "0.weight"}, "0.weight"),
        ("gradients", {"parameter_fqn": "0.weight"}, "0.weight"),
        ("inputs", {"name": "x"}, "x"),
        ("module_calls", {"module_fqn": "blocks.0"}, "blocks.0"),
        ("node_events", {"module_fqn": "0", "node_name": "MmBackward0"}, "0 (MmBackward0)"),
        (
            "node_events",
            {"module_fqn": None, "node_name": "MmBackward0"},
            "code outside any module (MmBackward0)",
        ),
        ("buckets", {"parameter_fqns": ["b", "a"]}, "the bucket of b"),
        ("optimizer_groups", {"group_index": 0}, None),
    ],
)
def test_row_is_said_alike_in_python_and_in_sql(
    table: str, key: dict[str, Any], said: str | None
) -> None:
    assert whereabouts(table, key) == said
    columns = ", ".join(f"${name} AS key_{name}" for name in key)
    with duckdb.connect() as connection:
        [(found,)] = connection.execute(
            f"SELECT {whereabouts_sql(table)} FROM (SELECT {columns})", key
        ).fetchall()
    assert found == said


def test_bucket_without_parameters_is_of_nothing() -> None:
    assert whereabouts("buckets", {"parameter_fqns": []}) is None
