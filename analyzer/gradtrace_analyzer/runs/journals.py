"""Journals that ranks left behind, or still write: snapshots of them, and the rows that no part holds yet."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gradtrace_analyzer.runs.files import names_in, opened
from gradtrace_analyzer.runs.parts import Part, last_record
from gradtrace_schemas import layout
from gradtrace_schemas.batches import arrow_table
from gradtrace_schemas.groups import GROUPS
from gradtrace_schemas.journal import (
    HEADER,
    HEADER_BYTES,
    JOURNAL_TABLES,
    plain_fields,
)
from gradtrace_schemas.journal_reader import (
    Contents,
    UnreadableJournal,
    read_journal,
)
from gradtrace_schemas.nodes import NODE_EVENTS

_COPIED_AT_ONCE = 256  # records
_MOST_BYTES = 1 << 36


@dataclass(frozen=True)
class Journal:
    """One rank's journal: what it holds, or, where `contents` is None, why it cannot be read."""

    rank: int
    attempt: int
    contents: Contents | None
    why_unreadable: str = ""


def found_journals(run: Path) -> list[Journal]:
    """All journals of a run, by rank. One whose rank ends meanwhile is left out: its rows are in parts.

    Raises Unreadable where their folder cannot be listed.
    """
    folder = run / layout.JOURNALS
    found: list[Journal] = []
    for name in names_in(folder):
        place = layout.rank_and_attempt(name)
        if place is None or not name.endswith(".journal"):
            continue
        try:
            found.append(Journal(*place, journal_at(folder / name)))
        except FileNotFoundError:
            if not (folder / name).is_symlink():
                continue
            found.append(Journal(*place, None, "it is a link to nothing"))
        except OSError as error:
            found.append(Journal(*place, None, error.strerror or str(error)))
        except UnreadableJournal as error:
            found.append(Journal(*place, None, str(error)))
    return found


def journal_at(path: Path) -> Contents:
    """What the journal of that path holds now. Raises OSError, UnreadableJournal."""
    return read_journal(_snapshot(path))


def without_gap(journal: Contents) -> Contents:
    """A ring's records up to the first that was overwritten, and not yet copied, while the file was read.

    The rank goes on while it is read: the copy may lack a record in the middle of its newest steps, of which it holds
    later ones.
    """
    numbers, first = journal.numbers, journal.header["drained"] + 1
    if not len(numbers) or int(numbers[-1]) - first + 1 - len(numbers) <= journal.torn_count:
        return journal
    expected = np.arange(first, first + len(numbers), dtype=np.uint64)
    cut = int(np.argmax(numbers != expected))
    return replace(
        journal, records=journal.records[:cut], numbers=numbers[:cut], kinds=journal.kinds[:cut]
    )


def leftover_rows(
    journal: Contents, parts: Mapping[str, Iterable[Part]], *, is_ring: bool = False
) -> dict[str, pa.Table]:
    """By table, the rows that lie in the journal and in none of the rank's parts.

    They have the columns of a part and a column `rank`. A rank killed between writing a part and saying so
    in the journal has rows in both: the part's own mark tells which. Tables without such rows are left out.
    A ring writes rows of `groups` again before it lets go of them: of equal ones the last counts.
    """
    header = journal.header
    found: dict[str, pa.Table] = {}
    for table in JOURNAL_TABLES:
        records = journal.of(table, header["drained"])
        after = last_record(parts.get(table.name, ()))
        records = records[records["record_number"] > after]
        if table is NODE_EVENTS:
            running = journal.running_nodes()
            records = np.concatenate((records, running[running["record_number"] > after]))
        if len(records):
            if is_ring and table is GROUPS:
                records = _last_of_equal(records)
            found[table.name] = arrow_table(
                table, records, journal.strings, header["attempt"], header["rank"]
            )
    return found


def _last_of_equal(records: npt.NDArray[Any]) -> npt.NDArray[Any]:
    own = [column.name for column in plain_fields(GROUPS)]
    places = {tuple(row[name].item() for name in own): n for n, row in enumerate(records)}
    return records[sorted(places.values())]


def _snapshot(path: Path) -> bytes:
    """The journal's bytes, its front read after its records.

    The records of a living rank use strings that may be newer than a front read before them. A ring may have turned
    meanwhile: what is new in it is copied again, which takes a moment, where the whole takes several steps.
    """
    with opened(path) as file:
        whole = bytearray(file.read(_end(file)))
        if len(whole) < HEADER.itemsize:
            return bytes(whole)
        front = whole[: HEADER.itemsize]
        now = os.pread(file.fileno(), HEADER.itemsize, 0)
        if now != front and _drained(now) != _drained(front):
            _copy_again(file.fileno(), whole, np.frombuffer(now, HEADER, 1)[0])
        now = os.pread(file.fileno(), HEADER.itemsize, 0)
        header = np.frombuffer(now, HEADER, 1)[0]
        used = int(header["strings_offset"]) + int(header["strings_used"])
        front_bytes = min(
            used, int(header["records_offset"]), len(whole)
        )  # one that is damaged says anything
        front = bytearray(os.pread(file.fileno(), max(front_bytes, 0), 0))
        front[: HEADER.itemsize] = now  # what it says of strings is what was copied
        return bytes(front + whole[len(front) :])


def _end(file: BinaryIO) -> int:
    """The bytes of a journal that lies in the file, as its header says: what is behind them is not ours, and may be
    huge."""
    front = os.pread(file.fileno(), HEADER.itemsize, 0)
    if len(front) < HEADER.itemsize:
        return len(front)
    header = np.frombuffer(front, HEADER, 1)[0]
    places = 2 * int(header["half_records"]) * int(header["record_bytes"])
    strings = int(header["strings_offset"]) + int(header["strings_bytes"])
    said = max(int(header["records_offset"]) + places, strings, HEADER_BYTES)
    size = os.fstat(file.fileno()).st_size
    if min(said, size) > _MOST_BYTES:
        raise UnreadableJournal(f"it says to be {min(said, size):,} bytes large: it is damaged")
    return min(said, size)


def _drained(header: bytes | bytearray) -> int:
    return int(np.frombuffer(header, HEADER, 1)["drained"][0])


def _copy_again(file: int, whole: bytearray, header: Any) -> None:
    """Copy the records after the drained ones, up to one that is not the next."""
    size, start = int(header["record_bytes"]), int(header["records_offset"])
    places = 2 * int(header["half_records"])
    number = first = int(header["drained"])
    while size >= 8 and number - first < places and len(whole) >= start + places * size:
        at = number % places
        count = min(_COPIED_AT_ONCE, places - at)
        data = os.pread(file, count * size, start + at * size)
        if len(data) < count * size:
            return
        whole[start + at * size : start + at * size + len(data)] = data
        for place in range(count):
            number += 1
            if int.from_bytes(data[place * size : place * size + 8], "little") != number:
                return
