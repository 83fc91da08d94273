"""An open recording: a rank's place in the run, its journal, and the thread that drains it.

Loading this loads pyarrow and all else that a recording needs, so that only the first event does it.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

from gradtrace_recorder.drain.drain import Drain
from gradtrace_recorder.drain.join import Joiner
from gradtrace_recorder.forks import has_other_threads
from gradtrace_recorder.guard import Problems
from gradtrace_recorder.journal.flight import Flight
from gradtrace_recorder.launch import environment
from gradtrace_recorder.launch.claim import NotOurs, claim_place, living_rival
from gradtrace_recorder.launch.identity import group_place
from gradtrace_recorder.observers.native.choice import chosen_native, journal_of
from gradtrace_recorder.recording.recording import Recording
from gradtrace_recorder.recording.rows import Rows
from gradtrace_recorder.settings.variables import Settings
from gradtrace_recorder.state.timeline import Timeline
from gradtrace_recorder.state.versions import Versions
from gradtrace_recorder.summaries.device.devices import Devices
from gradtrace_recorder.summaries.device.times import DeviceTimes
from gradtrace_recorder.summaries.summariser import Summariser
from gradtrace_recorder.torch_internals.privates import found
from gradtrace_recorder.torch_internals.seen import SeenFunctions
from gradtrace_recorder.torch_internals.standing import TOLD
from gradtrace_schemas import layout, processes
from gradtrace_schemas.journal import IN_MODULE, IN_OPTIMIZER, NULL_STRING


class Live:
    """The files and the thread of an open recording. Raises OSError or NotOurs where it cannot be opened."""

    def __init__(
        self, settings: Settings, who: Any, problems: Problems, autocast: dict[str, str]
    ) -> None:
        zero, wall = time.monotonic_ns(), time.time_ns()
        run = Path(settings.directory).absolute()
        about = {"settings": settings.as_json(), "versions": environment.versions()}
        rival = living_rival(run, who)
        if rival is not None and rival.is_ancestor:
            raise NotOurs(
                f"rank {who.rank} is recorded by process {rival.pid} already, which started this one; "
                "give it a GRADTRACE_DIR of its own to record it"
            )
        self.claim = claim_place(run, who, about)
        self._has_group, self._rank = who.has_group, who.rank
        if rival is not None:
            problems.add(
                f"process {rival.pid} is recording rank {who.rank} into {run} too, as attempt {rival.attempt}; "
                f"this one is attempt {self.claim.attempt}, nothing of the two is mixed"
            )
        native = chosen_native(settings, problems)
        journal = journal_of(
            native,
            layout.journal_file(run, who.rank, self.claim.attempt),
            rank=who.rank,
            attempt=self.claim.attempt,
            wall_start_ns=wall,
            monotonic_start_ns=zero,
            process_start=processes.start_of(who.pid),
            machine=processes.machine_token(),
        )
        timeline = Timeline(settings.steps, settings.step_offset, zero)
        flight = None
        if settings.is_flight:
            trigger, wake = layout.trigger_file(run), journal.half_is_full.set
            flight = Flight(journal, settings.flight_steps, trigger, wake)
        rows = Rows(journal, timeline, flight)
        self._devices = devices = Devices(problems.add, journal.half_is_full.set)
        library = None if native is None else native.library
        summariser = Summariser(
            journal, settings.summary, strict=settings.strict, library=library, devices=devices
        )
        times = DeviceTimes(settings.device_times, devices, wake=journal.half_is_full.set)
        self.recording = Recording(
            settings, problems, journal, timeline, summariser, rows,
            versions=Versions(library), flight=flight, native=native, device_times=times,
        )  # fmt: skip
        timeline.at_begin.append(self.recording.counter.begins)
        timeline.at_complete.append(self._hold_step)
        timeline.at_end.append(self._write_step)
        self._held_step: int | None = None
        self._about = {
            "attempt": self.claim.attempt,
            "rank": who.rank,
            "world_size": who.world_size,
            "local_rank": who.local_rank,
            "launcher": {"kind": who.launcher.kind, "found_by": self.claim.found_by},
            "host": who.host,
            "pid": who.pid,
            "device": None,
            "versions": environment.versions(),
            "settings": settings.as_json(),
            "environment": environment.environment() | ({"autocast": autocast} if autocast else {}),
            "command": environment.command_line(),
            "git_commit": environment.git_commit(),
            "wall_start_ns": wall,
            "monotonic_start_ns": zero,
        }
        self._write_rank_file(complete=False)
        self._drain = Drain(
            journal,
            self.claim,
            problems,
            flight,
            lambda: self._write_rank_file(complete=False),
            Joiner(
                journal,
                lambda: devices.ring,
                times,
                summariser.missed,
                norms_only=settings.summary == "norms",
                flight=flight,
            ),
        )
        self._makes_way = False
        self._drain.start()
        self._seen = SeenFunctions()
        for name, ours in (
            ("torch.autograd.profiler._run_on_profiler_start", self._profiler_begins),
            ("torch.autograd.profiler._run_on_profiler_stop", self._profiler_ended),
        ):
            function = found(name, None)
            if function is not None:
                self._seen.see(function, ours)

    def _profiler_begins(self, original: Any) -> Any:
        """Torch's function that runs just before a profiler begins, wherever that does."""

        def begins() -> None:
            original()
            self._drain.park()
            self.recording.parked = self._go_on

        return begins

    def _profiler_ended(self, original: Any) -> Any:
        def ended() -> None:
            original()
            self._go_on()

        return ended

    def _go_on(self) -> None:
        self.recording.parked = None
        self._drain.start()

    def make_way(self) -> None:
        """End the thread for a fork, where it is the only one besides the thread that forks."""
        if self._drain.is_running and not has_other_threads(1):
            self._makes_way = True
            self._drain.park()

    def go_on(self) -> None:
        """After a fork."""
        if self._makes_way:
            self._makes_way = False
            self._drain.start()

    def close(
        self, recording: Recording, timeout: float, raised: BaseException | None = None
    ) -> None:
        """Write the last step, drain the journal, say whether that is complete, and let go of the journal.

        `raised` is the exception that ends the recording, where Python has not said it.
        """
        if recording.timeline.is_by_parameters:
            recording.updates.look()
        self._seen.let_go()
        recording.timeline.finish()
        self._about["uncaught"] = _uncaught(raised)
        self._about["left_in"] = _left_in(recording)
        whole = self._drain.finish(timeout)
        if not whole:
            recording.journal.close(remove=False)
        for reason, count in recording.device_times.missed.items():
            recording.problems.add(f"{count} times on the device are missing: {reason}")
        if TOLD.short:
            recording.problems.add(
                f"{TOLD.short} calls are missing: Python had too few frames left for the recorder where they were made "
                "(sys.setrecursionlimit)"
            )
        # The journal goes last: a rank that is killed in between has said that it is complete.
        self._write_rank_file(complete=whole)
        if whole:
            recording.journal.close(remove=True)
        self._devices.stop()

    def _hold_step(self) -> None:
        """The step is whole, and may go on (another optimizer, an evaluation): a rank that is killed has its row."""
        timeline, rows = self.recording.timeline, self.recording.rows
        if timeline.is_recorded:
            rows.release(self._held_step)
            self._held_step = rows.hold_step(timeline.totals)

    def _write_step(self) -> None:
        if not self._has_group:
            self._look_for_group()
        timeline, rows = self.recording.timeline, self.recording.rows
        held, self._held_step = self._held_step, None
        if not timeline.is_recorded:
            rows.release(held)
        else:
            rows.step(held, timeline.totals)
            if self.recording.flight is not None:
                skipped = timeline.totals.skipped is True
                self.recording.flight.step_ended(timeline.step, skipped=skipped)

    def _look_for_group(self) -> None:
        """Of a rank whose first event came before its process group: what the group says, once there is one."""
        place = group_place()
        if place is None:
            return
        self._has_group = True
        rank, self._about["world_size"] = place
        if rank != self._rank:
            self.recording.problems.add(
                f"this process is recorded as rank {self._rank}, which its launcher said at its first event; "
                f"its process group, which came later, says {rank}: let the group be there before a model is called"
            )

    def _write_rank_file(self, *, complete: bool) -> None:
        recording, flight = self.recording, self.recording.flight
        own: dict[str, Any] = {}
        if flight is not None:
            own = {
                "recorded": flight.recorded(),
                "overwritten": dict(flight.overwritten),
                "flight": flight.as_json(),
            }
        native = recording.native
        own["observer"] = {"kind": "python"} if native is None else native.as_json()
        self.claim.write_rank_file(
            {
                **self._about,
                "complete": complete,
                "device": recording.names.device,
                "last_step": recording.timeline.step,
                "step_rule": recording.timeline.rule,
                "first_step_from": recording.timeline.first_step_from,
                "recorded": recording.journal.recorded,
                "dropped": dict(recording.journal.dropped),
                "dropped_steps": recording.journal.dropped_steps,
                "unsummarised": dict(recording.summariser.unsummarised),
                "replay_skipped": dict(recording.replays.skipped),
                "problems": recording.problems.texts,
                "wall_end_ns": time.time_ns() if complete else None,
                **own,
            }
        )


def _uncaught(raised: BaseException | None) -> list[str] | None:
    """Type and text of the exception that ends the process: Python has said it before `atexit` runs.

    In a child of multiprocessing it is `raised`, or what torch made an exit of; it is, too, where it left the block of
    `start`.
    Source: torch/multiprocessing/spawn.py, `_wrap` (2.13).
    """
    if isinstance(raised, SystemExit):
        raised = raised.__context__ if raised.code else None
    error = getattr(sys, "last_value", None) if raised is None else raised
    return None if error is None else [type(error).__name__, str(error)[:4000]]


def _left_in(recording: Recording) -> dict[str, Any] | None:
    """The forward or optimizer's step which an exception or an exit left, where this thread did nothing after it."""
    journal, left = recording.journal, recording.left
    place = journal.place_of(threading.get_ident())
    if left is not None and left.after is place:
        place = left.inside
    kind, name, _, _, step, *_ = place
    if kind not in (IN_MODULE, IN_OPTIMIZER):
        return None
    text = None if name == NULL_STRING else journal.texts[name]
    return {"doing": "module" if kind == IN_MODULE else "optimizer", "name": text, "step": step}
