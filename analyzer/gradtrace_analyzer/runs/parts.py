"""The Parquet parts of a run: which there are, and which of them are whole.

A part is renamed into place when it is complete, so one that is cut off was damaged later: by a full disk,
a copy that stopped, a power failure. It is left out and named; every other row is still answered.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from gradtrace_analyzer.runs.files import names_in, opened
from gradtrace_schemas import ALL_TABLES, layout

_MAGIC = b"PAR1"
_LEAST_BYTES = 12  # magic, an empty footer, its length, magic


@dataclass(frozen=True)
class Part:
    """One Parquet file of a table, by its absolute path. `number` counts a rank's parts of the table in an attempt."""

    table: str
    rank: int
    attempt: int
    number: int
    path: str
    size_bytes: int

    @property
    def short_name(self) -> str:
        """Its path within the run: `steps/rank=00003/part-0-1.parquet`."""
        return f"{self.table}/{layout.rank_name(self.rank)}/{os.path.basename(self.path)}"


@dataclass(frozen=True)
class DamagedPart:
    """A part that no Parquet reader would open, and what is wrong with it."""

    part: Part
    why: str


def found_parts(run: str, of_rank: int | None = None) -> list[Part | DamagedPart]:
    """All parts under a run's absolute path, or those of one rank, by table, rank and number.

    Opens each for its two ends. 10,000 parts take about a tenth of a second. Raises Unreadable for a folder that cannot
    be listed.
    """
    found: list[Part | DamagedPart] = []
    for table in ALL_TABLES:
        folder = os.path.join(run, table.name)
        for rank_folder in names_in(folder):
            rank = layout.rank_of_folder(rank_folder)
            if rank is None or of_rank not in (None, rank):
                continue
            inside = os.path.join(folder, rank_folder)
            numbered = sorted(
                (numbers, name)
                for name in names_in(inside)
                if (numbers := layout.attempt_and_number(name)) is not None
            )
            for (attempt, number), name in numbered:
                found.append(
                    _checked(table.name, rank, attempt, number, os.path.join(inside, name))
                )
    return found


def last_record(parts: Iterable[Part]) -> int:
    """The newest journal record that lies in one of these parts, 0 where none says so.

    Reads each part's footer. One that cannot be read holds nothing: what the journal still has of it is not there
    twice.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq  # takes a while, and most runs left no journal

    newest = 0
    for part in parts:
        try:
            metadata = pq.read_metadata(part.path).metadata or {}
            newest = max(newest, int(metadata.get(layout.PART_LAST_RECORD, 0)))
        except (OSError, ValueError, pa.ArrowException):
            continue
    return newest


def _checked(table: str, rank: int, attempt: int, number: int, path: str) -> Part | DamagedPart:
    try:
        with opened(path, buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            part = Part(table, rank, attempt, number, path, size)
            if size < _LEAST_BYTES:
                return DamagedPart(part, f"is cut off after {size} bytes")
            head = file.read(4)
            file.seek(-8, os.SEEK_END)
            footer_bytes, tail = struct.unpack("<I4s", file.read(8))
    except OSError as error:
        part = Part(table, rank, attempt, number, path, 0)
        return DamagedPart(part, f"cannot be read ({error.strerror or error})")
    if tail != _MAGIC:
        return DamagedPart(part, f"is cut off after {size} bytes")
    if head != _MAGIC or not 0 < footer_bytes <= size - _LEAST_BYTES:
        return DamagedPart(part, "is no whole Parquet file")
    return part
