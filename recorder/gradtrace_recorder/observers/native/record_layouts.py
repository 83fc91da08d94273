"""The journal's records for C++: a header, made from `gradtrace_schemas.journal`, so that there is one order of fields.

`scripts/reference` writes it and says when it is stale; what is built knows by its digest for which
records that was.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gradtrace_schemas import TABLES, summary
from gradtrace_schemas import journal as records

HEADER_FILE = Path(__file__).parent / "cpp" / "journal" / "record_layouts.h"

# The tables whose rows hooks write, and the structures that are filled in C++.
_TABLES = ("node_events", "node_tensors", "gradients")
_STRUCTURES = {
    "Summary": records.SUMMARY,
    "Running": records.RUNNING,
    "Place": records.PLACE,
    "Drop": records.DROPS,
}
_CONSTANTS = {
    "int64_t": (
        "HEADER_BYTES", "RECORD_BYTES", "PLACES_OFFSET", "DROPS_OFFSET", "NULL_INT64",
    ),
    "int32_t": ("NULL_INT32",),
    "uint32_t": ("NULL_STRING", "IN_MODULE", "IN_OPTIMIZER"),
    "uint8_t": ("NULL_BOOL",),
    "int": ("THREAD_SLOTS", "THREAD_DEPTH", "HELD_PLACES", "DROP_KINDS", "MAX_DIMENSIONS", "SKETCH_LANES"),
}  # fmt: skip
_HEADER_FIELDS = ("drained", "dropped")
_STATES = ("STATE_NONE", "STATE_FULL", "STATE_NORMS", "STATE_SHAPE")
_TYPES = {
    "u1": "uint8_t", "u2": "uint16_t", "u4": "uint32_t", "u8": "uint64_t",
    "i4": "int32_t", "i8": "int64_t", "f4": "float", "f8": "double",
}  # fmt: skip


def header() -> str:
    """The text of the header."""
    return "\n".join(_lines()) + "\n"


@functools.cache
def digest() -> str:
    """What a library says that was built for these records."""
    return hashlib.sha256("\n".join(_body()).encode()).hexdigest()[:16]


def is_fresh() -> bool:
    """Whether the header that lies here is the one of these records."""
    return HEADER_FILE.read_text() == header()


def formats() -> dict[int, str]:
    """What the values of a record are, one letter each, by kind: as `struct` has them, and `s` for a summary."""
    head = "".join(
        records.struct_format(records.RECORD_HEAD[name])
        for name in (records.RECORD_HEAD.names or ())[1:]
    )
    found = {}
    for table in records.JOURNAL_TABLES:
        dtype = records.record_dtype(table)
        plain = "".join(records.struct_format(dtype[c.name]) for c in records.plain_fields(table))
        found[records.KINDS[table.name]] = head + plain + "s" * len(table.summaries)
    return found


def _lines() -> Iterator[str]:
    yield "// Made by `scripts/reference` from gradtrace_schemas.journal; do not edit."
    yield "//"
    yield "// Fields lie as they lie in the file: packed, so none may be bound to a reference. All are zero at first."
    yield "#pragma once"
    yield ""
    yield "#include <cstddef>"
    yield "#include <cstdint>"
    yield ""
    yield "namespace gradtrace::layout {"
    yield ""
    yield f'constexpr char kDigest[] = "{digest()}";'
    yield from _body()
    yield ""
    yield "} // namespace gradtrace::layout"


def _body() -> Iterator[str]:
    for kind, names in _CONSTANTS.items():
        for name in names:
            value = getattr(records, name)
            # The least integer has no literal: its digits alone are too large.
            text = f"{value + 1} - 1" if isinstance(value, int) and value < 0 else str(value)
            yield f"constexpr {kind} {_constant(name)} = {text};"
    for name in _STATES:
        yield f"constexpr uint8_t {_constant(name)} = {getattr(summary, name)};"
    assert records.HEADER.fields is not None
    for name in _HEADER_FIELDS:
        yield f"constexpr int64_t {_constant('HEADER_' + name)} = {records.HEADER.fields[name][1]};"
    for name in _TABLES:
        yield f"constexpr uint16_t {_constant('KIND_' + name)} = {records.KINDS[name]};"
    yield ""
    yield "// What the values of a record are, by its kind: as Python's `struct` has them, and `s` for a summary."
    yield f"constexpr const char* kFormats[{_constant('DROP_KINDS')}] = {{"
    every = formats()
    for number in range(max(every) + 1):
        yield f'    "{every.get(number, "")}",'
    yield "};"
    for structure, names in (("Running", ()), ("Place", ("moved_ns", "moved_ns_again"))):
        wanted = [n for n in _STRUCTURES[structure].names or () if n not in ("spare", *names)]
        codes = "".join(records.struct_format(_STRUCTURES[structure][n]) for n in wanted)
        yield f'constexpr char k{structure}Format[] = "{codes}";'
    yield ""
    yield "#pragma pack(push, 1)"
    shape = np.dtype([("ndim", "u1"), ("sizes", "<i8", (records.MAX_DIMENSIONS,))])
    yield from _structure("Shape", shape)
    for name, dtype in _STRUCTURES.items():
        yield from _structure(name, dtype)
    for name in _TABLES:
        yield from _structure(_camel(name), records.record_dtype(TABLES[name]))
    yield "#pragma pack(pop)"


def _structure(name: str, dtype: np.dtype[Any]) -> Iterator[str]:
    assert dtype.fields is not None
    yield ""
    yield f"struct {name} {{"
    for field, about in dtype.fields.items():
        yield f"  {_declared(field, about[0])} = {{}};"
    yield "};"
    yield f"static_assert(sizeof({name}) == {dtype.itemsize});"
    for field, about in dtype.fields.items():
        yield f"static_assert(offsetof({name}, {field}) == {about[1]});"


def _declared(field: str, dtype: np.dtype[Any]) -> str:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        [count] = shape
        return f"{_TYPES[base.str[1:]]} {field}[{count}]"
    if dtype.names is not None:
        return f"{'Summary' if dtype == records.SUMMARY else 'Shape'} {field}"
    return f"{_TYPES[dtype.str[1:]]} {field}"


def _constant(name: str) -> str:
    return "k" + _camel(name.lower())


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))
