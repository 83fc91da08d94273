"""Recordings without the machine that they were made on.

Folders are renamed in place, to names of the same length, so that nothing moves in a journal; the host's name and its
kernel are replaced. A journal says of its process on which machine it was and when it began: what was dead when it was
copied is claimed for the machine that reads it (`claim_journals`), where no process began then, so it is dead there
too; what lived is of a machine that nobody has, where its last sign of life decides.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gradtrace_schemas import layout
from gradtrace_schemas.journal import HEADER
from gradtrace_schemas.journal_reader import UnreadableJournal, read_journal
from gradtrace_schemas.processes import machine_token
from support.frozen.packing import read_rows, write_rows

_NOBODYS, _THE_READERS = 1, 2  # for machines, in the journals that are kept
_FIRST_TICK = 1  # when no process begins that has an identifier of its own

_IN_JSON = (
    (re.compile(rb'("host": )"[^"]*"'), rb'\1"a-host"'),
    (re.compile(rb'("system": )"[^"]*"'), rb'\1"Linux-6.1-x86_64-with-glibc2.36"'),
)


def scrub(run: Path, target: Path, folders: Sequence[str], living: Collection[str]) -> None:
    """Copy a run without what tells its machine: `folders` are the beginnings of its paths, `living` the names of
    journals of processes that were alive."""
    names = [(folder.encode(), _substitute(folder).encode()) for folder in folders]
    for path in sorted(run.rglob("*")):
        place = target / path.relative_to(run)
        if not path.is_file():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        table = read_rows(path)
        if table is not None:
            rows, metadata = table
            renamed = _renamed(rows, names)
            if renamed is rows:
                place.write_bytes(path.read_bytes())
            else:
                write_rows(place, renamed, metadata)
            continue
        data = path.read_bytes()
        for old, new in names:
            data = data.replace(old, new)
        if path.suffix == ".json":
            for pattern, text in _IN_JSON:
                data = pattern.sub(text, data)
        if path.suffix == ".journal" and len(data) >= HEADER.itemsize:
            data = _with_process(data, _NOBODYS if path.name in living else _THE_READERS)
            data = without_unread(data)
        place.write_bytes(data)


def without_unread(data: bytes) -> bytes:
    """A journal without the records that were written out, and lie in a part since, and without the zeros at its end.

    No reader sees them; where one would, of a header that is damaged, it is left as it is.
    """
    header = np.frombuffer(data, HEADER, 1)[0]
    size, start = int(header["record_bytes"]), int(header["records_offset"])
    if not 16 <= size <= 1 << 16 or start >= len(data):
        return data
    count = min(2 * int(header["half_records"]), (len(data) - start) // size)
    changed = np.frombuffer(data, np.uint8).copy()
    records = changed[start : start + count * size].reshape(count, size)
    first, last = (
        np.ascontiguousarray(records[:, at]).view("<u8") for at in (np.s_[:8], np.s_[-8:])
    )
    records[np.maximum(first, last)[:, 0] <= header["drained"]] = 0
    short = changed.tobytes().rstrip(b"\0")
    short += bytes(-len(short) % size)
    return short if _read_alike(data, short) else data


def _read_alike(a: bytes, b: bytes) -> bool:
    try:
        both = [read_journal(a), read_journal(b)]
    except UnreadableJournal:
        return False
    x, y = (
        [v.tobytes() if isinstance(v, np.ndarray) else v for v in vars(contents).values()]
        for contents in both
    )
    return x == y


def claim_journals(place: Path) -> None:
    """Make processes that were dead dead on this machine. (Where it has no token, they are merely silent.)"""
    for path in place.rglob(f"{layout.JOURNALS}/*.journal"):
        with path.open("r+b") as file:
            data = file.read(HEADER.itemsize)
            if len(data) == HEADER.itemsize and _machine(data) == _THE_READERS:
                file.seek(0)
                file.write(_with_process(data, machine_token()))


def _machine(data: bytes) -> int:
    at, size = HEADER.fields["machine"][1], 8  # type: ignore[index]
    return int.from_bytes(data[at : at + size], "little")


def _with_process(data: bytes, machine: int) -> bytes:
    changed = bytearray(data)
    for name, value in (("machine", machine), ("process_start", _FIRST_TICK)):
        at = HEADER.fields[name][1]  # type: ignore[index]
        changed[at : at + 8] = value.to_bytes(8, "little")
    return bytes(changed)


def _substitute(folder: str) -> str:
    """Another absolute path of the same length."""
    return (
        ("/some/where/else" + "/deep" * len(folder))[: len(folder)]
        .rstrip("/")
        .ljust(len(folder), "e")
    )


def _renamed(rows: pa.Table, names: Sequence[tuple[bytes, bytes]]) -> pa.Table:
    for at, field in enumerate(rows.schema):
        if not pa.types.is_string(field.type):
            continue
        for old, new in names:
            if pc.any(pc.match_substring(rows[field.name], old.decode())).as_py():
                changed = pc.replace_substring(rows[field.name], old.decode(), new.decode())
                rows = rows.set_column(at, field, changed)
    return rows
