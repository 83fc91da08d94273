"""What a run holds: ranks, steps, tables, sizes, what was dropped and what recording cost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import duckdb

from gradtrace_analyzer.progress import progress
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.sql.footers import Counts, journal_rows, row_counts
from gradtrace_analyzer.sql.views import connect
from gradtrace_analyzer.words.numbers import spans
from gradtrace_schemas import ALL_TABLES
from gradtrace_schemas.journal import JOURNAL_TABLES
from gradtrace_schemas.steps import STEPS

# Why a pass is left to Python where `detail` is less than nodes: nothing is lost by it, and none was asked for.
# Source: recorder/gradtrace_recorder/observers/native/observer.py, `_why_python`.
_NO_NODES = "Nodes are not recorded"


@dataclass(frozen=True)
class TableSize:
    """A table of a run. `journal_rows` of its `rows` lie in no part yet; `size_bytes` counts parts."""

    table: str
    rows: int
    part_count: int
    size_bytes: int
    journal_rows: int


@dataclass(frozen=True)
class Inventory:
    """What of a run is read: one attempt, or several. Counts are over all its ranks.

    `versions` and `settings` hold, by name, every value that some rank gave in any of them; `left_to_python` are the
    backward passes that the native observer did not watch, by reason. `recorder_share` is the recorder's own time over
    the time of the steps, None where no step was closed.
    """

    run: Run
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    versions: Mapping[str, tuple[str, ...]]
    settings: Mapping[str, tuple[str, ...]]
    first_step: int | None
    last_step: int | None
    step_count: int
    flight_spans: str | None
    tables: tuple[TableSize, ...]
    dropped: Mapping[str, int]
    unsummarised: Mapping[str, int]
    replay_skipped: Mapping[str, int]
    problems: tuple[str, ...]
    observers: tuple[str, ...]
    left_to_python: Mapping[str, int]
    launchers: Mapping[str, tuple[str, ...]]
    recorder_share: float | None


def inventory(run: Run) -> Inventory:
    """Everything that `analyzer info` says of a run. Reads the footers of its parts and its `steps`."""
    # Every table is asked for its steps where `steps` may lack one.
    asks_all = _may_lack_steps(run) or run.flight_steps is not None or not run.parts["steps"]
    with connect([run], tables=ALL_TABLES if asks_all else (STEPS,)) as connection:
        with progress("counting rows"):
            counts = row_counts(connection, run)
        sizes = tuple(_size(run, counts, table.name) for table in JOURNAL_TABLES)
        first, last, count = _steps(connection, run, sizes)
        flight = _flight_spans(connection, sizes) if run.flight_steps is not None else None
        recorder_ns, step_ns = _row(
            connection, "SELECT sum(recorder_ns), sum(end_ns - start_ns) FROM steps"
        )
    facts = [info.facts for of in run.stretches for info in of.run.ranks.values()]
    merged = [info.facts for info in run.ranks.values()]
    observers = [fact.get("observer") or {} for fact in facts]
    return Inventory(
        run=run,
        hosts=_distinct(f.get("host") for f in facts),
        devices=_distinct(f.get("device") for f in facts),
        versions=_by_name(facts, "versions"),
        settings=_by_name(facts, "settings"),
        first_step=first,
        last_step=last,
        step_count=count,
        flight_spans=flight,
        tables=tuple(size for size in sizes if size.rows or size.part_count),
        dropped=_dropped(run),
        unsummarised=_summed(merged, "unsummarised"),
        replay_skipped=_summed(merged, "replay_skipped"),
        problems=_problems(run),
        observers=_distinct(about.get("kind") for about in observers),
        left_to_python={
            reason: count
            for reason, count in _summed(observers, "python_passes").items()
            if reason != _NO_NODES
        },
        launchers=_by_name(facts, "launcher"),
        recorder_share=recorder_ns / step_ns if recorder_ns is not None and step_ns else None,
    )


def _row(connection: duckdb.DuckDBPyConnection, query: str) -> tuple[Any, ...]:
    row = connection.execute(query).fetchone()
    assert row is not None
    return row


def _size(run: Run, counts: Counts, table: str) -> TableSize:
    runs = [of.run for of in run.stretches]
    parts = [part for of in runs for of_rank in of.parts[table].values() for part in of_rank]
    return TableSize(
        table=table,
        rows=counts.of(table),
        part_count=len(parts),
        size_bytes=sum(part.size_bytes for part in parts),
        journal_rows=journal_rows(run, table),
    )


def _may_lack_steps(run: Run) -> bool:
    return any(of.run.incomplete_ranks for of in run.stretches)


def _steps(
    connection: duckdb.DuckDBPyConnection, run: Run, sizes: tuple[TableSize, ...]
) -> tuple[int | None, int | None, int]:
    """(first, last, count).

    `steps` has no row of a step that a rank was killed in: where that may be, all tables are asked.
    """
    tables = [size.table for size in sizes if size.rows]
    asked = ["steps"] if "steps" in tables and not _may_lack_steps(run) else tables
    if not asked:
        return None, None, 0
    union = " UNION ".join(f"SELECT DISTINCT step FROM {table}" for table in asked)
    first, last, count = _row(connection, f"SELECT min(step), max(step), count(*) FROM ({union})")
    return first, last, count


def _flight_spans(connection: duckdb.DuckDBPyConnection, sizes: tuple[TableSize, ...]) -> str:
    """The steps that a flight recording holds: there may be gaps between them."""
    tables = [size.table for size in sizes if size.rows]
    union = (
        " UNION ".join(f"SELECT step FROM {table}" for table in tables) or "SELECT 0 WHERE false"
    )
    return spans(step for (step,) in connection.execute(union).fetchall())


def _distinct(values: Any) -> tuple[str, ...]:
    return tuple(sorted({str(value) for value in values if value is not None}))


def _by_name(facts: list[Mapping[str, Any]], key: str) -> dict[str, tuple[str, ...]]:
    found: dict[str, set[str]] = {}
    for fact in facts:
        inside = fact.get(key)
        for name, value in inside.items() if isinstance(inside, dict) else ():
            text = value if isinstance(value, str) else json.dumps(value)
            found.setdefault(name, set()).add(text)
    return {name: tuple(sorted(values)) for name, values in sorted(found.items())}


def _summed(facts: list[Mapping[str, Any]], key: str) -> dict[str, int]:
    total: Counter[str] = Counter()
    for fact in facts:
        inside = fact.get(key)
        for reason, count in inside.items() if isinstance(inside, dict) else ():
            if isinstance(count, int) and count:
                total[reason] += count
    return dict(sorted(total.items()))


def _dropped(run: Run) -> dict[str, int]:
    """A rank that was killed wrote no counts into its json: its journal's header has their sum."""
    total = _summed([info.facts for info in run.ranks.values()], "dropped")
    unsaid = sum(
        contents.header["dropped"]
        for of in run.stretches
        for rank, contents in of.run.journals.items()
        if not of.run.ranks[rank].facts.get("dropped")
    )
    return {**total, "journal full, rank killed": unsaid} if unsaid else total


def _problems(run: Run) -> tuple[str, ...]:
    found: list[str] = []
    for rank, info in run.ranks.items():
        problems = info.facts.get("problems")
        for problem in problems if isinstance(problems, list) else ():
            found.append(
                f"rank {rank}: {problem if isinstance(problem, str) else json.dumps(problem)}"
            )
    return tuple(found)
