"""An optimizer's closure: the forward and backward that run inside `Optimizer.step`, after its hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from gradtrace_recorder.torch_internals.dynamo import never_compiled

# In a closure's `__dict__`, which wrappers of it copy (`torch.enable_grad()(closure)`): it is seen already.
_SEEN = "_gradtrace_seen"


def with_closure_seen(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    begins: Callable[[], Any],
    ends: Callable[[Any, bool], None],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a step with its closure seen, None where they hold none or it is seen already.

    `args` begins with the optimizer. What `begins` gives is handed to `ends`, with whether the closure returned.
    """
    closure = closure_of(args, kwargs)
    if closure is None or getattr(closure, _SEEN, False):
        return None
    seen = _seen(closure, begins, ends)
    if closure is kwargs.get("closure"):
        return args, {**kwargs, "closure": seen}
    return (args[0], seen, *args[2:]), kwargs


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """The closure that a step was given: named, or its first argument."""
    closure = kwargs["closure"] if "closure" in kwargs else args[1] if len(args) > 1 else None
    if not callable(closure) or isinstance(closure, nn.Module | type):
        return None
    return closure  # type: ignore[no-any-return]


def _seen(
    closure: Callable[..., Any], begins: Callable[[], Any], ends: Callable[[Any, bool], None]
) -> Callable[..., Any]:
    """As the closure in all that a caller sees: name, attributes, what it returns, what it raises."""

    @functools.wraps(closure)
    def seen(*args: Any, **kwargs: Any) -> Any:
        begun = begins()
        returned = False
        try:
            result = closure(*args, **kwargs)
            returned = True
        finally:
            ends(begun, returned)
        return result

    setattr(seen, _SEEN, True)
    never_compiled(seen, calls_the_job=True)
    return seen
