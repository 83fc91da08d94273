"""Flight mode: the journal keeps the last steps, and parts are written only when something happens.

The journal's ring is let go of step by step: what its header calls drained then lies in no part, it is simply over.
So a reader sees whole steps from there on, whatever it is told of the mode. What makes parts of the steps that are
kept: an exception that left a backward pass, a value that is not finite in a loss or a gradient (unless GradScaler
skipped the step), `analyzer trigger` from another shell, and the end of the recording. Of the first two at most
MOST_TRIGGERS, and none in the steps right after another, lest a job that goes on with NaN fills the disk.
"""

from __future__ import annotations

import collections
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradtrace_recorder.journal import JournalWriter
from gradtrace_recorder.summaries.values import Packed

MOST_TRIGGERS = 16
_NAN_COUNT, _INF_COUNT = 4, 5


@dataclass(frozen=True)
class Trigger:
    """Why parts were written, and of which steps (None: none had ended since the last time)."""

    reason: str
    step: int | None
    first_step: int | None
    last_step: int | None
    wall_ns: int
    token: str | None = None


@dataclass(frozen=True)
class _Mark:
    """The end of a step in the journal: its last record, and how many records each table had by then."""

    step: int
    number: int
    counts: dict[str, int]


class Flight:
    """Which steps the journal keeps, and up to where it is to be written out.

    The job's threads say what they see; the drain thread asks for `wanted` and says what it has `written`. All that
    is shared lies under the journal's own lock.
    """

    def __init__(
        self, journal: JournalWriter, steps: int, trigger_file: Path, wake: Callable[[], None]
    ) -> None:
        self.steps = steps
        self.triggers: list[Trigger] = []
        self.overwritten: collections.Counter[str] = collections.Counter()
        self.shortened = 0
        self._journal = journal
        self._trigger_file = trigger_file
        self._wake = wake
        self._marks: collections.deque[_Mark] = collections.deque()
        self._gone: dict[str, int] = {}  # counts by table, up to where the journal is let go of
        self._wanted: _Mark | None = None
        self._asked: list[Trigger] = []  # waiting for their parts
        self._token: str | None = None  # asked for from outside, while no step had ended
        self._seen: str | None = None
        self._quiet = 0  # steps in which what triggered before triggers no more
        self._own = 0
        self._known = _identity(trigger_file)
        journal.keep_as_ring(self._make_room)

    def saw(self, summary: Packed) -> None:
        """A gradient's summary: a value that is not finite triggers at the step's end."""
        if summary[_NAN_COUNT] or summary[_INF_COUNT]:
            self._seen = self._seen or "a value that is not finite in a gradient"

    def saw_not_finite(self) -> None:
        """A value that is not finite in a summary that a device left: it may be of a step before. Any thread."""
        self._seen = self._seen or "a value that is not finite in a gradient"

    def saw_loss(self, loss: float | None) -> None:
        """A loss's value."""
        if loss is not None and not math.isfinite(loss):
            self._seen = "a loss that is not finite"

    def failed(self, error: BaseException) -> None:
        """An exception left a backward pass."""
        self._seen = f"{type(error).__name__} left a backward pass"

    def step_ended(self, step: int, *, skipped: bool) -> None:
        """The step's last row was written, called before the next step's first."""
        journal = self._journal
        with journal.lock:
            self._marks.append(_Mark(step, journal.written, journal.recorded))
            reason, self._seen = self._seen, None
            if reason is not None and skipped and "not finite" in reason:
                reason = None  # a loss scale that was too high: GradScaler looks for it by trying
            token, self._token = self._token, None
            if token is not None:
                self._ask("analyzer trigger", step, token)
            if reason is None:
                self._quiet = max(0, self._quiet - 1)
            elif self._own < MOST_TRIGGERS:
                if not self._quiet:
                    self._own += 1
                    self._ask(reason, step)
                self._quiet = self.steps
            while len(self._marks) > self.steps and self._wanted is None:
                self._let_go()

    def look(self) -> None:
        """Whether somebody asks for parts (`analyzer trigger`). Called on the drain thread, about once a second."""
        found = _identity(self._trigger_file)
        if found is None or found == self._known:
            return
        try:
            token = str(json.loads(self._trigger_file.read_text())["token"])
        except (OSError, ValueError, KeyError, TypeError):
            return  # not yet whole, or gone: the next time tells
        self._known = found
        with self._journal.lock:
            if self._marks:
                self._ask("analyzer trigger", None, token)
            else:
                self._token = token

    @property
    def wanted(self) -> int:
        """Up to which record parts are asked for."""
        with self._journal.lock:
            return 0 if self._wanted is None else self._wanted.number

    def written(self, last: int) -> bool:
        """Parts hold all records up to `last`; whether that is all that was wanted. Called on the drain thread."""
        with self._journal.lock:
            mark = self._wanted
            if mark is None or mark.number > last:
                return False
            self._wanted = None
            while self._marks and self._marks[0].number <= mark.number:
                self._marks.popleft()
            self._gone = mark.counts
            self.triggers += self._asked
            self._asked = []
            return True

    def recorded(self) -> dict[str, int]:
        """Records by table, without those that were let go of."""
        counts = self._journal.recorded
        return {name: count - self.overwritten[name] for name, count in counts.items()}

    def as_json(self) -> dict[str, Any]:
        """What the rank's json says of it."""
        return {
            "steps": self.steps,
            "shortened": self.shortened,
            "triggers": [asdict(trigger) for trigger in self.triggers],
        }

    def _ask(self, reason: str, step: int | None, token: str | None = None) -> None:
        first, last = self._marks[0].step, self._marks[-1].step
        self._asked.append(Trigger(reason, step, first, last, time.time_ns(), token))
        self._wanted = self._marks[-1]
        self._wake()

    def _make_room(self) -> bool:
        """The ring is full before the steps that it should keep have ended: keep fewer. Under the lock."""
        if self._wanted is not None or not self._marks:
            return False
        self.shortened += 1
        self._let_go()
        return True

    def _let_go(self) -> None:
        mark = self._marks.popleft()
        for name, count in mark.counts.items():
            if count > self._gone.get(name, 0):
                self.overwritten[name] += count - self._gone.get(name, 0)
        self._gone = mark.counts
        kept = self._marks[-1].step if self._marks else mark.step
        self._journal.let_go(mark.number, kept)


def _identity(path: Path) -> tuple[int, int, int] | None:
    """What changes when the file is replaced; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
