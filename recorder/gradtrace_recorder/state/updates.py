"""Have parameters changed between two passes? The evidence for a step's end where no torch optimizer is seen.

A job may update its parameters by hand, by a class of its own, or in a compiled `Optimizer.step`, of which no hook is
called. So long as no optimizer has been seen, the parameters of every root that the step has called are looked at once
after each pass: their versions, which any in-place operation raises, where they lie, which `p.data = ...` and a new
Parameter change, and a few of their values, which alone show `p.data.add_(...)`. Values are read on the CPU alone: on a
device that would be a synchronisation. Kept are numbers, never a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradtrace_recorder.state.naming import Names, walk
from gradtrace_recorder.state.timeline import Timeline
from gradtrace_recorder.torch_internals.modes import unseen

# Values of so many tensors are read, so many elements of each.
_MOST_SAMPLES, _SAMPLE = 8, 1024
# A graph without modules is followed so far to its leaves: Python's view of a longer chain must not be freed in one go.
_MOST_NODES = 2000
# What moves parameters itself, between passes too.
_MOVES_PARAMETERS = {"FullyShardedDataParallel", "DeepSpeedEngine"}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_data_address = getattr(torch._C, "_data_address", None) or torch.Tensor.data_ptr


@dataclass(frozen=True)
class _Stamp:
    """What was seen of some tensors at one moment. `values` is None where none could be read."""

    versions: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    values: tuple[int, ...] | None

    def differs(self, later: _Stamp) -> bool:
        """Whether the tensors changed. Where they only lie elsewhere, their values decide; where there are others
        (a module was added, or frozen), that is no update."""
        if len(self.versions) != len(later.versions):
            return False
        if self.places == later.places:
            return self.versions != later.versions or self.values != later.values
        return self.values is None or self.values != later.values


class Updates:
    """Looks at parameters, and tells the timeline. Called on the job's threads."""

    def __init__(self, timeline: Timeline, names: Names) -> None:
        self._timeline = timeline
        self._names = names
        self._roots: dict[int, _Stamp | None] = {}
        self._leaves: dict[int, _Stamp] = {}
        self._looked_at = 0

    def root_called(self, root: int) -> None:
        """A root is called in grad mode, from outside any module."""
        self.look()
        if root not in self._roots:
            self._roots[root] = self._stamp_of(root)

    def engine_called(self, outputs: Sequence[Any]) -> None:
        """A backward pass begins. Where no root has been called, the leaves of its graph stand for parameters."""
        if self._roots:
            return
        known, self._leaves = self._leaves, {}
        with unseen():
            for leaf in _leaves(outputs):
                self._leaves[id(leaf)] = _stamp([leaf])
        # A tensor of another identity may be another tensor: it says nothing.
        if any(key in known and known[key].differs(now) for key, now in self._leaves.items()):
            self._timeline.parameters_changed()

    def look(self) -> None:
        """Look at the roots' parameters, unless that was done since the last pass."""
        timeline = self._timeline
        if self._looked_at == timeline.passes:
            return
        self._looked_at = timeline.passes
        changed = False
        for root, before in list(self._roots.items()):
            now = self._stamp_of(root) if before is not None else None
            if before is not None and now is not None:
                changed |= before.differs(now)
            self._roots[root] = now
        if changed:
            timeline.parameters_changed()

    def _stamp_of(self, root: int) -> _Stamp | None:
        """None for a root of which nothing can be said: it is gone, or something else moves its parameters."""
        module = self._names.root(root)
        if module is None or self._names.sharded:
            return None
        found: dict[int, torch.Tensor] = {}
        for one, _ in walk(module):
            if type(one).__name__ in _MOVES_PARAMETERS:
                return None
            for parameter in one._parameters.values():
                if parameter is not None and parameter.requires_grad:
                    found[id(parameter)] = parameter
        tensors = list(found.values())
        if not tensors or any(tensor.is_meta for tensor in tensors):
            return None
        with unseen():
            return _stamp(tensors)


def _stamp(tensors: Sequence[torch.Tensor]) -> _Stamp:
    values = None
    chosen = tensors[:: max(1, len(tensors) // _MOST_SAMPLES)][:_MOST_SAMPLES]
    read = [value for tensor in chosen if (value := _value(tensor)) is not None]
    if read:
        values = tuple(read)
    return _Stamp(
        tuple(_version(tensor) for tensor in tensors),
        tuple((id(tensor), _address(tensor)) for tensor in tensors),
        values,
    )


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # an inference tensor has none
        return 0


def _address(tensor: torch.Tensor) -> int:
    if type(tensor) not in _PLAIN:
        return 0  # a fake one warns that it is asked
    try:
        return int(_data_address(tensor))
    except RuntimeError:  # no memory of its own: sparse, or wrapped by a transform
        return 0


def _value(tensor: torch.Tensor) -> int | None:
    """A hash of its first bits; None where reading them takes more than reading memory."""
    if type(tensor) not in _PLAIN or tensor.device.type != "cpu":
        return None
    if tensor.layout != torch.strided or not tensor.is_contiguous() or not tensor.numel():
        return None
    try:
        part = tensor.detach().view(-1)[:_SAMPLE]
        return hash(part.view(torch.uint8).numpy().tobytes())
    except RuntimeError:  # wrapped by a transform, or fake
        return None


def _leaves(outputs: Iterable[Any]) -> list[torch.Tensor]:
    """The leaf tensors that a graph accumulates into, as far as it is followed."""
    waiting = [getattr(output, "grad_fn", None) for output in outputs]
    seen: set[Any] = set()
    found = []
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        waiting.extend(following for following, _ in node.next_functions)
    return found
