"""Calls that we make for the job, as if they were made where the job makes them.

Torch books a warning of its own on the Python frame that called it: its file, line and module (`PyErr_WarnEx`, 2.13).
The job's filters go by these: on a frame of ours, a warning that they ignore would be shown, or raised.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradtrace_recorder.dynamo import never_compiled

_OURS = __name__.partition(".")[0] + "."


def _call(function: Any, args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)


def called_from(
    frame: types.FrameType,
) -> Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]:
    """What calls a function with these arguments from there, or from whoever called our own code that stands there."""
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_OURS):
        frame = frame.f_back
    code = frame.f_code
    return types.FunctionType(
        _call_at(code.co_filename, code.co_name, frame.f_lineno or 1), frame.f_globals
    )


@functools.lru_cache(maxsize=256)
def _call_at(file: str, name: str, line: int) -> types.CodeType:
    # The call is one line below the first.
    code = _call.__code__.replace(co_filename=file, co_name=name, co_firstlineno=line - 1)
    never_compiled(types.FunctionType(code, {}), calls_the_job=True)
    return code


never_compiled(called_from)
