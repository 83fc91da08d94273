"""Held records: of one and its replacement exactly one is read, whenever the rank dies."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gradtrace_recorder.journal.writer import JournalWriter
from gradtrace_schemas import TABLES
from gradtrace_schemas.batches import arrow_table
from gradtrace_schemas.journal import (
    HEADER,
    HELD_PLACES,
    KINDS,
    RECORD_BYTES,
)
from gradtrace_schemas.journal_reader import (
    read_journal,
)

GROUPS = KINDS["groups"]


def journal(folder: Path) -> JournalWriter:
    return JournalWriter(
        folder / "rank.journal",
        rank=0,
        attempt=0,
        wall_start_ns=0,
        monotonic_start_ns=0,
        half_records=8,
        strings_bytes=1 << 16,
    )


def row(writer: JournalWriter, step: int, name: str) -> tuple[int, ...]:
    null = writer.string(None)
    return (step, 0, 0, writer.string(name), null, null, null, -(2**31), null, null, null)


def names(data: bytes) -> list[tuple[int, int, str]]:
    """(record_index, step, name) of every row that is read."""
    contents = read_journal(data)
    table = TABLES["groups"]
    rows = arrow_table(table, contents.of(table), contents.strings, 0).to_pylist()
    return [(r["record_index"], r["step"], r["name"]) for r in rows]


def test_a_held_row_is_read_after_all_others(tmp_path: Path) -> None:
    writer = journal(tmp_path)
    place = writer.hold(GROUPS, *row(writer, 1, "under way"))
    writer.append(GROUPS, *row(writer, 0, "first"))
    writer.append(GROUPS, *row(writer, 0, "second"))
    assert names(writer.path.read_bytes()) == [
        (1, 0, "first"),
        (2, 0, "second"),
        (3, 1, "under way"),
    ]
    writer.settle(place, GROUPS, *row(writer, 1, "complete"))
    assert names(writer.path.read_bytes()) == [
        (1, 0, "first"),
        (2, 0, "second"),
        (3, 1, "complete"),
    ]
    writer.close(remove=True)


def test_at_every_moment_of_settling_one_of_the_two_is_read(tmp_path: Path) -> None:
    """The three writes of settling, each as if the rank died right after it."""
    writer = journal(tmp_path)
    place = writer.hold(GROUPS, *row(writer, 1, "under way"))
    assert place is not None
    writer.string("complete")
    before = bytearray(writer.path.read_bytes())
    writer.settle(place, GROUPS, *row(writer, 1, "complete"))
    after = writer.path.read_bytes()
    header = np.frombuffer(after, HEADER, 1)[0]
    at = int(header["held_offset"]) + place * RECORD_BYTES
    start = int(header["records_offset"])

    claimed = before.copy()
    claimed[at + RECORD_BYTES - 8 : at + RECORD_BYTES] = (1).to_bytes(8, "little")
    assert [name for *_, name in names(bytes(claimed))] == ["under way"]
    written = claimed.copy()
    written[start : start + RECORD_BYTES] = after[start : start + RECORD_BYTES]
    assert [name for *_, name in names(bytes(written))] == ["complete"]
    drained = written.copy()
    offset = HEADER.fields["drained"][1]  # type: ignore[index]
    drained[offset : offset + 8] = (1).to_bytes(8, "little")
    assert names(bytes(drained)) == []  # it lies in a part
    writer.close(remove=True)


def test_more_than_there_are_places_are_not_held_and_not_lost(tmp_path: Path) -> None:
    writer = journal(tmp_path)
    places = [writer.hold(GROUPS, *row(writer, 0, "x")) for _ in range(HELD_PLACES + 1)]
    assert places.count(None) == 1
    writer.settle(None, GROUPS, *row(writer, 0, "complete"))
    assert writer.recorded == {"groups": 1}
    for place in places[:3]:
        writer.settle(place, GROUPS, *row(writer, 0, "complete"))
    assert writer.hold(GROUPS, *row(writer, 0, "x")) is not None  # a place is used again
    writer.close(remove=True)
