"""What hooks in C++ ask of Python, with the GIL, on the thread that runs a Node.

C++ holds these functions, and they hold no recording. A failure of ours is given back as its text, and ends the
recording of backward passes; what is raised is the job's, Ctrl-C or what its signal handler raises, and goes on to it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from gradtrace_recorder.guard import is_of_a_signal_handler
from gradtrace_recorder.state.attribution import Attribution, Frame
from gradtrace_recorder.summaries.summariser import Summariser, shape_fields
from gradtrace_recorder.summaries.values import as_bytes
from gradtrace_recorder.torch_internals.modes import unasked
from gradtrace_schemas.journal import MAX_DIMENSIONS

_SHAPE = struct.Struct(f"<B{MAX_DIMENSIONS}q")
_P = ParamSpec("_P")
_R = TypeVar("_R")


def foreign(summariser: Summariser) -> Callable[[torch.Tensor], bytes | str]:
    """The shape and summary of a tensor that C++ does not read."""

    def shape_and_summary(tensor: torch.Tensor) -> bytes:
        with unasked():
            return _SHAPE.pack(*shape_fields(tensor)) + as_bytes(summariser.of_gradient(tensor))

    return _answering(shape_and_summary)


def makers(
    attribution: Attribution,
) -> tuple[Callable[[int, Frame], str | None], Callable[[int], str | None]]:
    """What is told of a Node that may make others: it begins, it ends, at these numbers of Nodes."""

    def ends(number: int) -> None:
        began = attribution.node_ends(number)
        if began is not None and attribution.must_tag:
            attribution.tag((), began, number, ())  # without their outputs they cannot be told

    return _answering(attribution.node_begins), _answering(ends)


def _answering(ask: Callable[_P, _R]) -> Callable[_P, _R | str]:
    def answer(*args: _P.args, **kwargs: _P.kwargs) -> _R | str:
        try:
            return ask(*args, **kwargs)
        except Exception as error:
            if is_of_a_signal_handler(error):
                raise
            return f"{type(error).__name__}: {error}"

    return answer
