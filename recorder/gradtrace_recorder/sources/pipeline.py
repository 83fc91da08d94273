"""Pipeline stages: a row for each action, and what runs inside an action is of its stage, microbatch and half.

Source: torch/distributed/pipelining/{stage,schedules,_backward}.py (2.13). Called on the job's threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from gradtrace_recorder.guard import Guard
from gradtrace_recorder.recording.recording import Gate, Recording
from gradtrace_recorder.recording.snapshots import record_gradients
from gradtrace_recorder.sources.source import Source
from gradtrace_recorder.sources.stage_waits import (
    OPERATIONS,
    Ended,
    StageRows,
    StageWaits,
    is_recorded,
)
from gradtrace_recorder.state.actions import FORWARD, FULL, INPUT, WEIGHT, Action, OwnAction
from gradtrace_recorder.state.naming import holds_parameters
from gradtrace_recorder.summaries.values import Packed
from gradtrace_recorder.torch_internals.dynamo import never_compiled
from gradtrace_recorder.torch_internals.modes import unasked, unseen
from gradtrace_recorder.torch_internals.stages import STAGES, WAIT

_FUNCTIONS = {
    "stage_backward": FULL,
    "stage_backward_input": INPUT,
    "stage_backward_weight": WEIGHT,
}


class PipelineSource(Source):
    """Sees the functions of `stages.py`, and serves `gradtrace_recorder.stage`."""

    def __init__(self, gate: Gate, guard: Guard) -> None:
        super().__init__(gate, guard)
        self._rows = StageRows()
        self._waits = StageWaits(self._rows)

    def attach(self) -> None:
        """See actions from now on."""
        STAGES.attach()
        STAGES.observer = self

    def detach(self) -> None:
        """See no more."""
        self.guard.is_open = False
        if STAGES.observer is self:
            STAGES.detach()

    def begins(self, name: str, arguments: dict[str, Any]) -> Ended | None:
        """A seen function is called."""
        if not self.guard.is_open:
            return None
        try:
            with unasked():
                recording = self._gate.enter()
                if recording is None:
                    return None
                return self._begun(recording, name, arguments)
        except Exception as error:
            self._failed(error)
            return None

    def ends(self, opened: Ended, result: Any, error: BaseException | None) -> None:
        """It has returned, or raised."""
        recording = self._gate.recording
        if recording is None or not self.guard.is_open:
            return  # after a failure of ours, what was open has been given up
        try:
            with unasked():
                opened(recording, result, error)
        except Exception as ours:
            self._failed(ours)

    @contextlib.contextmanager
    def stage(self, index: int, microbatch: int, kind: str) -> Iterator[OwnAction]:
        """The block is an action of a stage of the job's own pipeline."""
        recording = self._gate.enter() if self.guard.is_open else None
        if recording is None:
            yield OwnAction()
            return
        action: Action | None = None
        try:
            action = Action(index, microbatch, kind)
            action.has_run = True
            self._enter(recording, action, trains=torch.is_grad_enabled())
        except Exception as error:
            action = None
            self._failed(error)
        failure: BaseException | None = None
        try:
            yield OwnAction(None if action is None else self._summarised, action)
        except BaseException as error:
            failure = error
            raise
        finally:
            if action is not None:
                self.ends(lambda live, _, error: self._leave(live, action, error), None, failure)

    def _summarised(self, tensors: Any) -> Packed | None:
        recording = self._gate.recording
        try:
            if self.guard.is_open and recording is not None and is_recorded(recording):
                with unasked():
                    return recording.summariser.of_all(tensors)
        except Exception as error:
            self._failed(error)
        return None

    def _failed(self, error: Exception) -> None:
        """Of an action that is not followed to its end nothing may stay."""
        recording = self._gate.recording
        if recording is not None:
            opened = recording.actions.open
            while opened:
                action = opened.pop()
                recording.rows.release(action.held)
                if action.before is not None:
                    recording.timeline.leave_microbatch(action.before)
            self._waits.forget(recording)
        self.guard.failed(error)

    def _begun(self, recording: Recording, name: str, arguments: dict[str, Any]) -> Ended | None:
        if name in _FUNCTIONS:
            return self._function(recording, name, arguments)
        if name in OPERATIONS:
            return self._waits.prepared(name, arguments)
        if name == "_batch_p2p":
            return self._waits.sent_off(arguments["p2p_ops"])
        if name == WAIT:
            return self._waits.wait(recording, arguments["work"])
        if name == "_maybe_compute_loss":
            return self._loss(recording, arguments)
        return self._action(recording, name, arguments)

    def _action(self, recording: Recording, name: str, arguments: dict[str, Any]) -> Ended | None:
        owner, microbatch = list(arguments.values())[:2]
        if name == "forward_one_chunk":
            action = Action(owner.stage_index, microbatch, FORWARD)
            received = (
                arguments.get("args") if owner.is_first else _buffers(owner, "args", microbatch)
            )
            # A stage without parameters begins a step too, where a backward is to follow.
            counts = holds_parameters(owner.submod) or owner.has_backward
            trains = torch.is_grad_enabled() and counts
            self._enter(recording, action, received, trains=trains)

            def returned(live: Recording, result: Any, error: BaseException | None) -> None:
                self._leave(live, action, error, result)

            return returned
        if not owner.has_backward:
            return None
        is_weight = name == "backward_weight_one_chunk"
        is_full = not is_weight and arguments.get("full_backward", True)
        kind = WEIGHT if is_weight else FULL if is_full else INPUT
        action = Action(owner.stage_index, microbatch, kind)
        # What the job brings is run whatever torch runs of its own.
        action.own_half = action.has_run = getattr(owner, "dw_builder", None) is not None
        received = None
        if not is_weight and not owner.is_last:
            received = _buffers(owner, "grad", microbatch)
        self._enter(recording, action, received, trains=True)

        def ended(live: Recording, _: Any, error: BaseException | None) -> None:
            sent = None if is_weight or error is not None else _given(owner, microbatch)
            self._leave(live, action, error, sent)

        return ended

    def _function(self, recording: Recording, name: str, arguments: dict[str, Any]) -> Ended:
        """One of torch's three backward functions: inside a stage's action, or all that there is of one."""
        kind = _FUNCTIONS[name]
        around = recording.actions.current
        action = around
        if action is None or action.kind is None:
            action = Action(None, recording.timeline.microbatch, kind)
            self._enter(recording, action, arguments.get("output_grads"), trains=True)
        elif action.kind == WEIGHT and kind == FULL and not action.own_half:
            action.become(FULL)  # of a first stage, whose input half did nothing
            self._hold(recording, action)
        if action is around and action.received is None and is_recorded(recording):
            # In a first stage's weight action, or the job's own stage, this is all that tells.
            action.received = recording.summariser.of_all(arguments.get("output_grads"))
        action.has_run = True
        before = action.phase
        if kind != FULL:
            action.phase = "input" if kind == INPUT else "weight"
        action.follows_half = kind == WEIGHT
        groups = arguments.get("param_groups") if kind == WEIGHT else None
        of = action

        def ended(live: Recording, result: Any, error: BaseException | None) -> None:
            of.phase, of.follows_half = before, False
            if kind == WEIGHT and error is None:
                live.timeline.weight_half_done()
                self._record_accumulated(live, groups or [])
            given = result[0] if kind == INPUT and result is not None else result
            sent = None if kind == WEIGHT else given
            if of is not around:
                self._leave(live, of, error, sent)
            elif of.sent is None and sent is not None and is_recorded(live):
                of.sent = live.summariser.of_all(sent)

        return ended

    def _loss(self, recording: Recording, arguments: dict[str, Any]) -> Ended | None:
        """A schedule computes the loss: modules that it calls are of that microbatch."""
        if not arguments["stage"].is_last:
            return None
        action = Action(arguments["stage"].stage_index, arguments["mb_index"], None)
        self._enter(recording, action, trains=False)
        return lambda live, _, error: self._leave(live, action, error)

    def _enter(
        self, recording: Recording, action: Action, received: Any = None, *, trains: bool
    ) -> None:
        timeline = recording.timeline
        entered = timeline.now()
        if trains:
            if timeline.is_by_parameters:
                recording.updates.look()
            timeline.activity()
        if action.stage_index is None:
            action.microbatch = timeline.microbatch
        else:
            action.before = timeline.enter_microbatch(action.microbatch)
        recording.actions.open.append(action)
        self._waits.write_received(recording, action)
        if received is not None and is_recorded(recording):
            action.received = recording.summariser.of_all(received)
        if action.kind is not None and is_recorded(recording):
            action.device_began = recording.device_times.begin()
        action.start_ns = timeline.now()
        if action.kind is not None:
            self._hold(recording, action)
        timeline.totals.recorder_ns += timeline.now() - entered

    def _hold(self, recording: Recording, action: Action) -> None:
        """Keep its row as far as it is known, for a rank that is killed in it."""
        recording.rows.release(action.held)
        action.held = None
        if action.kind is not None and is_recorded(recording):
            action.held = recording.rows.hold_stage_event(
                recording.timeline.step, action.microbatch, stage_index=action.stage_index, kind=action.kind,
                start_ns=action.start_ns, received=action.received,
            )  # fmt: skip

    def _leave(
        self, recording: Recording, action: Action, error: BaseException | None, sent: Any = None
    ) -> None:
        timeline = recording.timeline
        end = timeline.now()
        action.device_ns = recording.device_times.end(action.device_began)
        opened = recording.actions.open
        while opened and opened.pop() is not action:
            pass
        if action.before is not None:
            timeline.leave_microbatch(action.before)
        has_row = action.kind == FORWARD or action.has_run or error is not None
        if action.kind is None or not has_row or not is_recorded(recording):
            recording.rows.release(action.held)
            return
        if sent is not None:
            action.sent = recording.summariser.of_all(sent)
        place = (action.kind, action.stage_index, action.microbatch)
        over = (action.start_ns, end, action.held)
        self._rows.write(
            recording, place, over, error, action.received, action.sent, action.device_ns
        )
        timeline.totals.recorder_ns += timeline.now() - end

    def _record_accumulated(self, recording: Recording, groups: list[dict[str, Any]]) -> None:
        """What a weight half has added to its parameters' gradients, by hand: no AccumulateGrad ran."""
        timeline = recording.timeline
        if not timeline.is_recorded or not recording.settings.records_state:
            return
        # Torch takes the gradients out of the groups that it has run.
        leaves = (node.variable for g in groups if "grads" not in g for node in g["params"])
        named = [(recording.names.tensor(leaf), leaf) for leaf in leaves]
        chosen = [(name, leaf) for name, leaf in named if name is not None]
        chosen.sort(key=lambda entry: (entry[0].root, entry[0].fqn))
        last = timeline.totals.engine_calls - 1
        record_gradients(recording, "local", last, timeline.microbatch, chosen)


def _given(owner: Any, microbatch: int) -> Any:
    """The gradients that a stage has for the one before it: zeros where it has none, as torch sends them."""
    gradients = owner.bwd_cache.get(microbatch)
    described = getattr(owner, "_get_grad_send_meta", None)
    if gradients is None or owner.is_first or described is None:
        return gradients
    given = list(gradients)
    for index, gradient in enumerate(given):
        meta = None
        if gradient is None:
            with contextlib.suppress(Exception):  # torch will say so itself
                meta = described(index)
        if meta is not None:
            with unseen():
                given[index] = torch.zeros(meta.shape, dtype=meta.dtype)
    return given


def _buffers(owner: Any, what: str, microbatch: int) -> list[Any] | None:
    """What a stage has received for a microbatch: `args` or `grad`."""
    infos = getattr(owner, f"{what}_recv_info", {}).get(microbatch, ())
    return [getattr(info, "buffer", None) for info in infos]


never_compiled(PipelineSource)
