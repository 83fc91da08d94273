"""Wires everything together; the only module that knows it all.

A session is made at a process's first event. That opens the recording: it reads who we are, claims a place in
the run's directory, allocates the journal and starts the drain thread.
"""

from __future__ import annotations

import atexit
import dataclasses
import multiprocessing.process
import os
import sys
from typing import TYPE_CHECKING, Any

from gradtrace_recorder.forks import ARMED
from gradtrace_recorder.guard import (
    MOST_INTERRUPTS,
    Guard,
    Problems,
    is_of_a_signal_handler,
    say,
)
from gradtrace_recorder.launch import environment, identity
from gradtrace_recorder.recording.recording import Gate, Recording
from gradtrace_recorder.session.telling import tell_at_first_backward
from gradtrace_recorder.settings.variables import Settings
from gradtrace_recorder.sources.ddp import DdpSource
from gradtrace_recorder.sources.engine import EngineSource
from gradtrace_recorder.sources.fsdp import FsdpSource
from gradtrace_recorder.sources.modules import ModuleSource
from gradtrace_recorder.sources.optimizer import OptimizerSource
from gradtrace_recorder.sources.pipeline import PipelineSource
from gradtrace_recorder.sources.source import Sources
from gradtrace_recorder.torch_internals.privates import (
    BACKWARD,
    DDP,
    FSDP,
    MODULES,
    OPTIMIZER,
    PIPELINE,
    SUMMARIES,
    is_first_rank,
    verdict_at_start,
)
from gradtrace_recorder.torch_internals.standing import TOLD

if TYPE_CHECKING:
    from gradtrace_recorder.session.live import Live

# At exit the job waits for us no longer than this; what is not drained by then stays in the journal.
EXIT_SECONDS = 2.0


