"""Keeps torch.compile away from our own functions.

What a compiled region runs in Python, a hook of ours say, would be compiled as a function of its own: the job would
pay for that, and the hook would find that it is being compiled, and see nothing ever after.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import torch


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
        mark = frames.skip_code  # torch 2.6: what they call may be compiled
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
