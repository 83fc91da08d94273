"""Damages journals and parts at random and reads them: nothing is raised but what a person can be told, and what a
kill can do to a journal (an end that is missing, a record half written) invents no row."""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from gradtrace_analyzer.cli import is_of_damage
from gradtrace_analyzer.errors import GradtraceError
from gradtrace_analyzer.failures.endings import endings
from gradtrace_analyzer.runs.last_seen import of_journal, of_object
from gradtrace_analyzer.runs.opening import open_run
from gradtrace_analyzer.sql.views import connect
from gradtrace_recorder.journal.writer import JournalWriter
from gradtrace_schemas import ALL_TABLES, TABLES, layout
from gradtrace_schemas.batches import arrow_table, write_part
from gradtrace_schemas.journal import (
    HEADER,
    JOURNAL_TABLES,
    KINDS,
    NULL_INT32,
    RECORD_BYTES,
    SUMMARY,
    plain_fields,
)
from gradtrace_schemas.journal_reader import (
    Contents,
    UnreadableJournal,
    read_journal,
)
from gradtrace_schemas.summary import STATE_FULL
from gradtrace_schemas.table import SHAPE, STRING, STRINGS

Row = tuple[Any, ...]
_RECORDS = 60


class Fuzzer:
    """A valid run in `folder`, and random damages of it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.draw = random.Random(seed)
        self.valid = _valid_run(folder / "valid", self.draw)
        self.rows = {_without_texts(row) for row in _rows(read_journal(self.valid))}
        self.unreadable = self.read = 0

    def journal(self) -> None:
        """One damaged journal, read."""
        kind = self.draw.choice(("cut", "torn", "torn held", "bytes", "header", "garbage"))
        data = getattr(self, f"_{kind.replace(' ', '_')}")()
        try:
            contents = read_journal(data)
        except UnreadableJournal:
            self.unreadable += 1
            return
        self.read += 1
        rows = _rows(contents)
        assert of_object(of_journal(contents).as_object()) is not None
        if kind in ("cut", "torn"):  # the strings may be cut off too: names are null then
            assert {_without_texts(row) for row in rows} <= self.rows, kind

    def run(self) -> None:
        """A run of which one file is damaged, and asked."""
        place = self.folder / "damaged"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.folder / "valid", place)
        files = sorted(p for p in place.rglob("*") if p.is_file())
        path = self.draw.choice(files)
        path.write_bytes(self._damaged(path.read_bytes()))
        try:
            run = open_run(place)
            endings(run)
            with connect([run]) as connection:
                for table in ALL_TABLES:
                    connection.execute(f"SELECT * FROM {table.name}").fetchall()
        except GradtraceError:
            self.unreadable += 1
        except (duckdb.Error, UnicodeDecodeError) as error:
            if not is_of_damage(error):
                raise
            self.unreadable += 1
        else:
            self.read += 1

    def _cut(self) -> bytes:
        return self.valid[: self.draw.randrange(len(self.valid))]

    def _torn(self) -> bytes:
        """The beginning of a new record over an old one that is drained, or over nothing."""
        header = np.frombuffer(self.valid, HEADER, 1)[0]
        data = bytearray(self.valid)
        places = 2 * int(header["half_records"])
        place = self.draw.randrange(places)
        start = int(header["records_offset"]) + place * RECORD_BYTES
        length = self.draw.randrange(RECORD_BYTES - 8)
        data[start + 8 : start + 8 + length] = self.draw.randbytes(length)
        if int.from_bytes(data[start : start + 8], "little") > header["drained"]:
            data[start : start + 8] = bytes(8)
        return bytes(data)

    def _torn_held(self) -> bytes:
        header = np.frombuffer(self.valid, HEADER, 1)[0]
        data = bytearray(self.valid)
        start = int(header["held_offset"]) + self.draw.randrange(64) * RECORD_BYTES
        length = self.draw.randrange(RECORD_BYTES)
        data[start : start + length] = self.draw.randbytes(length)
        return bytes(data)

    def _bytes(self) -> bytes:
        return self._damaged(self.valid)

    def _header(self) -> bytes:
        data = bytearray(self.valid)
        assert HEADER.fields is not None
        for name in self.draw.sample(list(HEADER.names or ())[1:], self.draw.randint(1, 3)):
            dtype, offset = HEADER.fields[name][:2]
            value = self.draw.choice(
                (
                    bytes(dtype.itemsize),
                    b"\xff" * dtype.itemsize,
                    self.draw.randbytes(dtype.itemsize),
                )
            )
            data[offset : offset + dtype.itemsize] = value
        return bytes(data)

    def _garbage(self) -> bytes:
        head = self.valid[: self.draw.choice((0, 8, 12, 100, 4096))]
        return head + self.draw.randbytes(self.draw.randrange(20_000))

    def _damaged(self, data: bytes) -> bytes:
        if self.draw.random() < 0.3:
            return data[: self.draw.randrange(len(data) + 1)]
        damaged = bytearray(data)
        for _ in range(self.draw.randint(1, 8)):
            at = self.draw.randrange(len(data))
            piece = self.draw.randbytes(self.draw.choice((1, 4, 64)))[: len(data) - at]
            damaged[at : at + len(piece)] = piece
        return bytes(damaged)


def _valid_run(run: Path, draw: random.Random) -> bytes:
    """A rank that was killed: parts, a journal with records of every table, one that is held, a running Node."""
    path = layout.journal_file(run, 0, 0)
    path.parent.mkdir(parents=True)
    journal = JournalWriter(
        path, rank=0, attempt=0, wall_start_ns=10, monotonic_start_ns=20, half_records=32, strings_bytes=4096
    )  # fmt: skip
    for number in range(_RECORDS):
        table = JOURNAL_TABLES[number % len(JOURNAL_TABLES)]
        journal.append(KINDS[table.name], number // 20, 0, 0, *_values(journal, table, draw))
        if number == 31:
            _drain(run, journal, 32)
    journal.hold(KINDS["buckets"], 9, 0, 0, *_values(journal, TABLES["buckets"], draw))
    name = journal.string("MmBackward0")
    for thread in range(3):
        journal.push_running(thread, name, name, 0, 1, 2, 0, 0, 5, name, name, 7, 99, NULL_INT32)
        journal.move(thread, 50, (thread + 1, name, 0, 0, 2, 0, 0))
    data = path.read_bytes()
    journal.close(remove=False)
    (run / layout.RUN_FILE).write_text('{"schema_version": 3, "world_size": 1}')
    layout.rank_file(run, 0, 0).parent.mkdir()
    layout.rank_file(run, 0, 0).write_text('{"rank": 0, "attempt": 0, "complete": false, "pid": 1}')
    path.write_bytes(data)
    return data


def _drain(run: Path, journal: JournalWriter, last: int) -> None:
    contents = read_journal(journal.path.read_bytes())
    for table in JOURNAL_TABLES:
        rows = arrow_table(table, contents.of(table), contents.strings, 0)
        if len(rows):
            write_part(layout.part_file(run, table.name, 0, 0, 0), table, rows, last)
    journal.mark_drained(last)


def _values(journal: JournalWriter, table: Any, draw: random.Random) -> list[Any]:
    values: list[Any] = []
    for column in plain_fields(table):
        if column.type == STRINGS:
            values.append(journal.string('["a.weight", null]'))
        elif column.type == STRING:
            values.append(
                journal.string(draw.choice(("[0, 1]", "forward", "blocks.0", "all_reduce")))
            )
        elif column.type == SHAPE:
            values += [2, 3, 4, *(0,) * 6]
        elif pa.types.is_floating(column.type):
            values.append(draw.random())
        else:
            values.append(draw.randrange(2))
    for _ in table.summaries:
        filled = np.zeros((), SUMMARY)
        filled["numel"], filled["state"], filled["fingerprint"] = (
            12,
            STATE_FULL,
            draw.randrange(2**62),
        )
        values.append(filled.tobytes())
    return values


def _rows(contents: Contents) -> list[Row]:
    found: list[Row] = []
    for table in JOURNAL_TABLES:
        rows = arrow_table(table, contents.of(table), contents.strings, 0)
        found += [(table.name, repr(row)) for row in rows.to_pylist()]
    return found


def _without_texts(row: Row) -> Row:
    name, text = row
    content = eval(text, {"nan": float("nan"), "inf": float("inf")})
    # A held record is numbered on from the newest that is there.
    texts = {c.name for c in TABLES[name].columns if c.type in (STRING, STRINGS)} | {"record_index"}
    return name, repr({key: value for key, value in content.items() if key not in texts})


def fuzz(folder: Path, seconds: float, seed: int) -> Fuzzer:
    """Damage and read for so many seconds of this process's CPU time; raises what reading raised."""
    fuzzer = Fuzzer(folder, seed)
    deadline = time.process_time() + seconds
    turn = 0
    while time.process_time() < deadline:
        state = fuzzer.draw.getstate()
        try:
            fuzzer.run() if turn % 10 == 0 else fuzzer.journal()
        except Exception as error:
            error.args = (*error.args, f"seed {seed}, turn {turn}, {hash(state)}")
            raise
        turn += 1
    return fuzzer


if __name__ == "__main__":
    chosen = int(sys.argv[2])
    with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
        done = fuzz(Path(place), float(sys.argv[1]), chosen)
    print(
        f"seed {chosen}: {done.read:,} damaged files were read, {done.unreadable:,} were refused in words"
    )
