"""Calls of modules that have been entered and not left: what their exit needs to know.

A thread's calls are a stack. An exception that no hook sees (KeyboardInterrupt, a cancelled task) leaves its calls
there; whether they still run is asked of Python's own stack.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from gradtrace_recorder.journal.writer import NOWHERE
from gradtrace_recorder.state.attribution import Frame
from gradtrace_recorder.state.naming import ModuleName, unwrapped
from gradtrace_recorder.summaries.values import Packed
from gradtrace_recorder.torch_internals.dynamo import never_compiled
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
        some_run = _some_run if library is None else library.calls_run
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


def _some_run(count: int) -> bool:
    """Whether so many calls of modules are running on this thread. Of a call inside another it looks at a few frames.

    Source: torch/nn/modules/module.py, `_call_impl`, which calls global hooks (2.13).
    """
    # Python makes an object for each frame that is looked at: those of ours, down to the source, are passed over.
    frame: Any = sys._getframe(3)
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":
            count -= 1
            if not count:
                return True
        frame = frame.f_back
    return False


def is_of_a_compiler(module: nn.Module) -> bool:
    """Whether the module that is just being called is a graph that torch.compile made, and its backend runs as a
    module (`aot_eager`, or one of the job's that returns the graph): a part of the compiled region, no module.

    Source: torch/_dynamo/output_graph.py, `compile_and_call_fx_graph`; torch/fx/graph_module.py (2.13).
    """
    module = unwrapped(module)
    if all(base.__name__ != "GraphModule" for base in type(module).__mro__):
        return False
    if "compile_subgraph_reason" in module.__dict__:
        return True
    frame: Any = sys._getframe(1)
    while frame is not None:
        of = frame.f_globals.get("__name__") or ""
        if not of.startswith(("torch.nn.modules.", "torch.fx.", __package__.partition(".")[0])):
            return bool(
                of.startswith(("torch._dynamo.backends.", "torch._functorch.", "torch._inductor."))
            )
        frame = frame.f_back
    return False


never_compiled(Call, OpenCalls, OwnHooksDone, _some_run, is_of_a_compiler)
