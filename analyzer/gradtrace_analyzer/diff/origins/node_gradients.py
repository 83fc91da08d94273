"""The single gradients into or out of a Node, on both sides."""

from __future__ import annotations

from typing import Any

import duckdb

from gradtrace_analyzer.diff.difference import Change, Difference, changed_gradient
from gradtrace_analyzer.diff.links import STATISTICS


def node_gradients(
    connection: duckdb.DuckDBPyConnection, d: Difference, direction: str
) -> tuple[list[Change | None], int, int]:
    """(the gradients into or out of a Node by position, their count on both sides).

    Where the Node has one gradient, or not the same on both sides, the list is empty.
    """
    counts = connection.execute(
        f"SELECT b.{direction}_count, c.{direction}_count FROM baseline.node_events b, "
        f"candidate.node_events c WHERE {_at('b')} AND {_at('c')}",
        _both_places(d),
    ).fetchone()
    of_baseline, of_candidate = counts if counts is not None else (0, 0)
    statistics = ", ".join(f"b.{s}, c.{s}" for s in STATISTICS)
    rows = connection.execute(
        "SELECT b.position, b.fingerprint IS NOT DISTINCT FROM c.fingerprint AND "
        f"b.norm IS NOT DISTINCT FROM c.norm, {statistics} FROM baseline.node_tensors b "
        "JOIN candidate.node_tensors c USING (direction, position) "
        f"WHERE {_at('b')} AND {_at('c')} AND direction = ? ORDER BY 1",
        [*_both_places(d), direction],
    ).fetchall()
    found: list[Change | None] = []
    for position, is_equal, *values in rows:
        found += [None] * (position - len(found))
        found.append(changed_gradient(values, is_equal, d))
    return (found if of_baseline == of_candidate else []), of_baseline, of_candidate


def _at(side: str) -> str:
    """That a row of a side is of one Node: for `_both_places`."""
    columns = ("rank", "step", "backward_index", "event_index")
    return " AND ".join(f"{side}.{column} = ?" for column in columns)


def _both_places(d: Difference) -> list[Any]:
    return [
        value
        for index in d.event_indices
        for value in (d.rank, d.step, d.key["backward_index"], index)
    ]
