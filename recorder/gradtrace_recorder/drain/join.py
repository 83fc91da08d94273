"""Brings what devices have left to the records that wait for it. Called on the drain thread, and sees no torch.

A record is written at once, with a ticket in place of what the device has yet to compute. This looks through new
records for such, and writes over them in place when it comes: so a rank that is killed has lost what the device had
not left, and of the rest what came since the thread's last round. Whoever reads a ticket that nobody replaced reads
that the tensor was not summarised.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradtrace_recorder.journal.flight import Flight
from gradtrace_recorder.journal.writer import JournalWriter
from gradtrace_recorder.summaries.device.ring import Ring
from gradtrace_recorder.summaries.device.rows import Rows, as_summaries
from gradtrace_recorder.summaries.device.times import DeviceTimes
from gradtrace_schemas.journal import (
    DEVICE_NS,
    JOURNAL_TABLES,
    KINDS,
    NULL_INT64,
    SUMMARY,
    is_pending_time,
    record_dtype,
)
from gradtrace_schemas.journal_reader import heads
from gradtrace_schemas.summary import STATE_FULL, STATE_NORMS, STATE_PENDING, STATE_SHAPE

LOST = "lost on the device"
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.002, 0.05  # each look takes the GIL for a moment
_MOST_KNOWN = 65_536


@dataclass(frozen=True)
class _Waiting:
    """Fields of records that wait: the record's number, the field's offset in it, and what stands there."""

    numbers: npt.NDArray[np.uint64]
    offsets: npt.NDArray[np.int64]
    tickets: Rows

    def __len__(self) -> int:
        return len(self.numbers)

    def of(self, chosen: npt.NDArray[np.bool_]) -> _Waiting:
        return _Waiting(self.numbers[chosen], self.offsets[chosen], self.tickets[chosen])

    def and_also(self, other: _Waiting) -> _Waiting:
        return _Waiting(
            np.concatenate((self.numbers, other.numbers)),
            np.concatenate((self.offsets, other.offsets)),
            np.concatenate((self.tickets, other.tickets)),
        )


def _nothing() -> _Waiting:
    return _Waiting(np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.int64))


class Joiner:
    """Finds the fields that wait, and fills them."""

    def __init__(
        self,
        journal: JournalWriter,
        ring: Callable[[], Ring | None],
        times: DeviceTimes,
        count: Callable[[str, int], None],
        *,
        norms_only: bool,
        flight: Flight | None = None,
    ) -> None:
        """`ring` gives None until a device is in use; `count` is told how many summaries were lost, and why."""
        self._journal = journal
        self._ring = ring
        self._times = times
        self._count = count
        self._state = STATE_NORMS if norms_only else STATE_FULL
        self._flight = flight
        self._seen = 0
        self._summaries = _nothing()
        self._spans = _nothing()
        self._known: dict[int, int] = {}  # times of spans whose record has yet to be seen

    def join(self) -> None:
        """Fill what has come so far."""
        self._look()
        self._fill_summaries()
        self._fill_times()

    def settle(
        self, last: int, seconds: float, has_time: Callable[[], bool] = lambda: False
    ) -> None:
        """Fill records up to `last`, waiting so long, longer while `has_time`; what has not come by then is lost."""
        deadline = time.monotonic() + seconds
        pause = _PAUSE_SECONDS
        while True:
            self.join()
            late = self._summaries.numbers <= last, self._spans.numbers <= last
            if not late[0].any() and not late[1].any():
                return
            if time.monotonic() > deadline and not has_time():
                break
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_SECONDS)
        self._lose(self._summaries.of(late[0]))
        self._summaries = self._summaries.of(~late[0])
        self._put_times(self._spans.of(late[1]), np.full(int(late[1].sum()), NULL_INT64))
        self._spans = self._spans.of(~late[1])

    def _look(self) -> None:
        """Look through the records that are new."""
        journal = self._journal
        last = journal.written
        first = max(self._seen, journal.drained) + 1
        if self._ring() is None and not self._times.is_used:
            self._seen = last
            return
        while first <= last:
            end = min(last, ((first - 1) // journal.half_records + 1) * journal.half_records)
            self._look_through(journal.records(first, end))
            first = end + 1
        self._seen = last

    def _look_through(self, records: npt.NDArray[np.uint8]) -> None:
        numbers, kinds = heads(records)
        for kind in np.unique(kinds).tolist():
            summaries, spans = _fields_that_wait().get(kind, ((), ()))
            if not summaries and not spans:
                continue
            places = np.nonzero(kinds == kind)[0]
            for at in summaries:
                chosen = places[records[places, at + _STATE_AT] == STATE_PENDING]
                if len(chosen):
                    found = _waiting(records, numbers, chosen, at, at + _TICKET_AT)
                    self._summaries = self._summaries.and_also(found)
            for at in spans:
                found = _waiting(records, numbers, places, at, at)
                found = found.of(is_pending_time(found.tickets))
                if len(found):
                    self._spans = self._spans.and_also(found)

    def _fill_summaries(self) -> None:
        ring = self._ring()
        if ring is None or not len(self._summaries):
            return
        found, is_there, is_lost = ring.read(self._summaries.tickets)
        if is_there.any():
            came = self._summaries.of(is_there)
            made = as_summaries(found[is_there], self._state)
            raw = made.view(np.uint8).reshape(len(made), SUMMARY.itemsize)
            # The state last: a rank that is killed in between has a summary that is still pending.
            self._journal.amend(came.numbers, came.offsets + _NORM_AT, raw[:, _NORM_AT:_DTYPE_AT])
            self._journal.amend(came.numbers, came.offsets + _STATE_AT, raw[:, _STATE_AT:])
            if self._flight is not None and (made["nan_count"] + made["inf_count"]).any():
                self._flight.saw_not_finite()
        self._lose(self._summaries.of(is_lost))
        self._summaries = self._summaries.of(~is_there & ~is_lost)
        self._summaries = self._summaries.of(self._summaries.numbers > self._journal.drained)

    def _lose(self, lost: _Waiting) -> None:
        if len(lost):
            state = np.full((len(lost), 1), STATE_SHAPE, np.uint8)
            self._journal.amend(lost.numbers, lost.offsets + _STATE_AT, state)
            self._count(LOST, len(lost))

    def _fill_times(self) -> None:
        codes, times = self._times.read()
        known = self._known
        known.update(zip(codes.tolist(), times.tolist(), strict=True))
        waiting = self._spans
        if not len(waiting):
            return
        asked = waiting.tickets.tolist()
        none_comes = [c not in known and not self._times.is_waiting(c) for c in asked]
        settled = np.array([c in known for c in asked]) | np.array(none_comes)
        found = [known.pop(c, NULL_INT64) for c in waiting.tickets[settled].tolist()]
        self._put_times(waiting.of(settled), np.array(found, np.int64))
        self._spans = waiting.of(~settled & (waiting.numbers > self._journal.drained))
        while len(known) > _MOST_KNOWN:
            del known[next(iter(known))]

    def _put_times(self, waiting: _Waiting, times: npt.NDArray[np.int64]) -> None:
        if len(waiting):
            raw = np.ascontiguousarray(times, "<i8").view(np.uint8).reshape(-1, 8)
            self._journal.amend(waiting.numbers, waiting.offsets, raw)


assert SUMMARY.fields is not None
_TICKET_AT: int = SUMMARY.fields["fingerprint"][1]
_NORM_AT: int = SUMMARY.fields["norm"][1]
_DTYPE_AT: int = SUMMARY.fields["dtype"][1]
_STATE_AT: int = SUMMARY.fields["state"][1]


@functools.cache
def _fields_that_wait() -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """By kind of record: offsets of its summaries, and of its time on the device."""
    found: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for table in JOURNAL_TABLES:
        fields: Any = record_dtype(table).fields
        summaries = tuple(int(fields[s.prefix + "summary"][1]) for s in table.summaries)
        spans = (int(fields[DEVICE_NS][1]),) if DEVICE_NS in fields else ()
        found[KINDS[table.name]] = (summaries, spans)
    return found


def _waiting(
    records: npt.NDArray[np.uint8],
    numbers: npt.NDArray[np.uint64],
    chosen: npt.NDArray[np.intp],
    field_at: int,
    ticket_at: int,
) -> _Waiting:
    raw = np.ascontiguousarray(records[chosen, ticket_at : ticket_at + 8])
    offsets = np.full(len(chosen), field_at, np.int64)
    return _Waiting(numbers[chosen], offsets, raw.view("<i8").reshape(-1))
