"""Journals that killed ranks left behind, into parts: what a clean end would have written of the same records.

The order makes it safe to be killed at any moment, and to be run again: parts first, each under a temporary name
and marked with the newest record that it holds; then the rank's json, which keeps what the journal told of the rank's
end; the journal is removed last. A row that a part holds already is never written again.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from gradtrace_analyzer.errors import GradtraceError
from gradtrace_analyzer.runs.files import MOST_JSON_BYTES, opened, parsed
from gradtrace_analyzer.runs.journals import Journal, found_journals, journal_at
from gradtrace_analyzer.runs.last_seen import of_journal
from gradtrace_analyzer.runs.parts import DamagedPart, Part, found_parts, last_record
from gradtrace_schemas import TABLES, layout
from gradtrace_schemas.batches import arrow_table, write_part
from gradtrace_schemas.digests import DIGESTED_TABLES, Digests
from gradtrace_schemas.journal import (
    JOURNAL_TABLES,
    record_dtype,
)
from gradtrace_schemas.journal_reader import (
    Contents,
)
from gradtrace_schemas.nodes import NODE_EVENTS
from gradtrace_schemas.summary import STATE_FULL, STATE_NONE, STATE_NORMS
from gradtrace_schemas.table import Table


class CannotRepair(GradtraceError):
    """The journal stays: its rank lives, or it cannot be read or written out."""


@dataclass(frozen=True)
class Repaired:
    """A journal that was written out: how many rows of each table it still held, how many records were torn."""

    rank: int
    attempt: int
    rows: Mapping[str, int]
    torn_count: int


def repairs(run: Path, *, force: bool = False) -> Iterator[Repaired | CannotRepair]:
    """Write out each journal of a run, of all attempts; what cannot be is given as the error that says why.

    `force` is for ranks of which this machine cannot tell whether they live.
    """
    for journal in found_journals(run):
        path = layout.journal_file(run, journal.rank, journal.attempt)
        try:
            yield _repaired(run, journal, force=force)
        except CannotRepair as error:
            yield error
        except OSError as error:
            if not path.exists():
                continue  # its rank has just closed it, or somebody else has repaired it
            yield CannotRepair(
                f"rank {journal.rank} of attempt {journal.attempt} is not repaired, its journal stays as it is: "
                f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
            )


def _repaired(run: Path, journal: Journal, *, force: bool) -> Repaired:
    rank, attempt = journal.rank, journal.attempt
    who = f"rank {rank} of attempt {attempt}"
    path = layout.journal_file(run, rank, attempt)
    with open(path, "rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CannotRepair(f"{who} is being repaired by another process") from None
        contents = journal.contents
        if contents is None:
            raise CannotRepair(f"{who}: its journal cannot be read: {journal.why_unreadable}")
        seen = of_journal(contents)
        if seen.life == "alive":
            raise CannotRepair(
                f"{who} is still running (process {seen.pid}); repair it when it has ended"
            )
        if seen.life == "silent" and not force:
            raise CannotRepair(
                f"{who} ran on another machine or in another container, so its process {seen.pid} cannot be asked; "
                "say --force if it has ended"
            )
        contents = journal_at(path)  # once more: it may have died just before it was asked
        parts = [p for p in found_parts(os.path.abspath(run), rank) if _is_of(p, attempt)]
        rows = _write_parts(run, contents, parts)
        _write_json(layout.rank_file(run, rank, attempt), contents)
        path.unlink()
        _sync(path.parent)
    return Repaired(rank, attempt, rows, contents.torn_count)


def _is_of(found: Part | DamagedPart, attempt: int) -> bool:
    part = found.part if isinstance(found, DamagedPart) else found
    return part.attempt == attempt


def _write_parts(
    run: Path, contents: Contents, found: Sequence[Part | DamagedPart]
) -> dict[str, int]:
    """Write the rows that no part holds yet as further parts; gives how many, by table."""
    header = contents.header
    newest = max(int(contents.numbers.max(initial=0)), header["drained"])
    whole: dict[str, list[Part]] = {}
    numbers: dict[str, int] = {}
    for one in found:
        part = one.part if isinstance(one, DamagedPart) else one
        numbers[part.table] = max(numbers.get(part.table, -1), part.number)
        if isinstance(one, Part):
            whole.setdefault(one.table, []).append(one)
    left = {
        table: contents.of(
            table, max(header["drained"], last_record(whole.get(table.name, ())))
        ).copy()
        for table in JOURNAL_TABLES
    }
    _fill_digests(contents, left, whole)
    running = contents.running_nodes()
    unwritten = running["record_number"] > last_record(whole.get(NODE_EVENTS.name, ()))
    left[NODE_EVENTS] = np.concatenate((left[NODE_EVENTS], running[unwritten]))
    written = {}
    for table, records in left.items():
        if not len(records):
            continue
        number = numbers.get(table.name, -1) + 1
        path = layout.part_file(run, table.name, header["rank"], header["attempt"], number)
        rows = arrow_table(table, records, contents.strings, header["attempt"])
        write_part(path, table, rows, max(newest, int(records["record_number"].max())))
        _sync(path)
        _sync(path.parent)
        written[table.name] = len(records)
    return written


def _fill_digests(
    contents: Contents, left: dict[Table, npt.NDArray[Any]], parts: Mapping[str, Sequence[Part]]
) -> None:
    """The digests of the steps that ended, over all their rows: those that lie in parts come first."""
    steps = left[TABLES["steps"]]
    wanted = sorted(set(steps["step"].tolist()))
    if not wanted:
        return
    by_table: dict[str, npt.NDArray[Any]] = {"steps": steps}
    for name in DIGESTED_TABLES:
        mine = left[TABLES[name]]
        earlier = _of_parts(TABLES[name], parts.get(name, ()), wanted, contents.strings)
        by_table[name] = np.concatenate((earlier, mine[np.isin(mine["step"], wanted)]))
    Digests().take(by_table, contents.strings)


def _of_parts(
    table: Table, parts: Sequence[Part], steps: Sequence[int], strings: Sequence[str]
) -> npt.NDArray[Any]:
    """Rows of these steps as records of the journal, in the order of recording, with the columns that digests read."""
    prefixes = [summary.prefix for summary in table.summaries]
    has_point = any(column.name == "point" for column in table.columns)
    columns = ["step", "record_index", *(["point"] if has_point else [])]
    columns += [p + name for p in prefixes for name in ("numel", "fingerprint")]
    found = [np.zeros(0, record_dtype(table))]
    for part in parts:
        held = pq.ParquetFile(part.path)
        read = held.read([c for c in columns if c in held.schema_arrow.names])
        chosen = np.isin(read["step"].to_numpy(), steps)
        read = read.filter(chosen)
        records = np.zeros(len(read), record_dtype(table))
        records["record_number"] = read["record_index"].to_numpy()
        records["step"] = read["step"].to_numpy()
        if has_point:
            number = {text: place for place, text in enumerate(strings)}
            records["point"] = [number.get(text, 0) for text in read["point"].to_pylist()]
        for prefix in prefixes:
            summary = records[prefix + "summary"]
            prints = read[prefix + "fingerprint"]
            has_any = read[prefix + "numel"].is_valid().to_numpy()
            is_full = prints.is_valid().to_numpy()
            summary["fingerprint"] = prints.fill_null(0).to_numpy()
            summary["state"] = np.where(
                is_full, STATE_FULL, np.where(has_any, STATE_NORMS, STATE_NONE)
            )
        found.append(records)
    return np.sort(np.concatenate(found), order="record_number")


def _write_json(path: Path, contents: Contents) -> None:
    """Add to a rank's json how it ended, as its journal tells: left alone where the rank itself had written that."""
    try:
        with opened(path) as file:
            facts = parsed(file.read(MOST_JSON_BYTES)) or {}
    except FileNotFoundError:
        facts = {}
    if facts.get("complete") is True:
        return  # it had said so, and was killed before its journal was gone
    header, seen = contents.header, of_journal(contents)
    known = {
        name: header[name]
        for name in ("rank", "attempt", "pid", "wall_start_ns", "monotonic_start_ns")
    }
    said = {
        "complete": False,
        "dropped": {name: drop[0] for name, drop in seen.dropped.items()},
        "dropped_steps": {name: drop[1:] for name, drop in seen.dropped.items()},
        "left_behind": seen.as_object(),
        "repaired_unix_ns": time.time_ns(),
    }
    temporary = path.with_suffix(".writing")
    temporary.parent.mkdir(exist_ok=True)
    temporary.write_text(json.dumps(known | facts | said) + "\n")
    _sync(temporary)
    temporary.rename(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Have what was written survive a power failure, which is why the journal may go."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
