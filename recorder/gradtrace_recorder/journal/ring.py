"""Which steps a journal keeps, where it keeps the newest alone: a ring of whole steps.

The ring is let go of step by step: what the journal's header calls drained then lies in no part, it is simply over.
So a reader sees whole steps from there on. While parts of some steps are wanted, no step is let go of. Why parts are
wanted is `flight`'s business.
"""

from __future__ import annotations

import collections
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

_Lasting = tuple[int, int, tuple[float | bytes, ...]]


class Journal(Protocol):
    """What a ring asks of the journal whose steps it keeps."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while steps are let go of."""

    @property
    def written(self) -> int:
        """Number of the newest record."""

    @property
    def recorded(self) -> dict[str, int]:
        """Records written so far, by table."""

    @property
    def room(self) -> int:
        """How many records have room."""

    def free(self, last: int) -> None:
        """The places of all records up to `last` are free again."""

    def append_lasting(self, kind: int, *values: float | bytes) -> None:
        """Write a record that is kept when its step is let go of."""


@dataclass(frozen=True)
class _Mark:
    """The end of a step in the journal: its last record, and how many records each table had by then."""

    step: int
    number: int
    counts: dict[str, int]


class Ring:
    """The steps that have ended and are kept. All of it lies under the journal's lock; any thread may ask."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._marks: collections.deque[_Mark] = collections.deque()
        self._gone: dict[str, int] = {}  # counts by table, up to where the journal is let go of
        self._wanted = 0
        self._overwritten: collections.Counter[str] = collections.Counter()
        self._lasting: collections.deque[_Lasting] = collections.deque()
        self._shortened = 0

    def end_step(self, step: int) -> None:
        """The newest record is the last of this step."""
        with self._journal.lock:
            self._marks.append(_Mark(step, self._journal.written, self._journal.recorded))

    def keep(self, steps: int) -> None:
        """Let go of all but the newest steps that have ended, unless parts are wanted."""
        with self._journal.lock:
            while len(self._marks) > steps and not self._wanted:
                self._let_go()

    @property
    def kept(self) -> tuple[int, int] | None:
        """The first and the last step that has ended and is kept."""
        with self._journal.lock:
            return (self._marks[0].step, self._marks[-1].step) if self._marks else None

    def want(self) -> tuple[int, int] | None:
        """Parts are wanted of every step that has ended. The first and the last of them, None for none."""
        with self._journal.lock:
            self._wanted = self._marks[-1].number if self._marks else 0
            return self.kept

    @property
    def wanted(self) -> int:
        """Up to which record parts are wanted, 0 where they are not."""
        with self._journal.lock:
            return self._wanted

    def wrote(self, last: int) -> bool:
        """Parts hold all records up to `last`; whether that is all that was wanted."""
        with self._journal.lock:
            wanted = self._wanted
            if not wanted or wanted > last:
                return False
            self._wanted = 0
            while self._marks and self._marks[0].number <= wanted:
                self._gone = self._marks.popleft().counts
            return True

    @property
    def overwritten(self) -> collections.Counter[str]:
        """Records that were let go of, by table."""
        return self._overwritten

    @property
    def shortened(self) -> int:
        """How often a step was let go of because there was no room."""
        return self._shortened

    def make_room(self) -> bool:
        """No place is free before the steps that should be kept have ended: keep fewer. Under the lock."""
        if self._wanted or not self._marks:
            return False
        self._shortened += 1
        self._let_go()
        return True

    def add_lasting(self, number: int, kind: int, values: tuple[float | bytes, ...]) -> None:
        """This record is written again when its step is let go of. Under the lock."""
        self._lasting.append((number, kind, values))

    def drained(self, last: int) -> None:
        """Parts hold the lasting records up to this one. Under the lock."""
        while self._lasting and self._lasting[0][0] <= last:
            self._lasting.popleft()

    def _let_go(self) -> None:
        journal = self._journal
        mark = self._marks.popleft()
        gone, self._gone = self._gone, mark.counts
        for name, count in mark.counts.items():
            if count > gone.get(name, 0):
                self._overwritten[name] += count - gone.get(name, 0)
        kept = self._marks[-1].step if self._marks else mark.step
        # A rank that is killed in between has a lasting row twice rather than not at all.
        has_room = journal.room >= sum(number <= mark.number for number, _, _ in self._lasting)
        if has_room:
            self._carry(mark.number, kept)
        journal.free(mark.number)
        if not has_room:
            self._carry(mark.number, kept)

    def _carry(self, last: int, step: int) -> None:
        """Write the lasting records up to `last` once more, as of `step`."""
        while self._lasting and self._lasting[0][0] <= last:
            _, kind, values = self._lasting.popleft()
            self._journal.append_lasting(kind, step, *values[1:])
