"""Pipeline stages: a row for each action, and for each wait for what it receives or sends.

Source: torch/distributed/pipelining/{stage,schedules,_backward}.py (2.13). Called on the job's threads.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gradtrace_recorder.actions import FORWARD, FULL, INPUT, WEIGHT, Action, OwnAction
from gradtrace_recorder.dynamo import never_compiled
from gradtrace_recorder.guard import Guard
from gradtrace_recorder.naming import holds_parameters
from gradtrace_recorder.recording import Gate, Recording
from gradtrace_recorder.sources.state import record_gradients
from gradtrace_recorder.stages import STAGES, WAIT
from gradtrace_recorder.summaries.summariser import unasked, unseen
from gradtrace_recorder.summaries.values import Packed

_FUNCTIONS = {
    "stage_backward": FULL,
    "stage_backward_input": INPUT,
    "stage_backward_weight": WEIGHT,
}
_OPERATIONS = {
    "get_fwd_recv_ops": "receive_activations",
    "get_bwd_recv_ops": "receive_gradients",
    "get_fwd_send_ops": "send_activations",
    "get_bwd_send_ops": "send_gradients",
}
# (kind, stage_index, microbatch) of what is waited for.
_Wait = tuple[str, int, int]
# Start and end of a wait that is over, and the place where its row is held.
_Over = tuple[int, int, int | None]
_Ended = Callable[[Recording, Any, BaseException | None], None]


class PipelineSource:
    """Sees the functions of `stages.py`, and serves `gradtrace_recorder.stage`.

    A wait for what an action receives comes before the step may be known: its row is written when the action begins.
    """

    def __init__(self, gate: Gate, guard: Guard) -> None:
        self._gate = gate
        self._guard = guard
        self._operations: weakref.WeakKeyDictionary[Any, _Wait] = weakref.WeakKeyDictionary()
        self._works: weakref.WeakKeyDictionary[Any, list[_Wait]] = weakref.WeakKeyDictionary()
        self._received: dict[_Wait, list[_Over]] = {}
        self._counts: collections.Counter[tuple[str, int | None, int]] = collections.Counter()
        self._counted_step = -1

    def attach(self) -> None:
        """See actions from now on."""
        STAGES.attach()
        STAGES.observer = self

    def detach(self) -> None:
        """See no more."""
        self._guard.is_open = False
        if STAGES.observer is self:
            STAGES.detach()

    def begins(self, name: str, arguments: dict[str, Any]) -> _Ended | None:
        """A seen function is called."""
        if not self._guard.is_open:
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

    def ends(self, opened: _Ended, result: Any, error: BaseException | None) -> None:
        """It has returned, or raised."""
        recording = self._gate.recording
        if recording is None:
            return
        try:
            with unasked():
                opened(recording, result, error)
        except Exception as ours:
            self._failed(ours)

    @contextlib.contextmanager
    def stage(self, index: int, microbatch: int, kind: str) -> Iterator[OwnAction]:
        """The block is an action of a stage of the job's own pipeline."""
        recording = self._gate.enter() if self._guard.is_open else None
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
            if self._guard.is_open and recording is not None and _is_recorded(recording):
                with unasked():
                    return recording.summariser.of_all(tensors)
        except Exception as error:
            self._failed(error)
        return None

    def _failed(self, error: Exception) -> None:
        """Of an action that is not followed to its end nothing may stay."""
        recording = self._gate.recording
        if recording is not None:
            held = [action.held for action in recording.actions.open]
            held += [place for waits in self._received.values() for *_, place in waits]
            for place in held:
                recording.rows.release(place)
            recording.actions.open.clear()
        self._received.clear()
        self._guard.failed(error)

    def _begun(self, recording: Recording, name: str, arguments: dict[str, Any]) -> _Ended | None:
        if name in _FUNCTIONS:
            return self._function(recording, name, arguments)
        if name in _OPERATIONS:
            owner, microbatch = list(arguments.values())[:2]
            return lambda _, made, error: self._prepared(
                (_OPERATIONS[name], owner.stage_index, microbatch), made or ()
            )
        if name == "_batch_p2p":
            operations = arguments["p2p_ops"]
            return lambda _, works, error: self._sent_off(operations, works or ())
        if name == WAIT:
            waits = [wait for work in arguments["work"] for wait in self._works.pop(work, ())]
            return self._wait(recording, waits) if waits else None
        if name == "_maybe_compute_loss":
            return self._loss(recording, arguments)
        return self._action(recording, name, arguments)

    # Actions.

    def _action(self, recording: Recording, name: str, arguments: dict[str, Any]) -> _Ended | None:
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

    def _function(self, recording: Recording, name: str, arguments: dict[str, Any]) -> _Ended:
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
        if action is around and action.received is None and _is_recorded(recording):
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
            elif of.sent is None and sent is not None and _is_recorded(live):
                of.sent = live.summariser.of_all(sent)

        return ended

    def _loss(self, recording: Recording, arguments: dict[str, Any]) -> _Ended | None:
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
            timeline.activity()
        if action.stage_index is None:
            action.microbatch = timeline.microbatch
        else:
            action.before = timeline.enter_microbatch(action.microbatch)
        recording.actions.open.append(action)
        self._write_received(recording, action)
        if received is not None and _is_recorded(recording):
            action.received = recording.summariser.of_all(received)
        action.start_ns = timeline.now()
        if action.kind is not None:
            self._hold(recording, action)
        timeline.totals.recorder_ns += timeline.now() - entered

    def _hold(self, recording: Recording, action: Action) -> None:
        """Keep its row as far as it is known, for a rank that is killed in it."""
        recording.rows.release(action.held)
        action.held = None
        if action.kind is not None and _is_recorded(recording):
            action.held = recording.rows.hold_stage_event(
                recording.timeline.step, action.microbatch, stage_index=action.stage_index, kind=action.kind,
                start_ns=action.start_ns, received=action.received,
            )  # fmt: skip

    def _leave(
        self, recording: Recording, action: Action, error: BaseException | None, sent: Any = None
    ) -> None:
        timeline = recording.timeline
        end = timeline.now()
        opened = recording.actions.open
        while opened and opened.pop() is not action:
            pass
        if action.before is not None:
            timeline.leave_microbatch(action.before)
        has_row = action.kind == FORWARD or action.has_run or error is not None
        if action.kind is None or not has_row or not _is_recorded(recording):
            recording.rows.release(action.held)
            return
        if sent is not None:
            action.sent = recording.summariser.of_all(sent)
        place = (action.kind, action.stage_index, action.microbatch)
        over = (action.start_ns, end, action.held)
        self._write(recording, place, over, _text(error), action.received, action.sent)
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

    # Waits.

    def _prepared(self, wait: _Wait, operations: Any) -> None:
        for operation in operations:
            self._operations[operation] = wait

    def _sent_off(self, operations: Any, works: Any) -> None:
        waits = [self._operations.pop(operation, None) for operation in operations]
        if len(works) != len(waits):
            # One for all of them, which the backend coalesced.
            every = [wait for wait in waits if wait is not None]
            for work in works:
                self._works[work] = every
            return
        for work, wait in zip(works, waits, strict=True):
            if wait is not None:
                self._works[work] = [wait]

    def _wait(self, recording: Recording, waits: list[_Wait]) -> _Ended:
        start = recording.timeline.now()
        step = recording.timeline.coming_step
        held: list[int | None] = [None for _ in waits]
        if step is not None and recording.settings.records("params"):
            held = [
                recording.rows.hold_stage_event(
                    step, microbatch, stage_index=stage_index, kind=kind, start_ns=start
                )
                for kind, stage_index, microbatch in waits
            ]
        return lambda live, _, error: self._waited(live, waits, start, held, error)

    def _waited(
        self,
        recording: Recording,
        waits: list[_Wait],
        start: int,
        held: list[int | None],
        error: BaseException | None,
    ) -> None:
        end = recording.timeline.now()
        for wait, place in zip(waits, held, strict=True):
            over = (start, end, place)
            if error is None and wait[0].startswith("receive"):
                held_over = self._hold_received(recording, wait, over)
                self._received.setdefault(wait, []).append(held_over)
            elif _is_recorded(recording):
                self._write(recording, wait, over, _text(error))
            else:
                recording.rows.release(place)

    def _hold_received(self, recording: Recording, wait: _Wait, over: _Over) -> _Over:
        """Keep the row of a wait that is over until its action begins, which tells the step for certain."""
        start, end, place = over
        step = recording.timeline.coming_step
        recording.rows.release(place)
        if place is None or step is None:
            return start, end, None
        kind, stage_index, microbatch = wait
        held = recording.rows.hold_stage_event(
            step, microbatch, stage_index=stage_index, kind=kind, start_ns=start, end_ns=end
        )
        return start, end, held

    def _write_received(self, recording: Recording, action: Action) -> None:
        if action.stage_index is None or action.kind is None:
            return
        kind = "receive_activations" if action.kind == FORWARD else "receive_gradients"
        wait = (kind, action.stage_index, action.microbatch)
        for over in self._received.pop(wait, ()):
            if _is_recorded(recording):
                self._write(recording, wait, over)
            else:
                recording.rows.release(over[-1])

    def _write(
        self,
        recording: Recording,
        place: tuple[str, int | None, int],
        over: _Over,
        error: str | None = None,
        received: Any = None,
        sent: Any = None,
    ) -> None:
        step = recording.timeline.step
        if self._counted_step != step:
            self._counted_step = step
            self._counts.clear()
        occurrence = self._counts[place]
        self._counts[place] += 1
        kind, stage_index, microbatch = place
        start, end, held = over
        recording.rows.stage_event(
            held, step, microbatch, stage_index=stage_index, kind=kind, occurrence=occurrence, start_ns=start,
            end_ns=end, error=error, received=received, sent=sent,
        )  # fmt: skip


def _text(error: BaseException | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {str(error)[:400]}"


def _is_recorded(recording: Recording) -> bool:
    return recording.timeline.is_recorded and recording.settings.records("params")


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
