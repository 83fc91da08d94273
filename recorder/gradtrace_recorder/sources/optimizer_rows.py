"""What is recorded of an optimizer at its step: its groups, the gradients it sees, the parameters it leaves."""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer

from gradtrace_recorder.recording.recording import Recording
from gradtrace_recorder.recording.snapshots import record_gradients, record_parameters_after
from gradtrace_recorder.state.naming import ParameterName
from gradtrace_recorder.torch_internals.dynamo import never_compiled

# Where wrappers keep what they wrap is looked for among so many values, and in so many frames.
_MOST_VALUES, _MOST_FRAMES = 4096, 16
_OWN_ATTRIBUTES = ("state", "param_groups", "defaults")

_Key = tuple[str, ...] | tuple[int, ...]


class _Known:
    """An optimizer that has stepped: its number once it has groups recorded, and what it holds or is held by."""

    __slots__ = ("held", "index", "ref", "wrapper")

    def __init__(self, optimizer: Any, held: Iterable[Any]) -> None:
        self.ref = weakref.ref(optimizer)
        self.index: int | None = None
        self.held = [weakref.ref(one) for one in held]
        self.wrapper = _wrapper_class(optimizer)


class OptimizerRows:
    """Writes them, each once a step. Called on the job's threads."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._next_index = 0
        self._step = -1
        self._grouped: set[int] = set()
        self._final: set[tuple[Any, ...]] = set()
        self._after: set[tuple[Any, ...]] = set()

    def seen(self, recording: Recording, optimizer: Any, wrapper: str | None = None) -> None:
        """Its groups, and the gradients it is about to use. `wrapper` is the class of the step around this one."""
        self._at(recording)
        known = self._known_of(optimizer)
        inner = [one for ref in known.held if (one := ref()) is not None]
        own = _parameters(optimizer)
        if inner:
            theirs = {id(p) for one in inner for p in _parameters(one)}
            own = [p for p in own if id(p) not in theirs]
        if own or not inner:
            self._groups(recording, known, optimizer, wrapper)
            self._gradients(recording, own)

    def not_stepped(self, recording: Recording, optimizer: Any) -> None:
        """GradScaler left it out: what it would have seen."""
        self._at(recording)
        for one in self._innermost(optimizer):
            self._groups(recording, self._known_of(one), one, None)
            self._gradients(recording, _parameters(one))

    def groups(self, recording: Recording, optimizer: Any, wrapper: str | None) -> None:
        """Its groups alone: the gradients that it saw are not known. None of what holds others that have theirs."""
        self._at(recording)
        known = self._known_of(optimizer)
        held = [one for ref in known.held if (one := ref()) is not None]
        if not any(self._known_of(one).index in self._grouped for one in held):
            self._groups(recording, known, optimizer, wrapper)

    def left(self, recording: Recording, optimizers: Iterable[Any]) -> None:
        """The parameters of all of them as they are now, without those that have a row already."""
        self._at(recording)
        chosen = []
        for optimizer in optimizers:
            for name, tensor in _named(recording, _parameters(optimizer)):
                if (name.root, name.fqn) not in self._after:
                    self._after.add((name.root, name.fqn))
                    chosen.append((name, tensor))
        record_parameters_after(recording, chosen)

    def holds(self, optimizer: Any, one: Any) -> bool:
        """Whether `optimizer` wraps `one`, or all that `one` steps is in its own groups."""
        if any(ref() is one for ref in self._known_of(optimizer).held):
            return True
        own = {id(p) for p in _parameters(optimizer)}
        return all(id(p) in own for p in _parameters(one))

    def wraps(self, optimizer: Any) -> bool:
        """Whether it holds other optimizers."""
        return bool(self._known_of(optimizer).held)

    def _groups(
        self, recording: Recording, known: _Known, optimizer: Any, wrapper: str | None
    ) -> None:
        if known.index is None:
            known.index = self._next_index
            self._next_index += 1
        if known.index in self._grouped:
            return
        self._grouped.add(known.index)
        for place, group in enumerate(optimizer.param_groups):
            names = [recording.names.tensor(p) for p in group["params"]]
            recording.rows.optimizer_group(
                known.index,
                place,
                type(optimizer).__name__,
                wrapper or known.wrapper,
                _number(group.get("lr")),
                _hyperparameters(group),
                [None if name is None else name.fqn for name in names],
            )

    def _gradients(self, recording: Recording, parameters: Iterable[torch.Tensor]) -> None:
        if not recording.settings.records_state:
            return
        timeline = recording.timeline
        backward_index = max(0, timeline.totals.engine_calls - 1)
        chosen = []
        for name, tensor in _named(recording, parameters):
            key = (backward_index, name.root, name.fqn)
            if key not in self._final:
                self._final.add(key)
                chosen.append((name, tensor))
        record_gradients(
            recording, "final", backward_index, max(0, timeline.microbatch - 1), chosen
        )

    def _innermost(self, optimizer: Any) -> Iterator[Any]:
        held = [one for ref in self._known_of(optimizer).held if (one := ref()) is not None]
        if not held:
            yield optimizer
        for one in held:
            yield from self._innermost(one)

    def _at(self, recording: Recording) -> None:
        step = recording.timeline.step
        if self._step != step:
            self._step = step
            self._grouped, self._final, self._after = set(), set(), set()

    def _known_of(self, optimizer: Any) -> _Known:
        known = self._known.get(id(optimizer))
        if known is None or known.ref() is not optimizer:
            held = [one for one in held_optimizers(optimizer) if not self._is_held(optimizer, one)]
            known = self._known[id(optimizer)] = _Known(optimizer, held)
        return known

    def _is_held(self, optimizer: Any, by: Any) -> bool:
        """Whether the other one holds it: of two that know each other the one that steps first is the wrapper."""
        known = self._known.get(id(by))
        return known is not None and any(ref() is optimizer for ref in known.held)


def held_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers that lie in another one's attributes, as a wrapper's or a container's do."""
    if type(optimizer).__module__.startswith("torch.optim."):
        return []
    found: list[Any] = []
    for name, value in list(getattr(optimizer, "__dict__", {}).items()):
        if name in _OWN_ATTRIBUTES:
            continue
        values: Iterable[Any] = (value,)
        if isinstance(value, list | tuple):
            values = value[:_MOST_VALUES]
        elif isinstance(value, dict):
            values = list(value.values())[:_MOST_VALUES]
        for one in values:
            if isinstance(one, Optimizer) and one is not optimizer:
                found.append(one)
    return found


