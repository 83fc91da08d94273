"""What waits in an armed process for the first event: three light hooks, and what stands around DDP and pipelines.

Launchers, data workers and tools import torch too. Until a module is called, the engine is entered, an optimizer steps
or a pipeline stage acts, only the standard library and torch are loaded; then the session takes the hooks' place, and
the event that woke it is its first. `relays` and `stages` stand from the start: a reducer is given its hook before
anything of it is called.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable
from torch.nn.modules import module as torch_modules
from torch.optim import optimizer as torch_optimizer
from torch.utils.hooks import RemovableHandle

from gradtrace_recorder.call_sites import called_from
from gradtrace_recorder.dynamo import never_compiled
from gradtrace_recorder.guard import MOST_INTERRUPTS, say
from gradtrace_recorder.privates import found
from gradtrace_recorder.relays import RELAYS
from gradtrace_recorder.settings import Settings
from gradtrace_recorder.stages import STAGES

if TYPE_CHECKING:
    from gradtrace_recorder.session import Session

_is_compiling = torch.compiler.is_compiling
_tracing_state = found("torch._C._get_tracing_state", lambda: None)


class Tripwire:
    """Waits for the first event, then holds the session. Called on the job's threads."""

    def __init__(self, settings: Settings) -> None:
        self.session: Session | None = None
        self._settings = settings
        self._handles: list[RemovableHandle] = []
        self._engine: Any = None
        self._is_springing = False
        self._interrupts = 0
        self._lock = threading.RLock()  # several threads may come first at once

    def set(self) -> None:
        """Put the light hooks in place."""
        _quiet_compile_warning()
        self._handles = [
            torch_modules.register_module_forward_pre_hook(self._module_called),
            torch_optimizer.register_optimizer_step_pre_hook(self._optimizer_steps),
        ]
        self._engine = Variable._execution_engine
        RELAYS.attach()
        STAGES.attach(self.spring)
        tripwire = self

        class WaitingEngine(type(self._engine)):  # type: ignore[misc]
            """The engine until it is entered."""

            def run_backward(self, *args: Any, **kwargs: Any) -> Any:
                run = super().run_backward
                if _is_compiling() or _tracing_state():
                    return run(*args, **kwargs)
                if tripwire.spring() is None:
                    return called_from(sys._getframe(1))(run, args, kwargs)
                return Variable._execution_engine.run_backward(*args, **kwargs)

        never_compiled(WaitingEngine.run_backward, calls_the_job=True)
        Variable._execution_engine = WaitingEngine()

    def spring(self) -> Session | None:
        """The session, started now if this is the first event; None where it could not be."""
        with self._lock:
            return self.session or self._sprung()

    def _sprung(self) -> Session | None:
        if self._engine is not None and not self._is_springing:
            self._is_springing = True
            try:
                # The hooks stay meanwhile: what comes first on other threads waits in them, and is recorded.
                from gradtrace_recorder.session import Session

                session = Session(self._settings)
                self._clear()
                session.arm()
                self.session = session
            except Exception as error:
                self._clear()
                say(
                    f"nothing is recorded: {type(error).__name__}: {error}; the job goes on without"
                )
                if self._settings.strict:
                    raise
            except BaseException:  # an interrupt, which is the job's: the next event tries again
                self._interrupts += 1
                self._is_springing = self._engine is None or self._interrupts > MOST_INTERRUPTS
                if self._is_springing:
                    self._clear()
                    say("nothing is recorded: interrupted at its start; the job goes on without")
                raise
        return self.session

    def stop(self, timeout: float) -> None:
        """Remove every hook; close the recording where there is one."""
        self._clear()
        session, self.session = self.session, None
        if session is not None:
            session.stop(timeout)
        RELAYS.detach()
        STAGES.detach()

    def _clear(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._engine is not None:
            Variable._execution_engine = self._engine
            self._engine = None

    def _module_called(self, module: Any, args: Any) -> None:
        if _is_compiling() or _tracing_state():
            return
        session = self.spring()
        if session is not None:
            session.modules.before(module, args)

    def _optimizer_steps(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if _is_compiling() or _tracing_state():
            return
        session = self.spring()
        if session is not None:
            session.optimizers.before(optimizer, args, kwargs)


def _quiet_compile_warning() -> None:
    """Global module hooks make a compiled module warn that they may not be compiled; ours end at once there.

    Source: torch/_dynamo/eval_frame.py, `OptimizedModule.__call__` (2.13).
    """
    import warnings

    warnings.filterwarnings(
        "ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks"
    )


never_compiled(Tripwire)
