"""What the engine is called with, and whether a call is a pass of the job's at all."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from gradtrace_recorder.recording.recording import Recording
from gradtrace_recorder.torch_internals.dry_runs import is_dry_run
from gradtrace_recorder.torch_internals.dynamo import never_compiled, traces_a_graph
from gradtrace_recorder.torch_internals.modes import unseen
from gradtrace_recorder.torch_internals.privates import found
from gradtrace_recorder.torch_internals.tensors import is_functorch_wrapped

_NO_DISPATCH = found("torch._C._disabled_torch_dispatch_impl", None)


def argument(
    name: str, place: int, args: Sequence[Any], kwargs: dict[str, Any], default: Any
) -> Any:
    """An argument of `run_backward(tensors, grad_tensors, keep_graph, create_graph, inputs,
    allow_unreachable, accumulate_grad)`. Source: torch/csrc/autograd/python_engine.cpp."""
    return args[place] if len(args) > place else kwargs.get(name, default)


def scalar(output: Any, recording: Recording) -> float | None:
    """The value of what a pass begins with, where it is one number on the CPU and nobody would see it read."""
    if recording.native is not None and isinstance(output, torch.Tensor):
        value: float | None = recording.native.library.scalar(output)
        if value is not None:
            return value
    if (
        isinstance(output, torch.Tensor)
        and not is_functorch_wrapped(output)
        and type(output).__torch_dispatch__ is _NO_DISPATCH
        and output.device.type == "cpu"
        and output.numel() == 1
        and not output.is_complex()
    ):
        with unseen():
            return float(output.detach())
    return None


def is_no_pass() -> bool:
    """Whether this call into the engine is none of the job's, or none that may be watched."""
    return _compiled_autograd() or is_dry_run() or traces_a_graph()


def _compiled_autograd() -> bool:
    """Whether the engine is replaced by compiled autograd, under which no hook may be attached."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    # Another thread may be importing it: it lacks what it will have.
    return bool(getattr(compiled, "compiled_autograd_enabled", False))


never_compiled(argument, scalar, is_no_pass, _compiled_autograd)
