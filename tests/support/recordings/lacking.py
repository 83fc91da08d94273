"""A run without one of its tables, or without that table's values: as a recorder leaves it that never saw them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

# Ways in which a table is missing: its files were `lost`; it was `never` recorded; its rows have no `values`.
WAYS = ("lost", "never", "values")

_NUMBERS = ("norm", "abs_max", "sum", "nan_count", "inf_count", "fingerprint", "sketch")


def without(run: Path, table: str, way: str, place: Path) -> Path:
    """A copy of the run at `place` that lacks the table in this way; files that stay are shared with the run."""
    shutil.copytree(run, place, copy_function=os.link)
    if way == "values":
        for part in (place / table).rglob("*.parquet"):
            _rewrite(
                part, {name for name in _NUMBERS} | {"loss", "learning_rate", "hyperparameters"}
            )
    else:
        shutil.rmtree(place / table)
    if way == "lost":
        return place
    for rank in (place / "ranks").glob("*.json"):
        facts = json.loads(rank.read_text())
        if way == "never":
            facts["recorded"].pop(table, None)
        _replace(rank, json.dumps(facts).encode())
    # What was not recorded has no digest.
    for part in (place / "steps").rglob("*.parquet"):
        _rewrite(part, {n for n in pq.read_schema(part).names if n.startswith("digest_")})
    return place


def tables_of(run: Path) -> list[str]:
    """The tables that a run holds parts of."""
    return sorted({part.parent.parent.name for part in run.rglob("*.parquet")})


def _rewrite(part: Path, columns: set[str]) -> None:
    """The part with null in these columns, and in those that end with one of their names."""
    rows = pq.read_table(part)
    for n, field in enumerate(rows.schema):
        if field.name in columns or any(field.name.endswith(f"_{name}") for name in columns):
            nothing: Any = pa.nulls(len(rows), field.type)
            rows = rows.set_column(n, field.with_nullable(True), nothing)
    part.unlink()
    pq.write_table(rows, part)


def _replace(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)
