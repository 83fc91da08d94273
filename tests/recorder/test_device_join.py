"""What devices leave comes to the records that wait for it, in place: or is said to be lost, whatever happens."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradtrace_recorder.drain import drain
from gradtrace_recorder.drain.join import LOST, Joiner
from gradtrace_recorder.guard import Problems
from gradtrace_recorder.journal.writer import JournalWriter
from gradtrace_recorder.launch.claim import Claim
from gradtrace_recorder.summaries.device.devices import pending
from gradtrace_recorder.summaries.device.ring import Ring
from gradtrace_recorder.summaries.device.rows import WORDS, row_of
from gradtrace_recorder.summaries.device.times import DeviceTimes
from gradtrace_recorder.summaries.torch_ops import TorchSummary
from gradtrace_recorder.summaries.values import Packed, as_bytes
from gradtrace_schemas import TABLES
from gradtrace_schemas.batches import arrow_table
from gradtrace_schemas.journal import KINDS, NULL_INT64
from gradtrace_schemas.journal_reader import read_journal
from gradtrace_schemas.summary import STATE_FULL
from support.devices.host_device import HostBackend, HostEvent

FULL = TorchSummary(norms_only=False)


def packed(number: int) -> Packed:
    tensor = torch.randn(10, generator=torch.Generator().manual_seed(number))
    numbers = FULL.numbers(tensor)
    return (10, *numbers[:6], *numbers[6], 0, STATE_FULL)


class Bench:
    """A journal, a ring and a joiner, without a job."""

    def __init__(self, folder: Path, half: int = 8, rows: int = 64, norms_only: bool = False):
        self.journal = JournalWriter(
            folder / "rank.journal",
            rank=0,
            attempt=0,
            wall_start_ns=0,
            monotonic_start_ns=0,
            half_records=half,
            strings_bytes=1 << 16,
        )
        self.ring = Ring(np.zeros((rows, WORDS), np.int64))
        self.backend = HostBackend()
        self.times = DeviceTimes("nodes", self)
        self.lost: Counter[str] = Counter()
        self.joiner = Joiner(
            self.journal, lambda: self.ring, self.times, self.count, norms_only=norms_only
        )

    def place(self, of: object = None) -> str:
        return "host"

    def takes(self, place: object) -> bool:
        return True

    def event(self, place: object) -> HostEvent:
        return self.backend.event(0)

    def begin_reading(self, place: object) -> bool:
        return True

    def count(self, reason: str, count: int) -> None:
        self.lost[reason] += count

    def ask(self, *, device_ns: int = NULL_INT64) -> int:
        """A record whose `received` waits and whose `sent` is known; its ticket."""
        ticket = self.ring.ticket()
        dtype, kind = self.journal.string("float32"), self.journal.string("forward")
        waiting, known = pending(10, ticket, dtype), (*packed(0)[:-2], dtype, STATE_FULL)
        head = (0, 0, -(2**31), 1, kind, 0, 0, 0, device_ns, self.journal.string(None))
        self.journal.append(KINDS["stage_events"], *head, as_bytes(waiting), as_bytes(known))
        return ticket

    def leave(self, ticket: int) -> None:
        """The device leaves that summary."""
        self.ring._memory[ticket % self.ring.size] = row_of(ticket, packed(ticket))

    def rows(self) -> list[dict[str, Any]]:
        """What a reader of the file finds now, as after a kill."""
        contents = read_journal(self.journal.path.read_bytes())
        table = TABLES["stage_events"]
        found: list[dict[str, Any]] = arrow_table(
            table, contents.of(table), contents.strings, 0
        ).to_pylist()
        return found

    def found(self) -> list[int | None]:
        return [row["received_fingerprint"] for row in self.rows()]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.backend.stream.end()


def test_what_came_is_read_and_what_did_not_is_read_as_not_summarised(bench: Bench) -> None:
    tickets = [bench.ask() for _ in range(5)]
    bench.leave(tickets[1])
    bench.leave(tickets[3])
    assert bench.found() == [None] * 5
    bench.joiner.join()
    assert bench.found() == [None, packed(tickets[1])[6], None, packed(tickets[3])[6], None]
    for row in bench.rows():
        assert row["received_numel"] == 10 and row["received_dtype"] == "float32"
        assert (row["received_norm"] is None) == (row["received_fingerprint"] is None)
        assert (row["received_sketch"] is None) == (row["received_fingerprint"] is None)
        assert row["sent_fingerprint"] == packed(0)[6]  # what was known is left alone
    for ticket in tickets:
        bench.leave(ticket)
    bench.joiner.join()
    assert bench.found() == [packed(ticket)[6] for ticket in tickets]
    assert bench.rows()[0]["received_norm"] == packed(tickets[0])[1]


def test_norms_alone_leave_fingerprint_and_sketch_out(tmp_path: Path) -> None:
    bench = Bench(tmp_path, norms_only=True)
    ticket = bench.ask()
    bench.leave(ticket)
    bench.joiner.join()
    row = bench.rows()[0]
    assert row["received_norm"] == packed(ticket)[1]
    assert row["received_fingerprint"] is None and row["received_sketch"] is None
    bench.backend.stream.end()


def test_what_has_no_row_any_more_is_lost_and_counted(bench: Bench) -> None:
    late = [bench.ask() for _ in range(3)]
    for _ in range(bench.ring.size):
        bench.ring.ticket()
    for ticket in late:
        bench.leave(ticket + bench.ring.size)
    bench.joiner.join()
    assert bench.found() == [None] * 3 and bench.lost == {LOST: 3}
    bench.joiner.settle(3, 10)  # nothing is waited for any more
    assert bench.lost == {LOST: 3}


def test_settling_waits_for_its_own_records_and_no_longer_than_it_may(bench: Bench) -> None:
    early, other, late = bench.ask(), bench.ask(), bench.ask()
    code = bench.times.end(bench.times.begin())
    timer = threading.Timer(0.2, bench.leave, [early])
    timer.start()
    bench.joiner.settle(1, 10)  # would take 10 s if it waited for the others
    timer.join()
    assert bench.found()[0] == packed(early)[6] and not bench.lost
    began = time.monotonic()
    bench.joiner.settle(2, 0.1)
    assert time.monotonic() - began < 5
    assert bench.lost == {LOST: 1}
    bench.leave(other)
    bench.leave(late)
    bench.joiner.join()
    assert bench.found() == [packed(early)[6], None, packed(late)[6]]
    assert code != NULL_INT64


def test_what_comes_late_is_waited_for_while_hooks_have_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device may be seconds behind its host. Where the hooks are about to run out of room, nothing is waited for."""
    monkeypatch.setattr(drain, "_SETTLE_SECONDS", 0.05)
    bench = Bench(tmp_path)
    journal = bench.journal
    drained = drain.Drain(journal, Claim(tmp_path, 0, 0), Problems(True), joiner=bench.joiner)
    tickets = [bench.ask() for _ in range(8)]
    drained.start()
    time.sleep(0.5)
    assert journal.drained == 0 and not bench.lost
    for ticket in tickets:
        bench.leave(ticket)
    until(lambda: journal.drained == 8)
    assert not bench.lost
    for _ in range(8 + 4):
        bench.ask()
    until(lambda: journal.drained == 16)
    assert bench.lost == {LOST: 8}
    assert drained.finish(10) and bench.lost == {LOST: 12}
    bench.backend.stream.end()


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_times_come_in_place_and_are_null_until_then(bench: Bench) -> None:
    bench.backend.stream.hold()
    code = bench.times.end(bench.times.begin())
    bench.ask(device_ns=code)
    bench.ask()
    bench.joiner.join()
    assert [row["device_ns"] for row in bench.rows()] == [None, None]
    bench.backend.stream.release()
    bench.backend.stream.wait()
    bench.joiner.join()
    first, second = (row["device_ns"] for row in bench.rows())
    assert first is not None and first >= 0 and second is None
    bench.backend.stream.hold()
    bench.ask(device_ns=bench.times.end(bench.times.begin()))
    bench.joiner.settle(3, 0.05)
    assert bench.rows()[2]["device_ns"] is None
    contents = read_journal(bench.journal.path.read_bytes())
    assert contents.of(TABLES["stage_events"])["device_ns"][2] == NULL_INT64


