"""Functions of torch whose calls we see, however they were imported, and whenever.

A function's name may have been imported into other modules, and bound to objects, before we start. So the function
stays what it is, and its code is exchanged: for a few instructions that call us, who call a copy with the old code.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from gradtrace_recorder.torch_internals.call_sites import passed_over_file
from gradtrace_recorder.torch_internals.dynamo import never_compiled

_PLACE = "what is called instead stands here"


def _template(*args: Any, **kwargs: Any) -> Any:
    around: Any = "what is called instead stands here"
    return around(*args, **kwargs)


class SeenFunctions:
    """The functions whose code is exchanged, until it is put back."""

    def __init__(self) -> None:
        self._seen: list[tuple[types.FunctionType, types.CodeType, types.CodeType, bool]] = []

    def see(
        self, function: types.FunctionType, around: Callable[[Any], Callable[..., Any]]
    ) -> None:
        """From now on a call of `function` is a call of `around(original)`.

        Raises ValueError for one that closes over variables.
        """
        code = function.__code__
        original = types.FunctionType(
            code, function.__globals__, function.__name__, function.__defaults__, None
        )
        original.__kwdefaults__ = function.__kwdefaults__
        called = around(original)
        template = _template.__code__
        ours = template.replace(
            co_consts=tuple(called if c == _PLACE else c for c in template.co_consts),
            co_name=code.co_name,
            co_filename=passed_over_file(template.co_filename),
        )
        # What looks at its parameters goes on seeing them.
        is_signed = not hasattr(function, "__signature__")
        if is_signed:
            function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        function.__code__ = ours
        never_compiled(function, calls_the_job=True)
        self._seen.append((function, code, ours, is_signed))

    @property
    def any(self) -> bool:
        """Whether there are such functions."""
        return bool(self._seen)

    def let_go(self) -> None:
        """Every function has its own code again."""
        for function, code, ours, is_signed in reversed(self._seen):
            if function.__code__ is ours:
                function.__code__ = code
            if is_signed:
                function.__dict__.pop("__signature__", None)
        self._seen = []
