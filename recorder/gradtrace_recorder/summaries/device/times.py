"""How long something took on the device: pairs of events, recorded by the job's threads and read by the drain's.

A row that waits for its time holds `pending_time(ticket)` in its place. Events come from a pool of a bounded size; if
none is free there is no time, which is counted. No torch here: an event is anything of that protocol.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gradtrace_schemas.journal import NULL_INT64, pending_time

MOST_EVENTS = 8192
# Of events that are not over so many are asked in a row: those of another stream may be.
_MOST_ASKED = 64

Int64s = npt.NDArray[np.int64]


class Event(Protocol):
    """A point in a stream of a device."""

    def record(self) -> None:
        """Put it behind what the current stream of its device (the calling thread's) has been given so far."""

    def query(self) -> bool:
        """Whether the device has come to it. Does not wait."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this one to a later one of the same device, both over."""


class Places(Protocol):
    """Where events can be recorded."""

    def place(self, of: Any = None) -> Hashable | None:
        """The device of the tensor `of`, else the calling thread's; None where nothing is to be recorded in its
        current stream now."""

    def takes(self, place: Hashable) -> bool:
        """Whether that device's current stream takes an event now."""

    def event(self, place: Hashable) -> Event:
        """A new event for that device."""

    def begin_reading(self, place: Hashable) -> bool:
        """Called first on the thread that asks events, with the device of one: whether it may."""


class Nowhere:
    """There is no device."""

    def place(self, of: Any = None) -> None:
        """None."""

    def takes(self, place: Hashable) -> bool:
        """Never called."""
        return False

    def event(self, place: Hashable) -> Event:
        """Never called."""
        raise NotImplementedError

    def begin_reading(self, place: Hashable) -> bool:
        """There is nothing to read."""
        return False


@dataclass(frozen=True)
class Moment:
    """An event that was recorded, and the device."""

    event: Event
    place: Hashable


class DeviceTimes:
    """Spans between two moments."""

    def __init__(
        self,
        level: str,
        places: Places,
        most: int = MOST_EVENTS,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`level` is that of GRADTRACE_DEVICE_TIMES; at most `most` events are in use at a time. `wake` is called when
        a quarter more of them are."""
        self.of_stages = level != "off"
        self.of_nodes = level == "nodes"
        self.missed: collections.Counter[str] = collections.Counter()
        self.is_used = False
        self._places = places
        self._most = most
        self._wake = wake
        self._lock = threading.RLock()
        self._free: dict[Hashable, list[Event]] = {}
        self._out = 0
        self._next = 1
        self._spans: dict[int, tuple[Moment, Moment]] = {}
        self._is_over = False
        self._may_read: bool | None = None

    def begin(self, of: Any = None) -> Moment | None:
        """Record the beginning of a pass, an action or a bucket, on the device of that tensor, else on the thread's
        own; None where there is nothing to record."""
        if not self.of_stages or self._is_over:
            return None
        return self._record(None, of)

    def begin_node(self) -> Moment | None:
        """The same of a Node."""
        if not self.of_nodes or self._is_over:
            return None
        return self._record(None)

    def end(self, begun: Moment | None) -> int:
        """Record the end of what has begun, on the same device: what stands in `device_ns` until the drain thread
        knows."""
        if begun is None:
            return NULL_INT64
        ended = self._record(begun.place)
        with self._lock:
            if ended is None or self._is_over:
                self.forget(begun)
                self.forget(ended)
                return NULL_INT64
            ticket = self._next
            self._next = ticket + 1
            self._spans[ticket] = (begun, ended)
            return pending_time(ticket)

    def forget(self, moment: Moment | None) -> None:
        """No span comes of it."""
        if moment is not None:
            with self._lock:
                self._out -= 1
                self._free.setdefault(moment.place, []).append(moment.event)

    def read(self) -> tuple[Int64s, Int64s]:
        """(what stood in `device_ns`, nanoseconds) of all spans that are over. Called on the drain thread."""
        with self._lock:
            spans = list(self._spans.items())
        if spans and self._may_read is None:
            self._may_read = self._places.begin_reading(spans[0][1][0].place)
            if not self._may_read:
                self._end_for_good("events cannot be asked on a thread of ours")
        codes, times, waiting = [], [], 0
        for ticket, (begun, ended) in spans if self._may_read else ():
            try:
                if not (ended.event.query() and begun.event.query()):
                    waiting += 1
                    if waiting > _MOST_ASKED:
                        break
                    continue
                elapsed = begun.event.elapsed_time(ended.event)
            except RuntimeError as error:
                # The device failed, as the job will say itself: nothing can be asked of it any more.
                self._end_for_good(type(error).__name__)
                break
            codes.append(pending_time(ticket))
            times.append(round(elapsed * 1e6))
            with self._lock:
                self._spans.pop(ticket, None)
                self.forget(begun)
                self.forget(ended)
        return np.array(codes, np.int64), np.array(times, np.int64)

    def is_waiting(self, code: int) -> bool:
        """Whether a time may yet come for what stands there."""
        return code - pending_time(0) in self._spans

    def _end_for_good(self, why: str) -> None:
        with self._lock:
            self._is_over = True
            self.missed[why] += len(self._spans)
            self._spans.clear()

    def _record(self, place: Hashable | None, of: Any = None) -> Moment | None:
        """On that device, or on the one where the tensor lies. Never raises for a device that has failed: the rows that
        say so are written by the caller."""
        try:
            if place is None:
                place = self._places.place(of)
            elif not self._places.takes(place):
                return None
            if place is None:
                return None
            with self._lock:
                free = self._free.get(place)
                if not free and self._out >= self._most:
                    self.missed["no event was free"] += 1
                    return None
                event = free.pop() if free else self._places.event(place)
                self._out = out = self._out + 1
            event.record()
            if out % max(1, self._most // 4) == 0:
                self._wake()
        except RuntimeError as error:
            self._end_for_good(type(error).__name__)
            return None
        self.is_used = True
        return Moment(event, place)
