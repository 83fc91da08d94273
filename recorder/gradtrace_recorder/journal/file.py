"""The journal's file before its first record: allocated, mapped, its header written."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gradtrace_schemas import SCHEMA_VERSION
from gradtrace_schemas.journal import (
    DROPS_OFFSET,
    FORMAT_VERSION,
    HEADER,
    HEADER_BYTES,
    HELD_PLACES,
    MAGIC,
    PLACES_OFFSET,
    RECORD_BYTES,
    THREAD,
    THREAD_SLOTS,
)


@dataclass(frozen=True)
class JournalFile:
    """A new journal, mapped, and where its parts begin."""

    map: mmap.mmap
    running_offset: int
    held_offset: int
    strings_offset: int
    records_offset: int


def new_journal_file(
    path: Path, *, half_records: int, strings_bytes: int, **about: int
) -> JournalFile:
    """A new journal at that place; `about` are fields of its header.

    Raises OSError when it cannot be allocated: a full disk is an error here, not a SIGBUS later.
    """
    held = HEADER_BYTES + THREAD_SLOTS * THREAD.itemsize
    strings = held + HELD_PLACES * RECORD_BYTES
    page = mmap.PAGESIZE
    records = -(-(strings + strings_bytes) // page) * page
    made = _allocated(path, records + 2 * half_records * RECORD_BYTES)
    header = np.zeros((), HEADER)
    fields = {
        "format_version": FORMAT_VERSION,
        "schema_version": SCHEMA_VERSION,
        "record_bytes": RECORD_BYTES,
        "half_records": half_records,
        "running_offset": HEADER_BYTES,
        "held_offset": held,
        "strings_offset": strings,
        "strings_bytes": strings_bytes,
        "records_offset": records,
        "places_offset": PLACES_OFFSET,
        "drops_offset": DROPS_OFFSET,
        "pid": os.getpid(),
        **about,
    }
    for name, value in fields.items():
        header[name] = value
    made[: HEADER.itemsize] = header.tobytes()
    made[: len(MAGIC)] = MAGIC
    return JournalFile(made, HEADER_BYTES, held, strings, records)


def _allocated(path: Path, size: int) -> mmap.mmap:
    """A new file of that size, all of it allocated, mapped."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
