"""The binary records of the journal: dtypes, header, places. `journal_reader` reads them.

A journal is one file:

    header (4 KiB, with a heartbeat, each thread's place, and what was dropped) | what is running, per thread
    | what is held | strings | half 0 of the records | half 1

Every record has the same size. Its first word is its number, from 1, written after all the rest, of which the
last word is the number again: a record whose two words differ was being written when the process died. A
record's place is (number - 1) modulo the count of places, so numbers tell which of them are new. The header's
`drained` says up to which record everything lies in parts or, in flight mode, is over; only such records are ever
overwritten.

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
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gradtrace_schemas.catalogue import ALL_TABLES, SCHEMA_VERSION
from gradtrace_schemas.table import (
    SHAPE,
    SKETCH_LANES,
    STRING,
    STRINGS,
    Column,
    Table,
    numpy_dtype,
)

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

DEVICE_NS = "device_ns"
_MOST_TIMES = 1 << 48


def pending_time(ticket: int) -> int:
    """What stands in `device_ns` while the device has yet to come to that span's end. Read as null."""
    return NULL_INT64 + 1 + ticket


def is_pending_time(values: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which of these are such."""
    found: npt.NDArray[np.bool_] = (values > NULL_INT64) & (values < NULL_INT64 + _MOST_TIMES)
    return found


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
    return (column.name, numpy_dtype(column.type).newbyteorder("<"))


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
