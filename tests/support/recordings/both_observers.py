"""Hold what the two observers recorded of one job against each other: all rows, in their order."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gradtrace_analyzer.runs.opening import open_run
from gradtrace_analyzer.sql.views import connect
from gradtrace_schemas import TABLES
from support.recordings.in_process import recording

# What counts on in one process, or says where code lies. Clocks are left out by their unit.
_APART = {"thread", "traceback"}
OF_OBSERVERS = ("node_events", "node_tensors", "gradients", "backward_passes", "failures")


def comparable(run: Path, names: Sequence[str] = OF_OBSERVERS) -> dict[str, list[dict[str, Any]]]:
    """All rows of these tables; sequence numbers counted from the first of each table."""
    found = {}
    with contextlib.closing(connect([open_run(run)])) as connection:
        for name in names:
            columns = [
                c.name
                for c in TABLES[name].columns
                if c.name not in _APART and not c.name.endswith("_ns")
            ]
            wanted = ", ".join(f'"{column}"' for column in columns)
            query = f"SELECT {wanted} FROM {name} ORDER BY record_index"
            answer = connection.execute(query).fetchall()
            found[name] = [dict(zip(columns, row, strict=True)) for row in answer]
    for of_table in found.values():
        numbers = [r["autograd_seq"] for r in of_table if r.get("autograd_seq") is not None]
        for row in of_table:
            if row.get("autograd_seq") is not None:
                row["autograd_seq"] -= min(numbers)
    return found


def assert_same(native_rows: Any, python_rows: Any, at: str = "", scale: float = 1.0) -> None:
    """Equal, but for the last digits of norms, sums and sketches."""
    if isinstance(python_rows, dict):
        assert native_rows.keys() == python_rows.keys(), at
        norms = [v for k, v in python_rows.items() if k.endswith("norm") and v is not None]
        for key, value in python_rows.items():
            assert_same(native_rows[key], value, f"{at}/{key}", max([1e-30, *norms]))
    elif isinstance(python_rows, list):
        assert len(native_rows) == len(python_rows), at
        for n, (one, other) in enumerate(zip(native_rows, python_rows, strict=True)):
            assert_same(one, other, f"{at}/{n}", scale)
    elif isinstance(python_rows, float) and not at.endswith("abs_max"):
        assert native_rows == pytest.approx(python_rows, abs=4e-6 * scale, rel=1e-6, nan_ok=True), (
            at
        )
    else:
        assert native_rows == python_rows, at


def both(folder: Path, job: Callable[[], Any], **settings: Any) -> dict[str, Any]:
    """Record the job with each observer, hold the rows against each other, and give the native observer's account."""
    results = []
    for observer in ("python", "native"):
        with recording(folder / observer, observer=observer, **settings):
            results.append(job())
    assert repr(results[0]) == repr(results[1])
    python_rows = comparable(folder / "python")
    assert python_rows["node_events"]
    assert_same(comparable(folder / "native"), python_rows)
    rank = json.loads((folder / "native" / "ranks" / "rank=00000-0.json").read_text())
    account: dict[str, Any] = rank["observer"]
    return account
