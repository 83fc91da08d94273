"""Writes journals byte by byte, from their dtypes, without the recorder: as a killed rank leaves them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gradtrace_schemas import SCHEMA_VERSION, TABLES, layout
from gradtrace_schemas.journal import (
    FORMAT_VERSION,
    HEADER,
    HEADER_BYTES,
    HELD_PLACES,
    KINDS,
    MAGIC,
    NULL_BOOL,
    NULL_FLOAT,
    NULL_INT32,
    NULL_INT64,
    NULL_STRING,
    RECORD_BYTES,
    THREAD,
    THREAD_SLOTS,
    plain_fields,
    record_dtype,
)
from gradtrace_schemas.table import SHAPE, STRING, STRINGS, Column

Rows = Sequence[tuple[str, Mapping[str, Any]]]


def write_journal(
    run: Path,
    rows: Rows,
    *,
    rank: int = 0,
    attempt: int = 0,
    drained: int = 0,
    dropped: int = 0,
    running: Sequence[Mapping[str, Any]] = (),
    half_records: int = 16,
    pid: int = 4242,
    process_start: int = 0,
    machine: int = 0,
    heartbeat_ns: int = 0,
) -> Path:
    """A journal whose records 1, 2, ... are these (table, columns); those up to `drained` count as drained.

    Columns that a row lacks are null, summaries are empty. `running` is what the first thread is in, outermost
    first, by the fields of RUNNING; its texts are given as texts.
    """
    strings: list[str] = []
    places = 2 * half_records
    records = np.zeros((places, RECORD_BYTES), np.uint8)
    for number, (table, row) in enumerate(rows, 1):
        data = _record(table, row, number, strings)
        records[(number - 1) % places] = np.frombuffer(data, np.uint8)
    threads = _threads(running, strings)
    texts = b"".join(struct.pack("<I", len(t)) + t for t in (s.encode() for s in strings))
    held = np.zeros((HELD_PLACES, RECORD_BYTES), np.uint8)
    held_offset = HEADER_BYTES + THREAD_SLOTS * THREAD.itemsize
    strings_offset = held_offset + held.nbytes
    header = np.zeros((), HEADER)
    values = {
        "magic": MAGIC,
        "format_version": FORMAT_VERSION,
        "schema_version": SCHEMA_VERSION,
        "record_bytes": RECORD_BYTES,
        "half_records": half_records,
        "running_offset": HEADER_BYTES,
        "held_offset": held_offset,
        "strings_offset": strings_offset,
        "strings_bytes": len(texts),
        "records_offset": strings_offset + len(texts),
        "pid": pid,
        "process_start": process_start,
        "heartbeat_ns": heartbeat_ns,
        "machine": machine,
        "rank": rank,
        "attempt": attempt,
        "drained": drained,
        "strings_used": len(texts),
        "dropped": dropped,
    }
    for name, value in values.items():
        header[name] = value
    path = layout.journal_file(run, rank, attempt)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        header.tobytes().ljust(HEADER_BYTES, b"\0")
        + threads.tobytes()
        + held.tobytes()
        + texts
        + records.tobytes()
    )
    return path


def _record(table: str, row: Mapping[str, Any], number: int, strings: list[str]) -> bytes:
    dtype = record_dtype(TABLES[table])
    record = np.zeros((), dtype)
    record["record_number"] = number
    record["record_kind"] = KINDS[table]
    for name in ("step", "microbatch", "backward_index"):
        record[name] = row.get(name, 0)
    for column in plain_fields(TABLES[table]):
        _store(record, column, row.get(column.name), strings)
    body = record.tobytes().ljust(RECORD_BYTES - 8, b"\0")
    return body + struct.pack("<Q", number)


def _store(record: Any, column: Column, value: Any, strings: list[str]) -> None:
    if column.type in (STRING, STRINGS):
        record[column.name] = NULL_STRING if value is None else _number_of(value, strings)
    elif column.type == SHAPE:
        record[column.name]["ndim"] = NULL_BOOL if value is None else len(value)
        record[column.name]["sizes"][: len(value or ())] = value or ()
    elif value is not None:
        record[column.name] = value
    elif pa.types.is_boolean(column.type):
        record[column.name] = NULL_BOOL
    elif pa.types.is_floating(column.type):
        record[column.name] = NULL_FLOAT
    else:
        record[column.name] = NULL_INT32 if column.type == pa.int32() else NULL_INT64


def _threads(running: Sequence[Mapping[str, Any]], strings: list[str]) -> Any:
    threads = np.zeros(THREAD_SLOTS, THREAD)
    threads[0]["thread"] = 1
    threads[0]["depth"] = len(running)
    for depth, entry in enumerate(running):
        for name, value in entry.items():
            number = _number_of(value, strings) if isinstance(value, str) else value
            threads[0]["entries"][depth][name] = number
    return threads


def _number_of(text: str, strings: list[str]) -> int:
    if text not in strings:
        strings.append(text)
    return strings.index(text)
