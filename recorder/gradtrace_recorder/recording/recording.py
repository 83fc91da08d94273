"""A live recording: what the sources share, and the gate through which each of their hooks enters."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from gradtrace_recorder.guard import Problems
from gradtrace_recorder.journal.flight import Flight
from gradtrace_recorder.journal.writer import JournalWriter, Place
from gradtrace_recorder.recording.native_library import Native
from gradtrace_recorder.recording.replay import Replays
from gradtrace_recorder.recording.rows import Rows
from gradtrace_recorder.settings.variables import Settings
from gradtrace_recorder.state.actions import Actions, HalfDone
from gradtrace_recorder.state.attribution import Attribution
from gradtrace_recorder.state.frameworks import Counter
from gradtrace_recorder.state.naming import Names
from gradtrace_recorder.state.timeline import Timeline
from gradtrace_recorder.state.updates import Updates
from gradtrace_recorder.state.versions import Versions
from gradtrace_recorder.summaries.device.times import DeviceTimes, Nowhere
from gradtrace_recorder.summaries.summariser import Summariser


@dataclass
class Recording:
    """What one rank records into, from its first event until it is closed."""

    settings: Settings
    problems: Problems
    journal: JournalWriter
    timeline: Timeline
    summariser: Summariser
    rows: Rows
    names: Names = field(default_factory=Names)
    attribution: Attribution = field(default_factory=Attribution)
    versions: Versions = field(default_factory=Versions)
    flight: Flight | None = None
    replays: Replays = field(default_factory=Replays)
    left: Left | None = None
    actions: Actions = field(default_factory=Actions)
    half_done: HalfDone = field(default_factory=HalfDone)
    device_times: DeviceTimes = field(default_factory=lambda: DeviceTimes("off", Nowhere()))
    native: Native | None = None
    counter: Counter = field(init=False)
    updates: Updates = field(init=False)
    parked: Callable[[], None] | None = None  # goes on with what was stopped while a profiler began
    _noted: dict[tuple[int, int, str], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.counter = Counter(self.timeline, self.names)
        self.updates = Updates(self.timeline, self.names)

    def noted(self, name: str) -> int:
        """Which note of that name this is in the present step and microbatch, from 0."""
        at = (self.timeline.step, self.timeline.microbatch)
        self._noted = {k: v for k, v in self._noted.items() if k[:2] == at}
        index = self._noted.get((*at, name), 0)
        self._noted[(*at, name)] = index + 1
        return index


@dataclass(frozen=True)
class Left:
    """A forward that an exception left: the innermost call's place, and the place that this left behind."""

    error_id: int
    inside: Place
    after: Place


class Gate:
    """Whether we record. The first event opens it; then `recording` is there, or stays None for good."""

    def __init__(self, settings: Settings | None, open_recording: Callable[[], Recording | None]):
        self.recording: Recording | None = None
        self.settings = settings
        self._open = open_recording
        self._tried = False
        self._opening = False
        self._tries_once = True
        self._lock = threading.RLock()  # several threads may come first at once

    def enter(self) -> Recording | None:
        """The recording, opened now if this is the first event. Never raises unless in strict mode."""
        if self.recording is None and not self._tried:
            with self._lock:
                if not self._opening and not self._tried:
                    self._opening = self._tries_once = True
                    try:
                        self.recording = self._open()
                    finally:
                        self._opening = self._tried = self._tries_once
        return self.recording

    def try_again(self) -> None:
        """What opens it was interrupted before it left anything behind: the next event opens it."""
        self._tries_once = False

    def shut(self) -> None:
        """No more events, and no second opening."""
        self._tried = True
        self.recording = None
