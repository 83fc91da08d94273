"""The rows of a step around one of them, equal ones too: what a person looks at to see the difference enter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

from gradtrace_analyzer.diff.difference import Change, Difference
from gradtrace_analyzer.diff.links import LINK_TABLES, LinkTable, link_of

_WAYS = {
    "module_calls": ("receives", "returns"),
    "node_events": ("arrives", "leaves"),
    "buckets": ("goes in", "comes out"),
    "stage_events": ("receives", "sends"),
}


@dataclass(frozen=True)
class ChainRow:
    """One tensor (or number) that goes into or out of a row, by its norm on both sides.

    `error` is 0 where both sides recorded it and it is equal, None where there is no number for it. `is_origin` marks
    the rows of the origin itself.
    """

    rank: int
    link: str
    key: Mapping[str, Any]
    way: str
    baseline: float | None
    candidate: float | None
    error: float | None
    tolerance: float | None
    is_origin: bool
    only_in: str | None = None


def chain_rows(
    connection: duckdb.DuckDBPyConnection,
    origin: Difference,
    differences: Sequence[Difference],
    before: int,
    after: int,
) -> list[ChainRow]:
    """The origin's rank in its step: so many rows before it and after it, in program order."""
    apart = {_place(d.table, d.key): d for d in differences if d.rank == origin.rank}
    rows: list[tuple[float, LinkTable, Mapping[str, Any]]] = []
    others: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for table in LINK_TABLES:
        rows += _rows(connection, table, origin)
        of_candidate = _rows(connection, table, origin, "candidate")
        others |= {_place(table.table, row): row for _, _, row in of_candidate}
    known = {_place(table.table, row) for _, table, row in rows}
    for d in apart.values():
        if _place(d.table, d.key) not in known:
            table = next(t for t in LINK_TABLES if t.table == d.table)
            rows.append((d.order, table, d.key))
    rows.sort(key=lambda row: row[0])
    here = _place(origin.table, origin.key)
    found_at = next((n for n, row in enumerate(rows) if _place(row[1].table, row[2]) == here), None)
    at = sum(order < origin.order for order, *_ in rows) if found_at is None else found_at
    found = []
    for n, (_, table, row) in enumerate(
        rows[max(0, at - before) : at + after + 1], max(0, at - before)
    ):
        differing = apart.get(_place(table.table, row))
        found += list(
            _chain_rows(
                origin.rank, table, row, differing, n == found_at, _twin(others, table, row)
            )
        )
    return found


def _chain_rows(
    rank: int,
    table: LinkTable,
    row: Mapping[str, Any],
    d: Difference | None,
    is_origin: bool,
    twin: Mapping[str, Any],
) -> Iterator[ChainRow]:
    """`twin` is the candidate's row, empty where it has none: what one side alone recorded is not equal."""
    link = link_of(table.table, row.get("point"))
    key = {name: row.get(name) for name in table.key}
    only_in = None if d is None else d.only_in
    ways = _WAYS.get(table.table, ("", ""))
    for role, prefix in table.sides:
        norm = row.get(f"{prefix}norm")
        change: Change | None = None if d is None else getattr(d, role)
        if norm is None and change is None:
            continue
        way = ways[0] if role == "reads" else ways[1]
        if change is None:
            # Equal by their fingerprints: norms may have been added up otherwise.
            has_twin = twin.get(f"{prefix}norm") is not None
            other, error = (norm, 0.0) if has_twin else (None, None)
            yield ChainRow(rank, link, key, way, norm, other, error, None, is_origin)
            continue
        a = None if change.baseline is None else change.baseline["norm"]
        b = None if change.candidate is None else change.candidate["norm"]
        error = change.error if change.differs else 0.0
        if (a, b) != (None, None):
            yield ChainRow(rank, link, key, way, a, b, error, change.tolerance, is_origin, only_in)
    if "loss" in table.values and row.get("loss") is not None:
        same = (row["loss"], twin.get("loss"))
        a, b = same if d is None else d.values.get("loss", same)
        size = max(abs(a or 0.0), abs(b or 0.0))
        error = None if a is None or b is None else abs(a - b) / size if size else 0.0
        yield ChainRow(rank, link, key, "is", a, b, error, None, is_origin, only_in)


def _rows(
    connection: duckdb.DuckDBPyConnection,
    table: LinkTable,
    origin: Difference,
    side: str = "baseline",
) -> Iterator[tuple[float, LinkTable, Mapping[str, Any]]]:
    norms = [f"{prefix}norm" for _, prefix in table.sides]
    columns = [*table.key, *norms, *(["loss"] if "loss" in table.values else [])]
    found = connection.execute(
        f"SELECT record_index - (SELECT first FROM step_start s WHERE s.side = '{side}' "
        f"AND s.rank = {origin.rank} AND s.step = {origin.step}), {', '.join(columns)} "
        f"FROM {side}.{table.table} WHERE rank = {origin.rank} AND step = {origin.step} AND {table.only}"
    ).fetchall()
    for order, *values in found:
        yield float(order or 0), table, dict(zip(columns, values, strict=True))


def _twin(
    others: Mapping[tuple[str, ...], Mapping[str, Any]], table: LinkTable, row: Mapping[str, Any]
) -> Mapping[str, Any]:
    return others.get(_place(table.table, row), {})


def _place(table: str, key: Mapping[str, Any]) -> tuple[str, ...]:
    names = next((t.key for t in LINK_TABLES if t.table == table), tuple(sorted(key)))
    return (table, *(str(key.get(name)) for name in names))
