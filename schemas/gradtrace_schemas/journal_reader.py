"""What a journal holds, read from its bytes: of a rank that lives, was killed, or whose file is cut off or damaged."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gradtrace_schemas.catalogue import SCHEMA_VERSION, TABLES
from gradtrace_schemas.journal import (
    DROP_KINDS,
    DROPS,
    FORMAT_VERSION,
    HEADER,
    HEADER_BYTES,
    HELD_PLACES,
    JOURNAL_TABLES,
    KINDS,
    MAGIC,
    NULL_BOOL,
    NULL_FLOAT,
    NULL_INT32,
    NULL_INT64,
    NULL_STRING,
    OLDEST_FORMAT,
    OLDEST_SCHEMA,
    PLACE,
    RECORD_BYTES,
    RECORD_HEAD,
    RUNNING_OUTCOME,
    THREAD,
    THREAD_DEPTH,
    THREAD_SLOTS,
    plain_fields,
    record_dtype,
)
from gradtrace_schemas.table import INT32, SHAPE, STRING, STRINGS, Column, Table


@dataclass(frozen=True)
class Contents:
    """What a journal says: its header, its whole records in order, its strings, what was running.

    `records` is uint8 of shape (n, record size), `numbers` and `kinds` have shape (n,). The last `held_count` were
    held, numbered on from the newest. `running` and `places` are by thread; `drops` is by kind of record.
    """

    header: dict[str, Any]
    records: npt.NDArray[np.uint8]
    numbers: npt.NDArray[np.uint64]
    kinds: npt.NDArray[np.uint16]
    strings: list[str]
    running: npt.NDArray[Any]
    places: npt.NDArray[Any]
    drops: npt.NDArray[Any]
    held_count: int
    torn_count: int

    def of(self, table: Table, after: int = 0) -> npt.NDArray[Any]:
        """The records of one table whose number is greater than `after`, with null in columns that are newer."""
        version = self.header["schema_version"]
        return of_table(self.records, self.kinds, self.numbers, table, after, version)

    def running_nodes(self) -> npt.NDArray[Any]:
        """The Nodes that were running, outermost first, as records of `node_events` that come after all others."""
        table = TABLES["node_events"]
        last = int(self.numbers.max(initial=self.header["drained"]))
        found = [
            (int(thread["thread"]), entry)
            for thread in self.running
            for entry in thread["entries"][: max(0, min(int(thread["depth"]), THREAD_DEPTH))]
        ]
        records = np.zeros(len(found), record_dtype(table))
        for column in plain_fields(table):
            store_null(records, column)
        try:
            outcome = self.strings.index(RUNNING_OUTCOME)
        except ValueError:
            return records[:0]  # of a recorder that did not say so
        for record, (thread, entry) in zip(records, found, strict=True):
            for name in entry.dtype.names:
                if name in record.dtype.names:
                    record[name] = entry[name]
            record["thread"] = thread
            record["outcome"] = outcome
        records["record_number"] = np.arange(last + 1, last + 1 + len(records))
        return records

    @property
    def dropped(self) -> dict[str, tuple[int, int, int]]:
        """By table (or `names`): how many records had no room, and the first and last step of these."""
        names = {0: "names"} | {kind: name for name, kind in KINDS.items()}
        return {
            name: (int(drop["count"]), int(drop["first_step"]), int(drop["last_step"]))
            for kind, name in names.items()
            if kind < len(self.drops) and (drop := self.drops[kind])["count"]
        }


def of_table(
    records: npt.NDArray[np.uint8],
    kinds: npt.NDArray[np.uint16],
    numbers: npt.NDArray[np.uint64],
    table: Table,
    after: int = 0,
    schema_version: int = SCHEMA_VERSION,
) -> npt.NDArray[Any]:
    """The records of one table, as an array of its dtype; `schema_version` is that of who wrote them."""
    chosen = records[(kinds == KINDS[table.name]) & (numbers > np.uint64(after))]
    dtype = record_dtype(table, schema_version)
    found = np.ascontiguousarray(chosen[:, : dtype.itemsize]).view(dtype).reshape(-1)
    return found if dtype == record_dtype(table) else _with_newer_columns(found, table)


def _with_newer_columns(old: npt.NDArray[Any], table: Table) -> npt.NDArray[Any]:
    """The same records in today's dtype: what they lack is null."""
    new = np.zeros(len(old), record_dtype(table))
    for name in new.dtype.names or ():
        if name in (old.dtype.names or ()):
            new[name] = old[name]
        else:
            store_null(new, table.column(name))
    return new


def store_null(records: npt.NDArray[Any], column: Column) -> None:
    """Make a plain column null in all of these records."""
    if column.type in (STRING, STRINGS):
        records[column.name] = NULL_STRING
    elif column.type == SHAPE:
        records[column.name]["ndim"] = NULL_BOOL
    elif pa.types.is_boolean(column.type):
        records[column.name] = NULL_BOOL
    elif pa.types.is_floating(column.type):
        records[column.name] = NULL_FLOAT
    else:
        records[column.name] = NULL_INT32 if column.type == INT32 else NULL_INT64


def heads(records: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint16]]:
    """(numbers, kinds) of raw records of shape (n, RECORD_BYTES)."""
    head = np.ascontiguousarray(records[:, : RECORD_HEAD.itemsize]).view(RECORD_HEAD).reshape(-1)
    return head["record_number"].copy(), head["record_kind"].copy()


class UnreadableJournal(ValueError):
    """The file is no journal that this version reads; its text says why."""


