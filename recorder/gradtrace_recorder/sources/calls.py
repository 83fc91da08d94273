"""Calls of modules that have been entered and not left: what their exit needs to know.

A thread's calls are a stack. An exception that no hook sees (KeyboardInterrupt, a cancelled task) leaves its calls
there; whether they still run is asked of Python's own stack.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from gradtrace_recorder.journal.writer import NOWHERE
from gradtrace_recorder.state.attribution import Frame
from gradtrace_recorder.state.naming import ModuleName
from gradtrace_recorder.summaries.values import Packed
from gradtrace_recorder.torch_internals.dynamo import never_compiled
from gradtrace_recorder.torch_internals.frames import calls_run
from gradtrace_recorder.torch_internals.standing import TOLD

# Told of a call when the module's own hooks have run after it: the module, the call, its args, kwargs and output.
Done = Callable[[nn.Module, "Call", Any, Any, Any], None]


class Call:
    """A call that has been entered: what its exit needs to know. No module is kept, only its identity."""

    __slots__ = (
        "began", "depth", "end_ns", "frame", "inputs", "inside", "last_hook", "microbatch", "module_id", "name",
        "phase", "place", "place_before", "saw_inner", "start_ns",
    )  # fmt: skip

    def __init__(self, module_id: int, name: ModuleName | None) -> None:
        self.module_id = module_id
        self.name = name
        self.frame: Frame | None = None
        self.inputs: Packed | None = None
        self.phase = -1
        self.microbatch = 0
        self.start_ns = 0
        self.depth = 0
        self.end_ns = 0
        self.last_hook: RemovableHandle | None = None
        self.began = 0
        self.saw_inner = False
        self.place_before = NOWHERE
        self.place = NOWHERE[1:]
        self.inside = NOWHERE  # the same as a place that the thread is in

    def forget(self) -> None:
        """Nobody will call the hook that waits on the module."""
        if self.last_hook is not None:
            self.last_hook.remove()
            self.last_hook = None


class OpenCalls(threading.local):
    """A thread's calls, outermost first."""

    def __init__(self) -> None:
        self.stack: list[Call] = []

    def forget_abandoned(self, *, entering: bool, library: Any = None) -> bool:
        """Drop the calls if none of them runs any more. Whether there were such.

        `entering` says that a module is just being called, whose own frame is none of them. `library` is the native
        one, which looks in a third of the time.
        """
        if not self.stack:
            return False
        some_run = calls_run if library is None else library.calls_run
        if some_run(1 + entering):
            return False
        for call in self.stack:
            call.forget()
        self.stack.clear()
        return True


class OwnHooksDone:
    """The last hook on a module during one call. A copy of the module takes an idle one along."""

    def __init__(self, done: Done, call: Call) -> None:
        self._done = done
        self._call = call

    def __call__(self, module: nn.Module, args: Any, *rest: Any) -> None:
        # Torch calls a hook that was removed meanwhile without kwargs.
        try:
            kwargs = rest[0] if len(rest) == 2 else {}
            self._done(module, self._call, args, kwargs, rest[-1])
        except RecursionError:
            TOLD.short += 1

    def __reduce__(self) -> Any:
        # What takes any arguments and does nothing, made of what every Python has: a file that the job saves in a
        # hook of its own must load where we are not installed.
        return getattr, (contextlib.nullcontext(), "__exit__")


never_compiled(Call, OpenCalls, OwnHooksDone)
