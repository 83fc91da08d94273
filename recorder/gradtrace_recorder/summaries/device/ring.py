"""Rows that devices fill and the drain thread reads: bounded, and never waited for by the job.

A summary that is asked for gets a ticket, and the row of that number modulo the count of rows. The job's threads
only count on. So a row is written over when so many newer ones have been asked for: its summary is *lost* if nobody
read it before, and whoever looks for it says so. Several summaries that a record holds as one (all gradients that
came into a Node) get a ticket of their own; the drain thread combines them when all have arrived.

No torch here: rows are memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from gradtrace_recorder.summaries.device import rows as layout
from gradtrace_recorder.summaries.device.rows import Rows
from gradtrace_recorder.summaries.values import POSITIONS, Packed
from gradtrace_schemas.summary import signed
from gradtrace_schemas.table import SKETCH_LANES

RING_ROWS = 32_768

# Of all recordings of a process: a device may yet write a row that an earlier one has asked for.
_last_ticket = 0
_lock = threading.RLock()  # reentrant: a signal handler of the job may come in between

Part = tuple[int, int]  # position among the tensors that are combined, ticket


class Ring:
    """Tickets for any thread; what has arrived, for one: the drain's."""

    def __init__(self, memory: Rows, wake: Callable[[], None] = lambda: None) -> None:
        """`memory` is int64 of shape (n, WORDS), all 0. `wake` is called whenever a quarter was asked for."""
        self.size = len(memory)
        self._memory = memory
        self._wake = wake
        self._combinations: dict[int, tuple[Part, ...]] = {}

    def ticket(self) -> int:
        """The next ticket."""
        global _last_ticket
        with _lock:
            _last_ticket = ticket = _last_ticket + 1
        if ticket % (self.size // 4) == 0:
            self._wake()
        return ticket

    def put(self, packed: Packed) -> int:
        """A ticket for a summary that the host knows."""
        ticket = self.ticket()
        self._memory[ticket % self.size] = layout.row_of(ticket, packed)
        return ticket

    def combination(self, parts: Sequence[Part]) -> int:
        """A ticket for the combination of several, which `combined` of the summaries defines."""
        with _lock:
            ticket = self.ticket()
            self._combinations[ticket] = tuple(parts)
            if len(self._combinations) > self.size:
                del self._combinations[next(iter(self._combinations))]
        return ticket

    def have_arrived(self, tickets: Sequence[int]) -> bool:
        """Whether the rows of all of these are there, or were and are over. Any thread."""
        asked = np.array(tickets, np.int64)
        found = self._memory[asked % self.size]
        is_over = found[:, layout.TICKET] > asked
        return bool((is_over | layout.arrived(found, asked)).all())

    def read(self, tickets: Rows) -> tuple[Rows, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """(rows, which have arrived, which are lost) of these tickets. Called on the drain thread."""
        self._combine()
        return self._read(tickets)

    def _read(self, tickets: Rows) -> tuple[Rows, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        found = self._memory[tickets % self.size]
        is_there = layout.arrived(found, tickets)
        is_torn = is_there & (found[:, layout.TORN] != 0)
        # Asked last: a row that was written over while it was read is past.
        with _lock:
            is_past = tickets <= _last_ticket - self.size
        return found, is_there & ~is_torn, (is_past & ~is_there) | is_torn

    def _combine(self) -> None:
        """Fill the rows of combinations of which all parts are there."""
        with _lock:
            waiting = list(self._combinations.items())
        while waiting:
            which = np.repeat(np.arange(len(waiting)), [len(parts) for _, parts in waiting])
            positions = np.array([p for _, parts in waiting for p, _ in parts], np.int64)
            found, is_there, is_lost = self._read(
                np.array([t for _, parts in waiting for _, t in parts], np.int64)
            )
            missing = np.bincount(which, ~is_there, len(waiting)) > 0
            lost = np.bincount(which, is_lost, len(waiting)) > 0
            whole = ~missing[which]
            made = _combined(found[whole], which[whole], positions[whole], len(waiting))
            still = []
            for index, (ticket, parts) in enumerate(waiting):
                if not missing[index]:
                    row = made[index]
                    row[layout.TICKET] = ticket
                    row[layout.CHECK] = layout.checks(row[None])[0]
                    with _lock:
                        if ticket > _last_ticket - self.size:  # its row is still its own
                            self._memory[ticket % self.size] = row
                elif not lost[index]:
                    still.append((ticket, parts))
                if not missing[index] or lost[index]:
                    with _lock:
                        self._combinations.pop(ticket, None)
            if len(still) == len(waiting):
                return
            waiting = still  # some may hold combinations that were just made


def _combined(found: Rows, which: Rows, positions: Rows, count: int) -> Rows:
    """Rows of `count` combinations, of which `which` says whose part each row is. As `values.combined` has it."""
    made = np.zeros((count, layout.WORDS), np.int64)
    floats, parts = made.view(np.float64), found.view(np.float64)
    factors = np.array([signed(position) for position in POSITIONS], np.int64)
    with np.errstate(over="ignore"):
        prints = found[:, layout.FINGERPRINT] * factors[positions % len(factors)]
        np.add.at(made[:, layout.FINGERPRINT], which, prints)
    for word in (layout.NANS, layout.INFS):
        np.add.at(made[:, word], which, found[:, word])
    for word in (layout.SQUARE, layout.SUM):
        np.add.at(floats[:, word], which, parts[:, word])
    np.maximum.at(floats[:, layout.ABS_MAX], which, parts[:, layout.ABS_MAX])
    for lane in range(SKETCH_LANES):
        at = layout.FIRST_LANE + (lane + positions) % SKETCH_LANES
        np.add.at(floats, (which, at), parts[:, layout.FIRST_LANE + lane])
    return made
