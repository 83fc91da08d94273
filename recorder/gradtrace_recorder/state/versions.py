"""Who changed a saved tensor in place? By the versions at which tensors went into modules and came out.

"One of the variables needed for gradient computation has been modified by an inplace operation": the Node that
saved it is running, and holds it, so its memory has been nothing else's since that Node was made. What is seen of
that memory at the calls of modules and the steps of optimizers since then narrows down where its version rose.

Of a tensor its address and version are kept, never the tensor. Only tensors that are arguments or results
themselves are looked at (and those in a tuple or list): fewer sightings leave a wider answer, never a wrong one.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from gradtrace_recorder.state.attribution import Frame
from gradtrace_recorder.torch_internals.modes import function_modes
from gradtrace_recorder.torch_internals.tensors import is_functorch_wrapped

# About 3 MB; what was seen before is forgotten.
_MOST_SIGHTINGS = 20_000
_VERSIONS = re.compile(r"is at version (\d+); expected version (\d+) instead")

_address = getattr(torch._C, "_data_address", None) or torch.Tensor.data_ptr
_LEAVING = ("out", "passed")
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter


@dataclass(frozen=True)
class Change:
    """Where a tensor was changed: the innermost call in which that surely was (None: it cannot be said to be in
    one), and between which two moments, in words."""

    frame: Frame | None
    between: str


class Versions:
    """What was seen of tensors on the job's first thread, in order: address, version, sequence number, where."""

    def __init__(self, library: Any = None) -> None:
        """`library` is the native one, None where it is not used."""
        self._sightings: Any
        self._see: Callable[[int, str, Any, Any], object]
        if library is None:
            self._sightings = collections.deque(maxlen=_MOST_SIGHTINGS)
            self._see = self._look
        else:
            self._sightings = library.Sightings(_MOST_SIGHTINGS, _Tensor, _Parameter)
            self._see = self._sightings.see

    def went_in(self, number: int, frame: Frame, tensors: Iterable[Any]) -> None:
        """A module is called with these; Nodes made from now on have that sequence number or a later one."""
        self._see(number, "in", frame, tensors)

    def came_out(
        self, number: int, frame: Frame, arguments: Iterable[Any], results: Iterable[Any]
    ) -> None:
        """A module's call is over: its results, and its arguments once more."""
        self._see(number, "out", frame, results)
        self._see(number, "passed", frame, arguments)

    def optimizer(self, number: int, name: str, tensors: Iterable[Any], *, is_over: bool) -> None:
        """An optimizer is about to step, or has stepped."""
        self._see(number, "stepped" if is_over else "steps", name, tensors)

    def change(self, node: Any, number: int, made_by: Frame, name: str, text: str) -> Change | None:
        """Where the tensor was changed that this Node finds changed, None where nothing tells. `text` is torch's."""
        said = _VERSIONS.search(text)
        if said is None:
            return None
        found, expected = int(said[1]), int(said[2])
        stale = {
            _address(tensor)
            for tensor in _saved(node)
            if type(tensor) in (_Tensor, _Parameter)
            and not is_functorch_wrapped(tensor)
            and tensor._version == found
        }
        stale.discard(0)  # of tensors without memory, which all have that address
        if len(stale) != 1:
            return None
        [address] = stale
        before, inside_before = f"after {name} had saved it", made_by if made_by.root >= 0 else None
        for seen, version, at, how, where in list(self._sightings):
            if seen != address or at <= number:
                continue
            if version > expected:
                if how == "stepped":
                    return Change(None, f"by a step of {where}, {before}")
                inside = where.outer if how == "in" else where if how in _LEAVING else None
                return Change(
                    _innermost_of_both(inside_before, inside),
                    f"{before}, before {_moment(how, where)}",
                )
            before = f"after {_moment(how, where)}"
            inside_before = where if how == "in" else where.outer if how in _LEAVING else None
        return Change(None, f"{before}, before the backward pass came to it")

    def _look(self, number: int, how: str, where: Any, tensors: Iterable[Any]) -> None:
        """Twice a module call, so it asks nothing first: what has no one address (sparse, functorch's wrappers) or no
        version (made under inference_mode) raises, and is left out."""
        if function_modes():
            return  # a function mode of the job would see us look
        see = self._sightings.append
        for tensor in tensors:
            kind = type(tensor)
            if kind is _Tensor or kind is _Parameter:
                try:
                    see((_address(tensor), tensor._version, number, how, where))
                except RuntimeError:  # no memory of its own: sparse, or wrapped by a transform
                    continue
            elif (kind is tuple or kind is list) and len(tensor) <= 16:
                self._look(number, how, where, [t for t in tensor if isinstance(t, _Tensor)])


def _moment(how: str, where: Any) -> str:
    if how in ("steps", "stepped"):
        return f"a step of {where}"
    name = where.fqn or "the root module"
    moments = {"in": f"it went into {name}", "out": f"it left {name}"}
    return moments.get(how, f"the call of {name} that it went into was over")


def _innermost_of_both(one: Frame | None, other: Frame | None) -> Frame | None:
    """The innermost call that holds both."""
    around = []
    while one is not None:
        around.append(id(one))
        one = one.outer
    while other is not None and id(other) not in around:
        other = other.outer
    return other


def _saved(node: Any) -> list[Any]:
    """What a Node saved, without the check of its version, which raises. Torch 2.13: `SavedTensor.data`."""
    found: list[Any] = []
    for name in dir(node):
        if name.startswith("_raw_saved"):
            saved = getattr(node, name)
            for one in saved if isinstance(saved, tuple | list) else (saved,):
                found.append(getattr(one, "data", None))
    return found
