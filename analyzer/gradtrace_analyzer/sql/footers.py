"""How many rows each rank has of each table: from the ends of its parts, without reading the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import duckdb
import pyarrow as pa

from gradtrace_analyzer.runs.run import Run, Stretch
from gradtrace_analyzer.sql.views import path_list
from gradtrace_schemas import TABLES


@dataclass(frozen=True)
class Counts:
    """Rows by (table, rank), those that only a journal holds included."""

    rows: Mapping[tuple[str, int], int]

    def of(self, table: str, rank: int | None = None) -> int:
        """How many rows of a table a rank has, or all ranks together (None); 0 where it is not known."""
        if rank is not None:
            return self.rows.get((table, rank), 0)
        return sum(count for (name, _), count in self.rows.items() if name == table)


def table_counts(connection: duckdb.DuckDBPyConnection, side: str, tables: Sequence[str]) -> Counts:
    """The rows of a side's views as they are now, which may not be what its parts hold, by table and rank."""
    return Counts(
        {
            (name, rank): count
            for name in tables
            for rank, count in connection.execute(
                f"SELECT rank, count(*) FROM {side}.{name} GROUP BY rank"
            ).fetchall()
        }
    )


def row_counts(connection: duckdb.DuckDBPyConnection, run: Run) -> Counts:
    """The rows of a run's parts and journals that are read. The connection keeps the footers for what follows.

    Of an attempt of which later steps are not read, its rows are counted one by one.
    """
    found: dict[tuple[str, int], int] = {}
    for of in run.stretches:
        read = attempt_counts(connection, of.run) if of.end is None else _counted(connection, of)
        for place, count in read.rows.items():
            found[place] = found.get(place, 0) + count
    return Counts(found)


def attempt_counts(connection: duckdb.DuckDBPyConnection, run: Run) -> Counts:
    """All rows of the parts and journals of one attempt, whether a history reads them or not."""
    places = {
        part.path: (part.table, part.rank)
        for by_rank in run.parts.values()
        for parts in by_rank.values()
        for part in parts
    }
    found: dict[tuple[str, int], int] = {}
    if places:
        for path, count in connection.execute(
            f"SELECT file_name, num_rows FROM parquet_file_metadata({path_list(places)})"
        ).fetchall():
            found[places[path]] = found.get(places[path], 0) + count
    for table, by_rank in run.leftovers.items():
        for rank, rows in by_rank.items():
            found[table, rank] = found.get((table, rank), 0) + len(rows)
    return Counts(found)


def _counted(connection: duckdb.DuckDBPyConnection, of: Stretch) -> Counts:
    assert of.end is not None
    own = of.end - of.run.step_shift
    found: dict[tuple[str, int], int] = {}
    for table, by_rank in of.run.parts.items():
        where = f"WHERE step < {own}" if "step" in TABLES[table].key else ""
        for rank, parts in by_rank.items():
            [(count,)] = connection.execute(
                f"SELECT count(*) FROM read_parquet({path_list(p.path for p in parts)}, "
                f"hive_partitioning = false) {where}"
            ).fetchall()
            found[table, rank] = count
    for table, leftovers in of.run.leftovers.items():
        for rank, rows in leftovers.items():
            found[table, rank] = found.get((table, rank), 0) + _read_count(rows, of)
    return Counts(found)


def journal_rows(run: Run, table: str) -> int:
    """How many rows of a table are read from journals."""
    return sum(
        _read_count(rows, of)
        for of in run.stretches
        for rows in of.run.leftovers.get(table, {}).values()
    )


def _read_count(rows: pa.Table, of: Stretch) -> int:
    if of.end is None or "step" not in rows.column_names:
        return len(rows)
    return int((rows.column("step").to_numpy() < of.end - of.run.step_shift).sum())
