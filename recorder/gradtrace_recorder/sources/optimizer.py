"""Optimizer steps: what the optimizer saw, what it left, and where a step ends."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

import torch
from torch.optim import Optimizer

from gradtrace_recorder.guard import Guard
from gradtrace_recorder.recording.recording import Gate, Recording
from gradtrace_recorder.sources.closures import closure_of, with_closure_seen
from gradtrace_recorder.sources.optimizer_rows import OptimizerRows
from gradtrace_recorder.sources.source import Source
from gradtrace_recorder.torch_internals.autograd import inside_backward, sequence_nr
from gradtrace_recorder.torch_internals.call_sites import passed_over
from gradtrace_recorder.torch_internals.dynamo import never_compiled
from gradtrace_recorder.torch_internals.frames import is_inside_another_step
from gradtrace_recorder.torch_internals.modes import unasked
from gradtrace_recorder.torch_internals.privates import found
from gradtrace_recorder.torch_internals.standing import TOLD
from gradtrace_schemas.journal import AFTER_OPTIMIZER, IN_OPTIMIZER, NULL_INT32

_NewArguments = tuple[tuple[Any, ...], dict[str, Any]]


class _OpenStep:
    """A step that has not returned. It holds the optimizer weakly: an exception may leave it behind."""

    __slots__ = ("closure_ns", "optimizer", "started_ns", "waits", "wrapper")

    def __init__(self, optimizer: Optimizer, wrapper: str | None) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.wrapper = wrapper
        self.started_ns = 0
        self.closure_ns = 0
        self.waits = False  # for its closure, before what it sees is recorded


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.stack: list[_OpenStep] = []
        self.stepped: list[weakref.ref[Optimizer]] = []  # inside the outermost, itself included


class OptimizerSource(Source):
    """Global step hooks of `torch.optim`, and a wrapper of `GradScaler.step`.

    The hooks are silent when a GradScaler skips a step, so its `step` is seen too.
    Source: torch/optim/optimizer.py, `profile_hook_step`; torch/amp/grad_scaler.py, `step`.
    """

    def __init__(self, gate: Gate, guard: Guard) -> None:
        super().__init__(gate, guard)
        self._local = _ThreadState()
        self._rows = OptimizerRows()
        self._steps_seen = 0
        self._scaler_step: Any = None

    def attach(self) -> None:
        """Be told of steps, and wrap `GradScaler.step`."""
        TOLD.optimizer_steps, TOLD.optimizer_stepped = self.before, self._after
        source, original = self, found("torch.amp.GradScaler.step", None)
        if original is None:
            return

        @functools.wraps(original)
        @passed_over
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            seen = source._steps_seen
            result = original(scaler, optimizer, *args, **kwargs)
            try:
                source._scaler_stepped(scaler, optimizer, left_out=source._steps_seen == seen)
            except RecursionError:
                TOLD.short += 1
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
        self.guard.is_open = False

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> _NewArguments | None:
        """An optimizer is about to step: with a closure that is seen, if it was given one."""
        if not self.guard.is_open:
            return None
        try:
            self._steps_seen += 1
            recording = self._gate.enter()
            if recording is not None:
                return self._begins(recording, optimizer, args, kwargs)
        except Exception as error:
            self.guard.failed(error)
        return None

    def _begins(
        self, recording: Recording, optimizer: Optimizer, args: Any, kwargs: Any
    ) -> _NewArguments | None:
        local, rows = self._local, self._rows
        if local.stack and not is_inside_another_step():
            local.stack.clear()  # an earlier step raised, and no hook told us
        stack = local.stack
        timeline = recording.timeline
        timeline.optimizer_seen = True
        entered = timeline.now()
        around = stack[-1].optimizer() if stack else None
        is_wrapped = around is not None and rows.wraps(around)
        wrapper = type(around).__name__ if is_wrapped and around is not optimizer else None
        opened = _OpenStep(optimizer, wrapper)
        opened.waits = closure_of(args, kwargs) is not None
        # What an enclosing optimizer has recorded as its own is not the inner one's again.
        is_covered = around is not None and not is_wrapped and rows.holds(around, optimizer)
        if not opened.waits and not is_covered and timeline.has_begun and timeline.is_recorded:
            with unasked():
                rows.seen(recording, optimizer, wrapper)
        if not stack:
            local.stepped = []
        local.stepped.append(opened.optimizer)
        opened.started_ns = started = timeline.now()
        stack.append(opened)
        if len(stack) == 1:
            self._move(recording, IN_OPTIMIZER, optimizer, started)
        timeline.totals.recorder_ns += started - entered
        if not opened.waits:
            return None
        return with_closure_seen(args, kwargs, self._closure_begins, self._closure_ends)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.guard.is_open:
            return
        try:
            recording = self._gate.recording
            local = self._local
            stack = local.stack
            if recording is None or not stack or stack[-1].optimizer() is not optimizer:
                return
            timeline = recording.timeline
            opened = stack.pop()
            is_left = opened.waits or self._rows.wraps(optimizer)
            if is_left and timeline.has_begun and timeline.is_recorded:
                # Its closure was never called, or nothing that it holds has stepped.
                with unasked():
                    self._rows.groups(recording, optimizer, opened.wrapper)
            if stack:
                return
            ended = timeline.now()
            self._move(recording, AFTER_OPTIMIZER, optimizer, ended)
            timeline.totals.optimizer_ns += ended - opened.started_ns - opened.closure_ns
            timeline.totals.skipped = timeline.totals.skipped or False
            if timeline.is_recorded and recording.settings.records_state:
                stepped = [one for ref in local.stepped if (one := ref()) is not None]
                with unasked():
                    self._rows.left(recording, reversed(stepped))
            local.stepped = []
            timeline.totals.recorder_ns += timeline.now() - ended
            timeline.optimizer_stepped(inside_backward=inside_backward())
        except Exception as error:
            self.guard.failed(error)

    def _closure_begins(self) -> int:
        recording = self._gate.recording
        return 0 if recording is None else recording.timeline.now()

    def _closure_ends(self, began: int, returned: bool) -> None:
        """The optimizer's closure has run forward and backward: now its gradients are what it will see."""
        recording = self._gate.recording
        stack = self._local.stack
        if recording is None or not stack or not self.guard.is_open:
            return
        try:
            timeline = recording.timeline
            ended = timeline.now()
            innermost, outermost = stack[-1], stack[0]
            optimizer = innermost.optimizer()
            if not returned or optimizer is None:
                return
            for opened in stack:
                opened.waits = False
            if timeline.has_begun and timeline.is_recorded:
                with unasked():
                    self._rows.seen(recording, optimizer, innermost.wrapper)
            first = outermost.optimizer()
            if first is not None:
                # The step may have begun inside the closure: what follows is of that one.
                self._move(recording, IN_OPTIMIZER, first, timeline.now())
            now = timeline.now()
            outermost.closure_ns += now - began
            timeline.totals.recorder_ns += now - ended
        except Exception as error:
            self.guard.failed(error)

    def _move(self, recording: Recording, kind: int, optimizer: Optimizer, at_ns: int) -> None:
        name = recording.journal.string(type(optimizer).__name__)
        timeline = recording.timeline
        place = (kind, name, NULL_INT32, NULL_INT32, timeline.step, timeline.microbatch, NULL_INT32)
        recording.journal.move(threading.get_ident(), at_ns, place)
        if timeline.is_recorded:
            recording.versions.optimizer(
                sequence_nr(),
                type(optimizer).__name__,
                (p for group in optimizer.param_groups for p in group["params"]),
                is_over=kind == AFTER_OPTIMIZER,
            )

    def _scaler_stepped(self, scaler: Any, optimizer: Any, *, left_out: bool) -> None:
        recording = self._gate.recording
        if not self.guard.is_open or recording is None:
            return
        try:
            timeline = recording.timeline
            if not left_out:
                if getattr(optimizer, "_step_supports_amp_scaling", False):
                    timeline.totals.skipped = _skipped_inside(scaler, optimizer)
                return
            timeline.optimizer_seen = True
            timeline.totals.skipped = True
            entered = timeline.now()
            if timeline.has_begun and timeline.is_recorded:
                with unasked():
                    self._rows.not_stepped(recording, optimizer)
            timeline.totals.recorder_ns += timeline.now() - entered
            timeline.optimizer_stepped(inside_backward=inside_backward(), by_scaler=True)
        except Exception as error:
            self.guard.failed(error)


def _skipped_inside(scaler: Any, optimizer: Any) -> bool | None:
    """Whether a fused optimizer, which is called always, left its parameters alone. None where only a device knows.

    Source: torch/amp/grad_scaler.py, `step` (2.13): `found_inf_per_device` of the optimizer's state; a scaler that is
    not enabled has none, and leaves no step out.
    """
    if not scaler.is_enabled():
        return False
    states: Any = getattr(scaler, "_per_optimizer_states", {})
    found = states.get(id(optimizer), {}).get("found_inf_per_device")
    if not found or any(one.device.type != "cpu" for one in found.values()):
        return None
    return any(bool(one) for one in found.values())


never_compiled(OptimizerSource)
