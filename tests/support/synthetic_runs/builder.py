"""Builds a run's directory from rows given as plain dicts, so that the analyzer's tests need no torch.

What is written is what the recorder would write: the same parts, json files and names. It is deterministic:
the same rows give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gradtrace_schemas import SCHEMA_VERSION, TABLES, layout
from gradtrace_schemas.batches import write_part
from gradtrace_schemas.summary import reference_summary
from gradtrace_schemas.table import SKETCH_LANES, Table

Row = Mapping[str, Any]


def build_run(
    path: Path,
    rows: Mapping[str, Sequence[Row]] | None = None,
    *,
    world_size: int = 1,
    attempt: int = 0,
    absent: Collection[int] = (),
    unclosed: Collection[int] = (),
    rank_facts: Row | None = None,
) -> Path:
    """A run with these rows by table, one part per table and rank; a row's `rank` is 0 unless it says so.

    Ranks in `absent` leave nothing, not even their rows; those in `unclosed` were not closed. `rank_facts`
    replaces columns of `ranks` for all of them. Called again with another attempt, it adds that attempt.
    """
    started = {"world_size": world_size, "schema_version": SCHEMA_VERSION, "token": f"{attempt}"}
    if not (path / layout.RUN_FILE).exists():
        write_json(path / layout.RUN_FILE, started)
    write_json(layout.attempt_file(path, attempt), started)
    by_table = rows or {}
    for rank in range(world_size):
        if rank in absent:
            continue
        mine = {
            name: [row for row in of_table if row.get("rank", 0) == rank]
            for name, of_table in by_table.items()
        }
        first_record = 1
        for name, of_rank in mine.items():
            if of_rank:
                add_part(path, name, of_rank, rank=rank, attempt=attempt, first_record=first_record)
                first_record += len(of_rank)
        steps = [row.get("step", 0) for of_rank in mine.values() for row in of_rank]
        facts = {
            **facts_of(rank, world_size, attempt),
            "complete": rank not in unclosed,
            "last_step": max(steps, default=None),
            "recorded": {name: len(of_rank) for name, of_rank in mine.items()},
        }
        write_json(layout.rank_file(path, rank, attempt), {**facts, **(rank_facts or {})})
    return path


def facts_of(rank: int, world_size: int, attempt: int = 0) -> dict[str, Any]:
    """What a rank says of itself, but for what it recorded."""
    return {
        "rank": rank,
        "attempt": attempt,
        "world_size": world_size,
        "local_rank": rank,
        "host": "host0",
        "pid": 1000 + rank,
        "device": "cpu",
        "versions": {"gradtrace": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        "settings": {"detail": "nodes", "summary": "full", "ranks": []},
        "environment": {"num_threads": 1},
        "command": ["train.py"],
        "dropped": {},
        "unsummarised": {},
        "problems": [],
        "wall_start_ns": 1_700_000_000_000_000_000,
        "wall_end_ns": 1_700_000_001_000_000_000,
        "monotonic_start_ns": 5_000_000_000,
    }


def add_part(
    path: Path,
    table: str,
    rows: Sequence[Row] | pa.Table,
    *,
    rank: int = 0,
    attempt: int = 0,
    first_record: int = 1,
    last_record: int | None = None,
) -> Path:
    """Write one more part, after those that are there. Many rows are quicker given as an Arrow table."""
    made = rows if isinstance(rows, pa.Table) else part_rows(table, rows, attempt, first_record)
    folder = layout.table_folder(path, table, rank)
    numbers = (layout.attempt_and_number(p.name) for p in folder.glob("*.parquet"))
    number = sum(1 for found in numbers if found is not None and found[0] == attempt)
    part = layout.part_file(path, table, rank, attempt, number)
    newest = first_record + len(made) - 1 if last_record is None else last_record
    write_part(part, TABLES[table], made, newest)
    return part


def part_rows(table: str, rows: Sequence[Row], attempt: int = 0, first_record: int = 1) -> pa.Table:
    """Rows as a part holds them: columns that a row lacks are null, but `step` and `microbatch` are 0."""
    schema = TABLES[table].arrow_schema
    _require_columns(TABLES[table], rows)
    defaults = {"attempt": attempt, "step": 0, "microbatch": 0}
    return pa.table(
        [
            pa.array(
                [
                    row.get(
                        field.name,
                        first_record + n
                        if field.name == "record_index"
                        else defaults.get(field.name),
                    )
                    for n, row in enumerate(rows)
                ],
                field.type,
            )
            for field in schema
        ],
        schema=schema,
    )


def summary_columns(
    values: npt.ArrayLike, prefix: str = "", lanes: int = SKETCH_LANES
) -> dict[str, Any]:
    """The columns of a tensor's summary, by the reference implementation."""
    array = np.asarray(values)
    summary = reference_summary(array)
    folded = np.asarray(summary.sketch, np.float32).reshape(-1, lanes).sum(axis=0)
    return {
        f"{prefix}numel": summary.numel,
        f"{prefix}dtype": str(array.dtype),
        f"{prefix}norm": summary.norm,
        f"{prefix}abs_max": summary.abs_max,
        f"{prefix}sum": summary.sum,
        f"{prefix}nan_count": summary.nan_count,
        f"{prefix}inf_count": summary.inf_count,
        f"{prefix}fingerprint": summary.fingerprint,
        f"{prefix}sketch": folded.tolist(),
    }


def _require_columns(table: Table, rows: Sequence[Row]) -> None:
    """A misspelt column would be a null that nobody meant."""
    known = {column.name for column in table.columns}
    for row in rows:
        unknown = set(row) - known
        if unknown:
            raise KeyError(f"{table.name} has no column {sorted(unknown)}")


def write_json(path: Path, content: Row) -> None:
    """Write a file of the run, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
