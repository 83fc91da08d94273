"""Calls that we make for the job, as if they were made where the job makes them.

Torch books a warning of its own on the Python frame that called it: its file, line and module (`PyErr_WarnEx`, 2.13),
or on one so many frames above (`stacklevel`). The job's filters go by these: on a frame of ours, a warning that they
ignore would be shown, or raised.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

from gradtrace_recorder.torch_internals.dynamo import never_compiled

_OURS = __name__.partition(".")[0] + "."
F = TypeVar("F", bound=types.FunctionType | Callable[..., Any])


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def called_from(frame: types.FrameType) -> Callable[..., Any]:
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


def passed_over(function: F) -> F:
    """The same function, whose frames a warning's `stacklevel` does not count: they lie between two of the job's.

    Python counts none of its own import system's, which it knows by the file's name.
    Source: Lib/warnings.py, `_is_internal_frame`; Python/_warnings.c (3.11).
    """
    code = function.__code__
    function.__code__ = code.replace(co_filename=passed_over_file(code.co_filename))
    return function


def passed_over_file(file: str) -> str:
    """The name of a file whose frames are passed over so."""
    return f"{file} (like importlib._bootstrap)"


never_compiled(called_from)
