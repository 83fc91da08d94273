"""One thread: journal records -> record batches -> Parquet parts.

Nothing here calls torch, or loads it, which a contract holds. (The `Joiner` that it is handed brings what devices leave
to the records, for which it asks the device's driver where there are times to read.)
"""

from __future__ import annotations

import _thread
import collections
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

# Arrow would import both with the first part, on our thread (40 ms): so many objects set off Python's collector there,
# and with it finalizers of the job's that expect another thread. Only when both are loaded at the start are they rare.
import numpy.ma
import numpy.typing as npt
import pyarrow.compute  # noqa: F401

from gradtrace_recorder.drain.join import Joiner
from gradtrace_recorder.forks import is_there
from gradtrace_recorder.guard import Problems
from gradtrace_recorder.journal.flight import Flight
from gradtrace_recorder.journal.wakeup import Wakeup
from gradtrace_recorder.journal.writer import JournalWriter
from gradtrace_recorder.launch.claim import Claim
from gradtrace_schemas import TABLES, layout
from gradtrace_schemas.batches import arrow_table, write_part
from gradtrace_schemas.digests import Digests
from gradtrace_schemas.journal import JOURNAL_TABLES
from gradtrace_schemas.journal_reader import heads, of_table

# How often the thread says that the process lives, and tries again what failed.
_BEAT_SECONDS = 1.0

# How long a profiler or a fork waits at most for the thread to go: it may be writing. How often it looks.
_PARK_SECONDS, _LOOK_SECONDS = 0.5, 0.0001

# Threads that drain a journal, by ident.
DRAINING: set[int] = set()

# How long what is written waits for what a device has yet to leave: while the job runs, and when it ends. A device may
# be a long step behind its host: while hooks have room, what they write meanwhile costs nothing.
_SETTLE_SECONDS, _END_SECONDS = 2.0, 1.0
_PATIENT_SECONDS = 60.0


