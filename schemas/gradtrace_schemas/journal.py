"""The binary records of the journal: dtypes, header, how to walk them.

A journal is one file:

    header (4 KiB, with a heartbeat, each thread's place, and what was dropped) | what is running, per thread
    | what is held | strings | half 0 of the records | half 1

Every record has the same size. Its first word is its number, from 1, written after all the rest, of which the
last word is the number again: a record whose two words differ was being written when the process died. A
record's place is (number - 1) modulo the count of places, so numbers tell which of them are new. The header's
`drained` says up to which record everything lies in parts; only such records are ever overwritten.

A row that something later will complete (a bucket, launched and not yet reduced) is *held*: it lies in one of
a few places of its own, so that a rank killed meanwhile has not lost it. A held record's first word says that the
place is in use. When it is settled, its last word gets the number of the record that replaces it, that record is
written, and the place is cleared: of a held record and its replacement one alone is read, whenever the rank dies.

A record's fields follow from its table's columns, so a new table needs no code here: text is the number of a
string, null is the least integer (of strings the largest, of booleans 255, of floats one certain NaN).
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gradtrace_schemas.catalogue import ALL_TABLES, SCHEMA_VERSION, TABLES
from gradtrace_schemas.table import INT32, SHAPE, SKETCH_LANES, STRING, STRINGS, Column, Table

MAGIC = b"GRADTRCE"
# 2  held records.
# 3  heartbeat, the process's own start, places of threads and what was dropped, all within the header's page.
FORMAT_VERSION = 3
OLDEST_FORMAT, OLDEST_SCHEMA = 2, 2
HEADER_BYTES = 4096

NULL_STRING = 2**32 - 1
NULL_INT32 = -(2**31)
NULL_INT64 = -(2**63)
NULL_BOOL = 255
# A NaN that no computation gives: a loss may be NaN, and that is not null.
NULL_FLOAT_BITS = 0x7FF8_6E75_6C6C_0000
NULL_FLOAT: float = struct.unpack("<d", struct.pack("<q", NULL_FLOAT_BITS))[0]
MAX_DIMENSIONS = 8

HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("format_version", "<u4"),
        ("schema_version", "<u4"),
        ("record_bytes", "<u4"),
        ("half_records", "<u4"),
        ("running_offset", "<u8"),
        ("held_offset", "<u8"),
        ("strings_offset", "<u8"),
        ("strings_bytes", "<u8"),
        ("records_offset", "<u8"),
        ("pid", "<i8"),
        ("rank", "<i4"),
        ("attempt", "<i4"),
        ("wall_start_ns", "<i8"),
        ("monotonic_start_ns", "<i8"),
        ("drained", "<u8"),
        ("strings_used", "<u8"),
        ("dropped", "<u8"),
        ("heartbeat_ns", "<i8"),
        ("process_start", "<u8"),
        ("machine", "<u8"),
        ("places_offset", "<u8"),
        ("drops_offset", "<u8"),
        ("closed_ns", "<i8"),
    ]
)

# Where each thread is, in the header's page: `moved_ns` is when it came there, written first and last, so that a
# place of which they differ was being written when the process died.
PLACE = np.dtype(
    [
        ("moved_ns", "<i8"),
        ("kind", "<u4"),
        ("name", "<u4"),
        ("root", "<i4"),
        ("call_index", "<i4"),
        ("step", "<i4"),
        ("microbatch", "<i4"),
        ("backward_index", "<i4"),
        ("spare", "<i4"),
        ("moved_ns_again", "<i8"),
    ]
)
PLACES_OFFSET = 1024
# `name` is the module's FQN, or the class of the optimizer.
IN_MODULE, IN_BACKWARD, IN_OPTIMIZER, AFTER_MODULE, AFTER_BACKWARD, AFTER_OPTIMIZER = range(1, 7)

# What was dropped, by kind of record, in the header's page too; kind 0 is names without room.
DROPS = np.dtype([("count", "<u8"), ("first_step", "<i4"), ("last_step", "<i4")])
DROPS_OFFSET = 2048
DROP_KINDS = 64

RECORD_HEAD = np.dtype(
    [
        ("record_number", "<u8"),
        ("record_kind", "<u2"),
        ("step", "<i4"),
        ("microbatch", "<i4"),
        ("backward_index", "<i4"),
    ]
)

SUMMARY = np.dtype(
    [
        ("numel", "<i8"),
        ("norm", "<f8"),
        ("abs_max", "<f8"),
        ("sum", "<f8"),
        ("nan_count", "<i8"),
        ("inf_count", "<i8"),
        ("fingerprint", "<i8"),
        ("sketch", "<f4", (SKETCH_LANES,)),
        ("dtype", "<u4"),
        ("state", "u1"),
    ]
)

_HEAD_COLUMNS = {"step", "microbatch", "backward_index", "record_index", "attempt", "rank"}

THREAD_SLOTS, THREAD_DEPTH = 16, 31
HELD_PLACES = 64
RUNNING_OUTCOME = "running"
RUNNING = np.dtype(
    [
        ("node_name", "<u4"),
        ("module_fqn", "<u4"),
        ("root", "<i4"),
        ("call_index", "<i4"),
        ("step", "<i4"),
        ("microbatch", "<i4"),
        ("backward_index", "<i4"),
        ("event_index", "<i4"),
        ("phase", "<u4"),
        ("parameter_fqn", "<u4"),
        ("autograd_seq", "<i8"),
        ("start_ns", "<i8"),
        ("stage_index", "<i4"),
        ("spare", "<i4"),
    ]
)
THREAD = np.dtype([("thread", "<i8"), ("depth", "<i8"), ("entries", RUNNING, (THREAD_DEPTH,))])


def _field(column: Column) -> tuple[Any, ...]:
    if column.type in (STRING, STRINGS):
        return (column.name, "<u4")
    if column.type == SHAPE:
        return (column.name, [("ndim", "u1"), ("sizes", "<i8", (MAX_DIMENSIONS,))])
    if pa.types.is_boolean(column.type):
        return (column.name, "u1")
    return (column.name, np.dtype(column.type.to_pandas_dtype()).newbyteorder("<"))


def plain_fields(table: Table, schema_version: int = SCHEMA_VERSION) -> tuple[Column, ...]:
    """The columns of a table that its record holds besides the record's head, in order."""
    return tuple(
        c for c in table.plain_columns if c.name not in _HEAD_COLUMNS and c.since <= schema_version
    )