class Session:
    """The hooks of a process that trains, and its recording."""

    def __init__(self, settings: Settings) -> None:
        self.problems = Problems(settings.strict)
        self._lacks = verdict_at_start(environment.versions()["gradtrace"])
        if SUMMARIES in self._lacks.closed:
            settings = dataclasses.replace(settings, summary="off")
        self.settings = settings
        self.gate = Gate(settings, self._open)
        names = (DDP, FSDP, MODULES, BACKWARD, OPTIMIZER, PIPELINE)
        guards = {name: Guard(name, self.problems) for name in names}
        self._sources = sources = Sources()
        self.modules = ModuleSource(self.gate, guards[MODULES], sources)
        self.engine = EngineSource(self.gate, guards[BACKWARD], sources)
        self.optimizers = OptimizerSource(self.gate, guards[OPTIMIZER])
        self.pipeline = PipelineSource(self.gate, guards[PIPELINE])
        sources.hold(
            DdpSource(self.gate, guards[DDP]),
            FsdpSource(self.gate, guards[FSDP]),
            self.modules,
            self.engine,
            self.optimizers,
            self.pipeline,
        )
        self._live: Live | None = None
        self._interrupts = 0
        self._pid = os.getpid()
        self._finalizer: Any = None

    def arm(self) -> None:
        """Put the hooks in place. Nothing is written before one of them is called.

        A source that this torch has not what it needs for is left out.
        """
        if self._lacks.note and is_first_rank():
            say(self._lacks.note)
        for text in self._lacks.problems:
            self.problems.add(text)
        if self._lacks.closed:
            TOLD.forget()
        for source in self._sources:
            source.guard.is_open = source.guard.source not in self._lacks.closed
            if source.guard.is_open:
                source.attach()
        atexit.register(self.stop)
        if multiprocessing.process.parent_process() is not None:
            # Children of multiprocessing end by os._exit where they were forked: it calls its own finalizers alone.
            # The last of them all: what the job leaves to others may still train.
            # Source: multiprocessing/process.py, `BaseProcess._bootstrap` (3.10 to 3.14).
            from multiprocessing.util import Finalize

            self._finalizer = Finalize(None, self._child_ends, exitpriority=-1000)
        ARMED.add(self)

    def stop(self, timeout: float = EXIT_SECONDS, raised: BaseException | None = None) -> None:
        """Remove every hook, drain what is left, close the recording. Calling it again does nothing.

        `raised` is the exception that ends it, where Python has not said it.
        """
        recording = self.gate.recording
        if recording is not None and os.getpid() == self._pid:
            self._sources.recording_ends(recording)
        for source in self._sources:
            source.detach()
        atexit.unregister(self.stop)
        if self._finalizer is not None:
            self._finalizer.cancel()
        ARMED.discard(self)
        live, self._live = self._live, None
        self.gate.shut()
        if live is not None and recording is not None and os.getpid() == self._pid:
            try:
                live.close(recording, timeout, raised)
            except Exception as error:
                self.problems.add(
                    f"could not close the recording: {type(error).__name__}: {error}; "
                    "the journal holds what was recorded"
                )
                if self.problems.strict:
                    raise

    def _child_ends(self) -> None:
        """The end of a child of multiprocessing, healthy or by an exception: that is on its way just then."""
        self.stop(raised=sys.exc_info()[1])

    def _open(self) -> Recording | None:
        from gradtrace_recorder.session.greeting import tell_beginning
        from gradtrace_recorder.torch_internals.modes import unseen

        begins = False
        try:
            if identity.is_data_worker():
                self.gate.shut()
                return None
            who = identity.current_identity()
            if not self.settings.wants_rank(who.rank):
                self.gate.shut()
                return None
            autocast = environment.autocast()
            make = _load()
            begins = True
            with unseen():  # the first event may come inside the job's modes
                self._live = make(self.settings, who, self.problems, autocast)
            claim = self._live.claim
            ranks = who.world_size or who.rank + 1  # as many as are known
            tell_beginning(self._live.recording, claim.run, claim.attempt, who.rank, ranks)
            return self._live.recording
        except BaseException as error:
            if isinstance(error, Exception) and not is_of_a_signal_handler(error):
                self._not_recorded(error)
                return None
            self._interrupts += 1  # the job's, which may go on
            if begins or self._interrupts > MOST_INTERRUPTS:
                say(
                    f"nothing is recorded into {self.settings.directory!r}: {type(error).__name__} came "
                    "while the recording began"
                )
            else:
                self.gate.try_again()
            raise

    def _not_recorded(self, error: Exception) -> None:
        """Say why nothing is. Raises the error in strict mode."""
        from gradtrace_recorder.launch.claim import NotOurs

        if isinstance(error, NotOurs):
            say(f"nothing of this process is recorded into {self.settings.directory!r}: {error}")
            return
        self.problems.add(
            f"nothing is recorded into {self.settings.directory!r}: "
            f"{_reason(error)}; the job goes on without"
        )
        if self.problems.strict:
            raise error

    def before_fork(self) -> None:
        """On the thread that forks, just before: our thread makes way, unless the job has threads too."""
        if self._live is not None and self._pid == os.getpid():
            self._live.make_way()

    def after_fork(self) -> None:
        """In the parent, just after."""
        try:
            if self._live is not None:
                self._live.go_on()
        except RuntimeError as error:
            self.problems.add(f"after a fork nothing is written until the end: {error}")

    def forked(self) -> None:
        """In a forked child: a worker of a recording process records nothing, and writes nothing of ours."""
        recording = self.gate.recording
        if self._live is not None or recording is not None:
            for source in self._sources:
                source.detach()
            self._live = None
            self.gate.shut()
            if recording is not None:
                recording.journal.forget()
            parent = self._pid
            tell_at_first_backward(
                f"this process was forked from process {parent}, which is being recorded into "
                f"{self.settings.directory!r}; it is not recorded itself"
            )
        self._pid = os.getpid()


def _load() -> type[Live]:
    """Load what a recording needs: nearly all of the time that it takes to begin."""
    from gradtrace_recorder.session.live import Live
    from gradtrace_recorder.torch_internals.dynamo import nothing_of_ours_is_compiled

    nothing_of_ours_is_compiled()
    return Live


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}"
    return f"{type(error).__name__}: {error}"