class Drain:
    """Empties full halves of a journal while the job runs, and the rest at the end.

    A part is renamed before the journal's records count as drained; it says up to which record it goes, so
    a process killed in between leaves rows that are in both, and readers can tell.
    """

    def __init__(
        self,
        journal: JournalWriter,
        claim: Claim,
        problems: Problems,
        flight: Flight | None = None,
        flight_written: Callable[[], None] = lambda: None,
        joiner: Joiner | None = None,
    ) -> None:
        """`joiner` brings to the records what devices leave. In flight mode only what `flight` wants is drained;
        `flight_written` is called when parts hold it."""
        self._journal = journal
        self._flight = flight
        self._flight_written = flight_written
        self._joiner = joiner
        self._claim = claim
        self._problems = problems
        self._digests = Digests()
        self._next_part: collections.Counter[str] = collections.Counter()
        self._ending = False
        self._end_by = 0.0
        self._failed = self._is_gone = False
        self._prepared: dict[str, npt.NDArray[Any]] | None = (
            None  # what a failed drain has yet to write
        )
        self._prepared_to = 0
        self._parks = False
        self._over = Wakeup()
        self._changing = threading.Lock()
        self._thread: object | None = None  # the one that is there and does not end
        self._ident = self._native_id = 0

    @property
    def is_running(self) -> bool:
        """Whether the thread is there."""
        return self._thread is not None

    def start(self) -> None:
        """Start the thread; it is there once only.

        Not as one of `threading`'s: those the job may count, and may have traced and profiled from their first line.
        """
        with self._changing:
            self._parks = False
            if self._thread is None:
                self._thread = this = object()
                self._over.clear()
                self._native_id = 0
                try:
                    self._ident = _thread.start_new_thread(self._quiet, (this,))
                except RuntimeError:  # no more threads are to be had
                    self._thread = None
                    self._over.set()
                    raise

    def park(self) -> None:
        """End the thread for now. It goes on with `start`, or when there is to be no more.

        torch.profiler looks at the threads that there are when it begins, and shows the stacks of each. Python's
        `os.fork` counts them. It is waited for, but not for long: it may be writing.
        """
        self._parks = True
        self._journal.half_is_full.set()
        until = time.monotonic() + _PARK_SECONDS
        # It is gone when Python has forgotten its frames, and the system its number: a moment after it has said so.
        while (
            not self._native_id or self._ident in sys._current_frames() or is_there(self._native_id)
        ) and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)

    def finish(self, timeout: float) -> bool:
        """Drain all that is left; whether that was done within `timeout` seconds."""
        self._end_by = time.monotonic() + _END_SECONDS
        self._ending = True
        self.start()  # it may be parked
        self._journal.half_is_full.set()
        return self._over.wait(timeout) and not self._failed

    def _quiet(self, this: object) -> None:
        with self._changing:
            own = threading.get_ident()  # whoever started it has said which it is
        self._native_id = threading.get_native_id()
        DRAINING.add(own)
        try:
            # Of numbers that are too large numpy would warn on the job's stderr, or raise, as the job wants of its own.
            with np.errstate(all="ignore"):
                self._run()
        finally:
            DRAINING.discard(own)
            with self._changing:
                if self._thread is this:
                    self._thread = None
                    self._over.set()

    def _is_to_go(self) -> bool:
        """Whether the thread parks: another may be started from here on."""
        with self._changing:
            if not self._parks or self._ending:
                return False
            self._thread = None
            return True

    def _run(self) -> None:
        while not (self._ending or self._parks) and self._journal.map_ahead():
            pass  # each page that the job's threads came to first would cost them 2 us
        while True:
            # After a failure (a disk that is full for a while) the journal fills up, and says so no more.
            is_asked = self._journal.half_is_full.wait(_BEAT_SECONDS)
            self._journal.beat(time.time_ns())
            if not is_asked and not self._failed and self._flight is None and self._joiner is None:
                continue
            if self._is_to_go():
                return  # what made it wake, if not this, will be found when it goes on
            self._journal.half_is_full.clear()
            ending = self._ending
            self._has_just_lost_the_directory()
            try:
                self._join(None, 0.0)
                if self._flight is not None:
                    self._flight.look()
                self._drain(all_of_it=ending)
                self._failed = False
            except Exception as error:
                # The journal still holds what could not be written; once full it drops what comes after.
                self._failed = True
                if self._has_just_lost_the_directory():
                    continue  # to the next beat, or, at the end, to the last try
                self._problems.add(
                    f"could not write what was recorded into {self._claim.run}: "
                    f"{type(error).__name__}: {error}; the journal keeps what it has room for"
                )
            if ending:
                return

    def _join(self, last: int | None, seconds: float) -> None:
        """Bring to the records what devices have left; up to `last`, what comes within so many seconds."""
        if self._joiner is None:
            return
        try:
            if last is None:
                self._joiner.join()
            else:
                until = time.monotonic() + _PATIENT_SECONDS
                self._joiner.settle(last, seconds, lambda: self._has_time(last, until))
        except Exception as error:
            self._joiner = None
            self._problems.add(
                f"what devices left could not be read, summaries and times of theirs are missing from here on: "
                f"{type(error).__name__}: {error}"
            )
            if self._problems.strict:
                raise

    def _has_time(self, last: int, until: float) -> bool:
        """Whether records up to `last` may wait for a device for longer."""
        self._journal.beat(time.time_ns())
        if self._ending:
            return time.monotonic() < self._end_by
        used = self._journal.written - last
        has_room = self._flight is None and used < self._journal.half_records // 2
        return has_room and time.monotonic() < until

    def _has_just_lost_the_directory(self) -> bool:
        """Whether somebody removed the run's directory, which is said: what follows is written into a new one."""
        journal = self._journal
        if self._is_gone or journal.path.exists():
            return False
        self._is_gone = True
        let_go = 0 if self._flight is None else self._flight.overwritten.total()
        lost = journal.drained - let_go  # the others were over, and lay there no more
        journal.lost["removed with the directory"] += lost
        self._problems.add(
            f"{self._claim.run} was removed while it was recorded into: what lay there is lost "
            f"({lost} rows), what follows is written into a new one"
        )
        return True

    def _drain(self, all_of_it: bool) -> None:
        journal = self._journal
        while True:
            # Asked first: while something is wanted, no step is let go of, so what comes first stays first.
            wanted = 0 if self._flight is None else self._flight.wanted
            first = journal.drained + 1
            end_of_half = ((first - 1) // journal.half_records + 1) * journal.half_records
            last = min(end_of_half, journal.written)
            if self._flight is not None and not all_of_it:
                last = min(end_of_half, wanted)
            elif last < end_of_half and not all_of_it:
                return
            if self._prepared is not None:
                last = self._prepared_to  # neither more nor less than what failed before
            if last < first:
                return
            self._join(last, _END_SECONDS if all_of_it else _SETTLE_SECONDS)
            self._write(journal.records(first, last), last)
            journal.mark_drained(last)
            if self._flight is not None and self._flight.written(last):
                self._flight_written()

    def _write(self, records: npt.NDArray[np.uint8], last: int) -> None:
        """Write one part for each table. Called again for the same records after a failure, it goes on where
        that one stopped: no row is written twice, none counts twice in a digest."""
        if self._prepared is None:
            numbers, kinds = heads(records)
            self._prepared = {
                table.name: of_table(records, kinds, numbers, table) for table in JOURNAL_TABLES
            }
            self._prepared_to = last
            self._digests.take(self._prepared, self._journal.texts)
        claim = self._claim
        for name, rows in list(self._prepared.items()):
            if len(rows):
                table = TABLES[name]
                path = layout.part_file(
                    claim.run, name, claim.rank, claim.attempt, self._next_part[name]
                )
                write_part(
                    path, table, arrow_table(table, rows, self._journal.texts, claim.attempt), last
                )
                self._next_part[name] += 1
            del self._prepared[name]
        self._prepared = None
