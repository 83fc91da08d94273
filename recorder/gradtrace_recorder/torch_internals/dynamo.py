"""Keeps torch.compile away from our own functions.

What a compiled region runs in Python, a hook of ours say, would be compiled as a function of its own: the job would
pay for that, and the hook would find that it is being compiled, and see nothing ever after.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from gradtrace_recorder.torch_internals.privates import found

_dispatch_modes = found("torch._C._len_torch_dispatch_stack", lambda: 0)


def never_compiled(*functions: Any, calls_the_job: bool = False) -> None:
    """Dynamo never compiles these functions, or the methods of these classes.

    Nor what they call, unless they call back into the job. It costs nothing per call, and loads no part of dynamo;
    a function that is traced as a part of another is traced as ever. Where torch has no such switch, nothing is done.
    Source: torch/csrc/dynamo/eval_frame.c, `set_code_exec_strategy` (2.13).
    """
    frames: Any = getattr(torch._C, "_dynamo", None)
    frames = getattr(frames, "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy") and hasattr(frames, "_FrameExecStrategy"):
        skip, as_ever = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        strategy = frames._FrameExecStrategy(skip, as_ever if calls_the_job else skip)
        mark = functools.partial(_marked, frames.set_code_exec_strategy, strategy)
    elif hasattr(frames, "skip_code"):
        mark = frames.skip_code  # torch 2.6, of this code alone: see `nothing_of_ours_is_compiled`
    else:
        return
    for function in functions:
        own = vars(function).values() if isinstance(function, type) else (function,)
        for one in own:
            code = getattr(one, "__code__", None)
            if isinstance(code, types.CodeType):
                mark(code)


def _marked(mark: Any, strategy: Any, code: types.CodeType) -> None:
    mark(code, strategy)


def nothing_of_ours_is_compiled() -> None:
    """The same of every function of ours that is loaded, where torch (2.6) cannot be told of what a function calls."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy") or not hasattr(frames, "skip_code"):
        return
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("gradtrace_recorder", "gradtrace_schemas"):
            for value in list(vars(module).values()):
                if getattr(value, "__module__", None) == name:
                    for code in _codes_of(value):
                        frames.skip_code(code)


def _codes_of(value: Any) -> Iterator[types.CodeType]:
    """The code of a function, of a class's methods, and of the functions in these."""
    waiting = list(vars(value).values()) if isinstance(value, type) else [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, property):
            waiting += [one.fget, one.fset]
            continue
        one = getattr(one, "__wrapped__", getattr(one, "__func__", one))
        code = one if isinstance(one, types.CodeType) else getattr(one, "__code__", None)
        if isinstance(code, types.CodeType):
            yield code
            waiting += [const for const in code.co_consts if isinstance(const, types.CodeType)]


def traces_a_graph() -> bool:
    """Whether the calling thread runs a graph in order to compile its derivative. Since 2.7 `is_compiling` says so too.

    Source: torch/_guards.py, `tracing`; torch/_functorch/_aot_autograd/traced_function_transforms.py (2.6).
    """
    if not _dispatch_modes():
        return False
    context: Any = getattr(sys.modules.get("torch._guards"), "TracingContext", None)
    return context is not None and context.try_get() is not None


def may_not_compile_again() -> bool:
    """Whether functions were compiled already, and the job has said that none may be compiled a second time.

    Source: torch/_dynamo/eval_frame.py, `_callback_from_stance`; torch/_dynamo/guards.py,
    `get_and_maybe_log_recompilation_reasons` (2.13).
    """
    frames: Any = sys.modules.get("torch._dynamo.convert_frame")
    if not getattr(frames, "FRAME_COUNTER", 0):
        return False
    config: Any = sys.modules.get("torch._dynamo.config")
    stance: Any = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)
    return bool(getattr(config, "error_on_recompile", False)) or str(
        getattr(stance, "stance", "")
    ).endswith("_on_recompile")