def read_journal(data: bytes) -> Contents:
    """All that can be told from a journal's bytes, of which the end may be missing.

    Raises UnreadableJournal where the header itself is not whole or of another format.
    """
    if len(data) < HEADER.itemsize:
        raise UnreadableJournal(
            f"the journal has {len(data)} bytes, fewer than its header of {HEADER.itemsize}"
        )
    raw = np.frombuffer(data, HEADER, 1)[0]
    header = {name: raw[name].item() for name in HEADER.names or ()}
    if header["magic"] != MAGIC:
        raise UnreadableJournal("the file does not begin as a journal does")
    size = _record_bytes(header)
    strings = _strings(data, header)
    places = 2 * header["half_records"]
    start = header["records_offset"]
    records = _area(data, start, places, size)
    numbers, kinds = heads(records)
    closing = np.ascontiguousarray(records[:, -8:]).view("<u8").reshape(-1)
    written = numbers > header["drained"]
    right_place = (numbers - np.uint64(1)) % np.uint64(max(1, places)) == np.arange(
        len(records), dtype=np.uint64
    )
    known = np.isin(kinds, list(KINDS.values()))
    valid = written & (numbers == closing) & right_place & known
    order = np.argsort(numbers[valid], kind="stable")
    held = _held(data, header, numbers[valid], size)
    held_numbers, held_kinds = heads(held)
    return Contents(
        header=header,
        records=np.concatenate((records[valid][order], held)),
        numbers=np.concatenate((numbers[valid][order], held_numbers)),
        kinds=np.concatenate((kinds[valid][order], held_kinds)),
        strings=strings,
        running=_running(data, header),
        places=_places(data, header),
        drops=_in_header(data, header["drops_offset"], DROPS, DROP_KINDS),
        held_count=len(held),
        torn_count=int((~valid & ((closing > header["drained"]) | written)).sum()),
    )


def _record_bytes(header: dict[str, Any]) -> int:
    """The size of the journal's records. Raises UnreadableJournal for a version that is not read."""
    versions = (header["format_version"], header["schema_version"])
    known = OLDEST_FORMAT <= versions[0] <= FORMAT_VERSION
    if not known or not OLDEST_SCHEMA <= versions[1] <= SCHEMA_VERSION:
        raise UnreadableJournal(
            f"the journal has format {versions[0]} and schema {versions[1]}; this version reads {OLDEST_FORMAT} to "
            f"{FORMAT_VERSION} and {OLDEST_SCHEMA} to {SCHEMA_VERSION}: the gradtrace that wrote it reads it"
        )
    if max(header["drained"], header["strings_used"]) >= 2**62:
        raise UnreadableJournal(
            "the journal's counters are out of all bounds: its header is damaged"
        )
    size = int(header["record_bytes"])
    least = max(record_dtype(t, versions[1]).itemsize for t in JOURNAL_TABLES) + 8
    if not least <= size <= 16 * RECORD_BYTES or size % 8:
        raise UnreadableJournal(f"the journal's records have {size} bytes: its header is damaged")
    return size


def _area(data: bytes, start: int, count: int, size: int) -> npt.NDArray[np.uint8]:
    """So many records from there on, as far as the data goes: uint8 of shape (n, size)."""
    whole = max(0, min(count, (len(data) - start) // size))
    area = np.frombuffer(data, np.uint8, whole * size, start if whole else 0)
    return area.reshape(-1, size)


def _held(
    data: bytes, header: dict[str, Any], valid: npt.NDArray[np.uint64], size: int
) -> npt.NDArray[np.uint8]:
    """The held records that nothing has replaced, numbered on from the newest record."""
    places = _area(data, header["held_offset"], HELD_PLACES, size)
    in_use, kinds = heads(places)
    replaced_by = np.ascontiguousarray(places[:, -8:]).view("<u8").reshape(-1)
    is_replaced = (replaced_by != 0) & (
        (replaced_by <= np.uint64(header["drained"])) | np.isin(replaced_by, valid)
    )
    held: npt.NDArray[np.uint8] = places[
        (in_use != 0) & ~is_replaced & np.isin(kinds, list(KINDS.values()))
    ].copy()
    newest = max(int(valid.max(initial=0)), header["drained"])
    numbers = np.arange(newest + 1, newest + 1 + len(held), dtype="<u8")
    held[:, :8] = numbers.view(np.uint8).reshape(-1, 8)
    return held


def _strings(data: bytes, header: dict[str, Any]) -> list[str]:
    start = header["strings_offset"]
    end = min(len(data), start + min(header["strings_used"], header["strings_bytes"]))
    found: list[str] = []
    at = start
    while at + 4 <= end:
        (length,) = struct.unpack_from("<I", data, at)
        if at + 4 + length > end:
            break
        found.append(data[at + 4 : at + 4 + length].decode("utf-8", "replace"))
        at += 4 + length
    return found


def _running(data: bytes, header: dict[str, Any]) -> npt.NDArray[Any]:
    start = header["running_offset"]
    if len(data) < start + THREAD_SLOTS * THREAD.itemsize:
        return np.zeros(0, THREAD)
    return np.frombuffer(data, THREAD, THREAD_SLOTS, start)


def _places(data: bytes, header: dict[str, Any]) -> npt.NDArray[Any]:
    """Where threads are, in the order of `running`; of kind 0 where that is not known."""
    places = _in_header(data, header["places_offset"], PLACE, THREAD_SLOTS).copy()
    places["kind"][places["moved_ns"] != places["moved_ns_again"]] = 0
    return places


def _in_header(data: bytes, start: int, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    """Something of the header's page; empty in a journal that is older than it, or cut off before."""
    end = start + count * dtype.itemsize
    if not start or end > min(len(data), HEADER_BYTES):
        return np.zeros(0, dtype)
    return np.frombuffer(data, dtype, count, start)


def text_of(strings: Sequence[str], number: int) -> str | None:
    """The string of that number, None for null or for one that is not there."""
    return strings[number] if number < len(strings) else None
