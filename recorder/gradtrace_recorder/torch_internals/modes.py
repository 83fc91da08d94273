"""Staying out of what the job has on around our operations: modes, profilers, autocast, tensor subclasses."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch

from gradtrace_recorder.torch_internals.privates import found

profiler_enabled = found("torch._C._autograd._profiler_enabled", lambda: False)
enable_record_function = found("torch._C._autograd._enable_record_function", lambda on: None)
_disable_current_modes = found(
    "torch.utils._python_dispatch._disable_current_modes", contextlib.nullcontext
)
dispatch_modes = found("torch._C._len_torch_dispatch_stack", lambda: 0)
function_modes = found("torch._C._len_torch_function_stack", lambda: 0)


@contextlib.contextmanager
def _autocast_off() -> Any:
    torch.set_autocast_enabled("cpu", False)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", True)


class _Profiled(threading.local):
    left_out = 0  # how many of our blocks, one inside the other, leave this thread out of the job's profile


_PROFILED = _Profiled()


@contextlib.contextmanager
def _not_profiled() -> Any:
    """The switch is one for the thread, and does not count: the outermost block turns it on again."""
    enable_record_function(False)
    _PROFILED.left_out += 1
    try:
        yield
    finally:
        _PROFILED.left_out -= 1
        if not _PROFILED.left_out:
            enable_record_function(True)


# Inside it nothing that we read of a tensor is asked of the job's function modes and tensor subclasses.
unasked = found("torch._C.DisableTorchFunction", contextlib.nullcontext)

_NOTHING_ON = contextlib.nullcontext()


def unseen() -> contextlib.AbstractContextManager[Any]:
    """Our operations are seen by no mode and no profiler of the job and cast by no autocast; cheap when none is on."""
    modes = dispatch_modes() or function_modes()
    autocast = torch.is_autocast_enabled("cpu")
    profiled = profiler_enabled()
    if not modes and not autocast and not profiled:
        return _NOTHING_ON
    stack = contextlib.ExitStack()
    if profiled:
        stack.enter_context(_not_profiled())
    if modes:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(unasked())
    if autocast:
        stack.enter_context(_autocast_off())
    return stack