@functools.cache
def record_dtype(table: Table, schema_version: int = SCHEMA_VERSION) -> np.dtype[Any]:
    """The record of a table: head, plain columns, summaries. The closing number comes after padding."""
    head = [(name, RECORD_HEAD[name]) for name in RECORD_HEAD.names or ()]
    plain = [_field(column) for column in plain_fields(table, schema_version)]
    return np.dtype([*head, *plain, *((s.prefix + "summary", SUMMARY) for s in table.summaries)])


def struct_format(dtype: np.dtype[Any]) -> str:
    """The same layout for `struct`, without the byte order's mark."""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return struct_format(base) * int(np.prod(shape))
    if dtype.names is not None:
        return "".join(struct_format(dtype[name]) for name in dtype.names)
    codes = {"u1": "B", "u2": "H", "u4": "I", "u8": "Q", "i4": "i", "i8": "q", "f4": "f", "f8": "d"}
    return codes[dtype.str[1:]]


JOURNAL_TABLES = tuple(table for table in ALL_TABLES if table.journalled)
KINDS: dict[str, int] = {
    table.name: kind for kind, table in enumerate(ALL_TABLES, 1) if table.journalled
}
RECORD_BYTES = -(-(max(record_dtype(t).itemsize for t in JOURNAL_TABLES) + 8) // 64) * 64


def record_struct(table: Table) -> struct.Struct:
    """Packs a record without its first word: kind, step, microbatch, backward_index, the plain fields in
    order, each summary as the bytes of SUMMARY, and last the record's number, which closes it."""
    head = "".join(struct_format(RECORD_HEAD[name]) for name in (RECORD_HEAD.names or ())[1:])
    dtype = record_dtype(table)
    plain = "".join(struct_format(dtype[column.name]) for column in plain_fields(table))
    summaries = f"{SUMMARY.itemsize}s" * len(table.summaries)
    padding = RECORD_BYTES - 8 - dtype.itemsize
    whole = struct.Struct(f"<{head}{plain}{summaries}{padding}xQ")
    assert whole.size == RECORD_BYTES - 8
    return whole


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
