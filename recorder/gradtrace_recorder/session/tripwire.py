"""What waits in an armed process for the first event: it is told by what stands in torch, DDP and pipelines.

Launchers, data workers and tools import torch too. Until a module is called, the engine is entered, an optimizer steps
or a pipeline stage acts, only the standard library and torch are loaded; then the session is told in its place, and
the event that woke it is its first. `standing`, `relays` and `stages` stand from the start: what is compiled is guarded
on hooks that are there, and a reducer is given its hook before anything of it is called.
"""

from __future__ import annotations

import atexit
import threading
from typing import TYPE_CHECKING, Any

from gradtrace_recorder.forks import arrow_without_threads
from gradtrace_recorder.guard import MOST_INTERRUPTS, is_of_a_signal_handler, say
from gradtrace_recorder.settings.variables import Settings
from gradtrace_recorder.torch_internals.dynamo import never_compiled, nothing_of_ours_is_compiled
from gradtrace_recorder.torch_internals.relays import RELAYS
from gradtrace_recorder.torch_internals.stages import STAGES
from gradtrace_recorder.torch_internals.standing import STANDING, TOLD, Begun, has_room

if TYPE_CHECKING:
    from gradtrace_recorder.session.session import Session

# A recording begins with imports, one inside the other: so many frames of Python's at most, and as many again.
BEGINNING_FRAMES = 200


class Tripwire:
    """Waits for the first event, then holds the session. Called on the job's threads."""

    def __init__(self, settings: Settings) -> None:
        self.session: Session | None = None
        self._settings = settings
        self._is_set = self._is_springing = False
        self._waits_for_room = False
        self._interrupts = 0
        self._lock = threading.RLock()  # several threads may come first at once

    def set(self) -> None:
        """Wait for the first event."""
        TOLD.short = 0
        TOLD.module_called = self._module_called
        TOLD.optimizer_steps = self._optimizer_steps
        TOLD.pass_begins = self._pass_begins
        self._is_set = True
        if not STANDING.attach():
            say(
                "no calls of modules and no optimizer steps are recorded: functions were compiled before recording "
                "began, and this job forbids to compile them again; set GRADTRACE_DIR, or call start() before"
            )
        RELAYS.attach()
        STAGES.attach(self.spring)
        nothing_of_ours_is_compiled()

    def spring(self) -> Session | None:
        """The session, started now if this is the first event; None where it could not be."""
        with self._lock:
            return self.session or self._sprung()

    def _sprung(self) -> Session | None:
        if self._is_set and not self._is_springing and self._finds_room():
            self._is_springing = True
            try:
                # What comes first on other threads waits here meanwhile, and is recorded.
                with arrow_without_threads():
                    from gradtrace_recorder.session.session import Session

                session = Session(self._settings)
                session.arm()
                self.session = session
            except BaseException as error:
                if isinstance(error, Exception) and not is_of_a_signal_handler(error):
                    self._clear()
                    say(
                        f"nothing is recorded: {type(error).__name__}: {error}; the job goes on without"
                    )
                    if self._settings.strict:
                        raise
                    return self.session
                self._interrupts += 1  # the job's: the next event tries again
                self._is_springing = not self._is_set or self._interrupts > MOST_INTERRUPTS
                if self._is_springing:
                    self._clear()
                    say("nothing is recorded: interrupted at its start; the job goes on without")
                raise
        return self.session

    def _finds_room(self) -> bool:
        """Whether Python has the frames that a beginning needs; if not, a later event may have them."""
        if has_room(BEGINNING_FRAMES):
            return True
        TOLD.short += 1
        if not self._waits_for_room:
            self._waits_for_room = True
            atexit.register(self._say_that_there_was_none)
        return False

    def _say_that_there_was_none(self) -> None:
        if self._is_set and self.session is None:
            say(
                f"nothing is recorded: wherever the job called torch, Python had less than {BEGINNING_FRAMES} frames "
                "left (sys.setrecursionlimit)"
            )

    def stop(self, timeout: float, raised: BaseException | None = None) -> None:
        """Remove every hook; close the recording where there is one, as ended by `raised`."""
        self._clear()
        session, self.session = self.session, None
        if session is not None:
            session.stop(timeout, raised)
        STANDING.detach()
        RELAYS.detach()
        STAGES.detach()
        atexit.unregister(self._say_that_there_was_none)

    def _clear(self) -> None:
        self._is_set = False
        TOLD.forget()

    def _module_called(self, module: Any, args: Any) -> None:
        session = self.spring()
        if session is not None:
            session.modules.before(module, args)

    def _optimizer_steps(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        session = self.spring()
        return None if session is None else session.optimizers.before(optimizer, args, kwargs)

    def _pass_begins(self, args: Any, kwargs: Any) -> Begun | None:
        session = self.spring()
        return None if session is None else session.engine.begins(args, kwargs)


never_compiled(Tripwire)
