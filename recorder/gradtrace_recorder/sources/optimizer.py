"""Optimizer steps: what the optimizer saw, what it left, and where a step ends."""

from __future__ import annotations

import functools
import json
import sys
import threading
import weakref
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from gradtrace_recorder.call_sites import passed_over
from gradtrace_recorder.dynamo import never_compiled
from gradtrace_recorder.guard import Guard
from gradtrace_recorder.naming import ParameterName
from gradtrace_recorder.privates import found
from gradtrace_recorder.recording import Gate, Recording
from gradtrace_recorder.sources.state import (
    inside_backward,
    record_gradients,
    record_parameters_after,
)
from gradtrace_recorder.standing import TOLD
from gradtrace_recorder.summaries.summariser import unasked
from gradtrace_schemas.journal import AFTER_OPTIMIZER, IN_OPTIMIZER, NULL_INT32

_get_sequence_nr = found("torch._C._autograd._get_sequence_nr", lambda: 0)


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[int, int]] = []


class OptimizerSource:
    """Global step hooks of `torch.optim`, and a wrapper of `GradScaler.step`.

    The hooks are silent when a GradScaler skips a step, so its `step` is seen too.
    Source: torch/optim/optimizer.py, `profile_hook_step`; torch/amp/grad_scaler.py, `step`.
    """

    def __init__(self, gate: Gate, guard: Guard) -> None:
        self._gate = gate
        self._guard = guard
        self._local = _ThreadState()
        self._indexes: dict[int, tuple[weakref.ref[Optimizer], int]] = {}
        self._next_index = 0
        self._steps_seen = 0
        self._after_at: tuple[int, set[tuple[int, str]]] = (-1, set())
        self._scaler_step: Any = None

    def attach(self) -> None:
        """Be told of steps, and wrap `GradScaler.step`."""
        TOLD.optimizer_steps, TOLD.optimizer_stepped = self.before, self._after
        source, original = self, found("torch.amp.GradScaler.step", None)
        if original is None:
            return

        @functools.wraps(original)
        @passed_over
        def step(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            seen = source._steps_seen
            result = original(scaler, *args, **kwargs)
            source._scaler_stepped(skipped=source._steps_seen == seen)
            return result

        never_compiled(step, calls_the_job=True)
        self._scaler_step = (original, step)
        torch.amp.GradScaler.step = step  # type: ignore[assignment, method-assign]

    def detach(self) -> None:
        """Be told no more; unwrap `GradScaler.step` unless somebody wrapped ours."""
        if self._scaler_step is not None:
            original, ours = self._scaler_step
            if torch.amp.GradScaler.step is ours:
                torch.amp.GradScaler.step = original  # type: ignore[method-assign]
            self._scaler_step = None
        self._guard.is_open = False

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer is about to step."""
        if not self._guard.is_open:
            return
        try:
            self._steps_seen += 1
            recording = self._gate.enter()
            if recording is None:
                return
            stack = self._local.stack
            if stack and not _is_inside_another():
                stack.clear()  # an earlier step raised, and no hook told us
            timeline = recording.timeline
            entered = timeline.now()
            outermost = not stack
            if outermost and timeline.is_begun and timeline.is_recorded:
                with unasked():
                    self._record_seen(recording, optimizer)
            started = timeline.now()
            stack.append((id(optimizer), started))
            if outermost:
                self._move(recording, IN_OPTIMIZER, optimizer, started)
            timeline.totals.recorder_ns += started - entered
        except Exception as error:
            self._guard.failed(error)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._guard.is_open:
            return
        try:
            recording = self._gate.recording
            stack = self._local.stack
            if recording is None or not stack or stack[-1][0] != id(optimizer):
                return
            timeline = recording.timeline
            _, started = stack.pop()
            if stack:
                return
            ended = timeline.now()
            self._move(recording, AFTER_OPTIMIZER, optimizer, ended)
            timeline.totals.optimizer_ns += ended - started
            timeline.totals.skipped = timeline.totals.skipped or False
            if timeline.is_recorded and recording.settings.records_state:
                with unasked():
                    record_parameters_after(recording, self._not_yet_after(recording, optimizer))
            timeline.totals.recorder_ns += timeline.now() - ended
            timeline.optimizer_stepped(inside_backward=inside_backward())
        except Exception as error:
            self._guard.failed(error)

    def _move(self, recording: Recording, kind: int, optimizer: Optimizer, at_ns: int) -> None:
        name = recording.journal.string(type(optimizer).__name__)
        timeline = recording.timeline
        place = (kind, name, NULL_INT32, NULL_INT32, timeline.step, timeline.microbatch, NULL_INT32)
        recording.journal.move(threading.get_ident(), at_ns, place)
        if timeline.is_recorded:
            recording.versions.optimizer(
                _get_sequence_nr(),
                type(optimizer).__name__,
                (p for group in optimizer.param_groups for p in group["params"]),
                is_over=kind == AFTER_OPTIMIZER,
            )

    def _scaler_stepped(self, *, skipped: bool) -> None:
        recording = self._gate.recording
        if not self._guard.is_open or recording is None:
            return
        try:
            if skipped:
                recording.timeline.totals.skipped = True
                recording.timeline.optimizer_stepped(inside_backward=inside_backward())
        except Exception as error:
            self._guard.failed(error)

    def _record_seen(self, recording: Recording, optimizer: Optimizer) -> None:
        """The optimizer's groups, and the gradients it is about to use."""
        index = self._index(optimizer)
        for place, group in enumerate(optimizer.param_groups):
            names = [recording.names.tensor(p) for p in group["params"]]
            recording.rows.optimizer_group(
                index,
                place,
                type(optimizer).__name__,
                _number(group.get("lr")),
                _hyperparameters(group),
                [None if name is None else name.fqn for name in names],
            )
        if recording.settings.records_state:
            totals = recording.timeline.totals
            record_gradients(
                recording,
                "final",
                max(0, totals.engine_calls - 1),
                max(0, recording.timeline.microbatch - 1),
                _named(recording, optimizer),
            )

    def _not_yet_after(
        self, recording: Recording, optimizer: Optimizer
    ) -> list[tuple[ParameterName, torch.Tensor]]:
        """Its parameters, without those that an earlier optimizer of the same step has left a row of."""
        step = recording.timeline.step
        if self._after_at[0] != step:
            self._after_at = (step, set())
        done = self._after_at[1]
        chosen = []
        for name, tensor in _named(recording, optimizer):
            if (name.root, name.fqn) not in done:
                done.add((name.root, name.fqn))
                chosen.append((name, tensor))
        return chosen

    def _index(self, optimizer: Optimizer) -> int:
        known = self._indexes.get(id(optimizer))
        if known is None or known[0]() is not optimizer:
            known = (weakref.ref(optimizer), self._next_index)
            self._next_index += 1
            self._indexes[id(optimizer)] = known
        return known[1]


def _is_inside_another() -> bool:
    """Whether the step that is just beginning is made by another optimizer's step, or by its closure.

    Source: torch/optim/optimizer.py, `Optimizer.profile_hook_step` (2.13): its wrapper calls the hooks.
    """
    frame: Any = sys._getframe(1)
    running = 0
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_globals is vars(torch_optimizer):
            running += 1
        frame = frame.f_back
    return running > 1


def _named(recording: Recording, optimizer: Optimizer) -> list[tuple[ParameterName, torch.Tensor]]:
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = recording.names.tensor(parameter)
            if name is not None:
                found.append((name, parameter))
    return found


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None


def _hyperparameters(group: dict[str, Any]) -> str:
    """The group's numbers, switches and texts but the learning rate, as JSON with sorted keys."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return [plain(v) for v in value]
        if isinstance(value, torch.Tensor):
            return _number(value)
        return (
            value if isinstance(value, int | float | str | bool | type(None)) else str(type(value))
        )

    return json.dumps({k: plain(v) for k, v in sorted(group.items()) if k not in ("params", "lr")})


never_compiled(OptimizerSource, _is_inside_another)