def _wrapper_class(optimizer: Any) -> str | None:
    """Class of what stands around it without being an optimizer of torch's: Accelerate's, Lightning's, DeepSpeed's.

    Asked once for each optimizer, while it steps: of functions named `step` alone, which are over soon.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return None
        code = frame.f_code
        if code.co_name == "step" and code.co_argcount and code.co_varnames[0] == "self":
            holder = frame.f_locals.get("self")
            own = getattr(holder, "__dict__", None)
            if holder is not optimizer and isinstance(own, dict):
                for name in ("optimizer", "_optimizer", "base_optimizer"):
                    if own.get(name) is optimizer:
                        return type(holder).__name__
        frame = frame.f_back
    return None


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _named(
    recording: Recording, parameters: Iterable[torch.Tensor]
) -> Iterator[tuple[ParameterName, torch.Tensor]]:
    for parameter in parameters:
        name = recording.names.tensor(parameter)
        if name is not None:
            yield name, parameter


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None


def _hyperparameters(group: dict[str, Any]) -> str:
    """The group's numbers, switches and texts as JSON with sorted keys; a learning rate that is one number aside."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return [plain(v) for v in value]
        if isinstance(value, torch.Tensor):
            return _number(value)
        return (
            value if isinstance(value, int | float | str | bool | type(None)) else str(type(value))
        )

    aside = ("params",) if isinstance(group.get("lr"), tuple | list) else ("params", "lr")
    return json.dumps({k: plain(v) for k, v in sorted(group.items()) if k not in aside})


never_compiled(OptimizerRows, held_optimizers, _wrapper_class)