def test_a_time_that_is_known_before_its_record_is_written_is_kept(bench: Bench) -> None:
    code = bench.times.end(bench.times.begin())
    bench.backend.stream.wait()
    bench.ask()
    bench.joiner.join()
    bench.ask(device_ns=code)
    bench.ask(device_ns=code + 1)  # no such span
    bench.joiner.join()
    found = [row["device_ns"] for row in bench.rows()]
    assert found[0] is None and found[1] is not None and found[2] is None


def test_records_of_both_halves_are_found_while_they_are_drained(bench: Bench) -> None:
    """Three times round the journal: each record gets what its own ticket was given."""
    journal = bench.journal
    for _ in range(6):
        tickets = [bench.ask() for _ in range(8)]
        for ticket in tickets:
            bench.leave(ticket)
        last = journal.written
        bench.joiner.settle(last, 5)
        assert bench.found()[-8:] == [packed(ticket)[6] for ticket in tickets]
        journal.mark_drained(last)
    assert not bench.lost


def test_a_ring_that_let_go_of_a_record_is_not_written_over(bench: Bench) -> None:
    """As in flight mode: the place belongs to a newer record when the old one's summary comes."""
    journal = bench.journal
    ring = journal.keep_as_ring()
    old = [bench.ask() for _ in range(16)]
    ring.end_step(0)
    bench.joiner.join()
    ring.keep(0)
    new = [bench.ask() for _ in range(16)]
    for ticket in old:
        bench.leave(ticket)
    bench.joiner.join()
    assert bench.found() == [None] * 16 and not bench.lost
    for ticket in new:
        bench.leave(ticket)
    bench.joiner.join()
    assert bench.found() == [packed(ticket)[6] for ticket in new]
