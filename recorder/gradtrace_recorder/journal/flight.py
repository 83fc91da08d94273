"""Flight mode: the journal keeps the last steps, and parts are written only when something happens.

Which steps are kept is the business of the journal's ring. What makes parts of them: an exception that left a backward
pass, a value that is not finite in a loss or a gradient (unless GradScaler skipped the step), `analyzer trigger` from
another shell, and the end of the recording. Of the first two at most
MOST_TRIGGERS, and none in the steps right after another, lest a job that goes on with NaN fills the disk.
"""

from __future__ import annotations

import collections
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradtrace_recorder.journal.writer import JournalWriter

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
        self._journal = journal
        self._ring = journal.keep_as_ring()
        self._trigger_file = trigger_file
        self._wake = wake
        self._asked: list[Trigger] = []  # waiting for their parts
        self._token: str | None = None  # asked for from outside, while no step had ended
        self._seen: str | None = None
        self._quiet = 0  # steps in which what triggered before triggers no more
        self._own = 0
        self._known = _identity(trigger_file)

    def saw(self, summary: Sequence[float]) -> None:
        """A gradient's summary, as the journal packs it: a value that is not finite triggers at the step's end."""
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
            self._ring.end_step(step)
            if journal.took_not_finite():
                self.saw_not_finite()
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
            self._ring.keep(self.steps)

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
            if self._ring.kept is not None:
                self._ask("analyzer trigger", None, token)
            else:
                self._token = token

    @property
    def wanted(self) -> int:
        """Up to which record parts are asked for, 0 where they are not."""
        return self._ring.wanted

    def written(self, last: int) -> bool:
        """Parts hold all records up to `last`; whether that is all that was wanted. Called on the drain thread."""
        with self._journal.lock:
            if not self._ring.wrote(last):
                return False
            self.triggers += self._asked
            self._asked = []
            return True

    @property
    def overwritten(self) -> collections.Counter[str]:
        """Records that were let go of, by table."""
        return self._ring.overwritten

    def recorded(self) -> dict[str, int]:
        """Records by table, without those that were let go of."""
        with self._journal.lock:
            counts, gone = self._journal.recorded, self.overwritten
        return {name: count - gone[name] for name, count in counts.items()}

    def as_json(self) -> dict[str, Any]:
        """What the rank's json says of it."""
        return {
            "steps": self.steps,
            "shortened": self._ring.shortened,
            "triggers": [asdict(trigger) for trigger in self.triggers],
        }

    def _ask(self, reason: str, step: int | None, token: str | None = None) -> None:
        first, last = self._ring.want() or (None, None)
        self._asked.append(Trigger(reason, step, first, last, time.time_ns(), token))
        self._wake()


def _identity(path: Path) -> tuple[int, int, int] | None:
    """What changes when the file is replaced; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
