"""Calls into the autograd engine: every `backward()` and `autograd.grad`, however it is made."""

from __future__ import annotations

import itertools
import threading
import traceback
from collections.abc import Sequence
from typing import Any

from gradtrace_recorder.guard import Guard
from gradtrace_recorder.journal.writer import INSIDE, NOWHERE, Place
from gradtrace_recorder.observers.native.observer import NativeObserver
from gradtrace_recorder.observers.pass_context import EngineCall
from gradtrace_recorder.observers.python import (
    Culprit,
    PassWatch,
    PythonObserver,
    node_of,
    nodes_numbered,
)
from gradtrace_recorder.recording.recording import Gate, Recording
from gradtrace_recorder.recording.replay import RUNNING
from gradtrace_recorder.recording.snapshots import (
    record_gradients,
)
from gradtrace_recorder.sources.engine_calls import argument, is_no_pass, scalar
from gradtrace_recorder.sources.source import Source, Sources
from gradtrace_recorder.state.passes import Pass
from gradtrace_recorder.state.versions import Change
from gradtrace_recorder.summaries.device.times import Moment
from gradtrace_recorder.torch_internals.autograd import graph_task, inside_backward
from gradtrace_recorder.torch_internals.dynamo import never_compiled
from gradtrace_recorder.torch_internals.modes import unasked
from gradtrace_recorder.torch_internals.relays import RELAYS
from gradtrace_recorder.torch_internals.standing import TOLD, has_room
from gradtrace_schemas.journal import (
    AFTER_BACKWARD,
    IN_BACKWARD,
    NULL_INT32,
    NULL_INT64,
    NULL_STRING,
)

_get_ident = threading.get_ident
# Of Python's that the hooks on a Node may need, whatever the tensors.
PASS_FRAMES = 80


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.open_passes: list[_OpenPass] = []


class EngineSource(Source):
    """Told of every call into the engine by what stands before it. Each call gets one observer's watch."""

    def __init__(self, gate: Gate, guard: Guard, sources: Sources) -> None:
        super().__init__(gate, guard)
        self._sources = sources
        self._observer = PythonObserver(guard)
        self._native: NativeObserver | None = None
        self._local = _ThreadState()
        self._carried_at: int | None = None
        self._pass_threads: set[int] = set()
        # Of all threads, by serial: a step that ends on one thread begins backward_index anew for all.
        self._open: dict[int, _OpenPass] = {}
        self._serials = itertools.count()

    def attach(self) -> None:
        """Be told of calls."""
        TOLD.pass_begins = self.begins

    def detach(self) -> None:
        """Be told no more."""
        self.guard.is_open = False

    def begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _OpenPass | None:
        """The engine is about to be called with these; None where that is not watched. What is given is told the end.

        Raises RecursionError where Python has too few frames left for the hooks on Nodes: they run as deep.
        """
        if not self.guard.is_open or RUNNING.now:
            return None
        if not has_room(PASS_FRAMES):
            raise RecursionError
        try:
            with unasked():
                recording = self._gate.enter()
                if recording is not None and not is_no_pass():
                    return self._begin(recording, args, kwargs)
        except Exception as error:
            self.guard.failed(error)
        return None

    def _begin(
        self, recording: Recording, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _OpenPass:
        timeline = recording.timeline
        entered = timeline.now()
        if recording.parked is not None:
            recording.parked()
        accumulates = bool(argument("accumulate_grad", 6, args, kwargs, False))
        top_level = not inside_backward()
        if top_level:
            if timeline.is_by_parameters:
                recording.updates.engine_called(argument("tensors", 0, args, kwargs, ()))
            timeline.activity()
            recording.names.is_settled = True
        totals = timeline.totals
        index = totals.engine_calls
        totals.engine_calls = index + 1
        opened = _OpenPass(self, recording, index, timeline.microbatch, accumulates, top_level)
        opened.serial = serial = next(self._serials)
        action = recording.actions.current
        half, follows_half = None, False
        if action is not None:
            opened.stage_index, half = action.stage_index, action.phase
            follows_half = action.follows_half
        open_passes = self._local.open_passes
        if open_passes:
            opened.parent = open_passes[-1].index
            watch = open_passes[-1].watch
            if watch is not None and watch.task is None:
                # Called from a hook that ran before the outer pass's first Node: this is its task.
                watch.task = graph_task()
        elif not top_level:
            opened.parent = self._index_of_task(graph_task())
        self._open[serial] = opened
        try:
            self._sources.pass_begins(recording, opened)
            self._watch(opened, half, follows_half, args, kwargs)
            open_passes.append(opened)
            thread = _get_ident()
            opened.place_before = recording.journal.place_of(thread)
            place = (NULL_STRING, NULL_INT32, NULL_INT32, timeline.step, opened.microbatch, index)
            opened.place = place
            opened.start_ns = start = timeline.now()
            recording.journal.move(thread, start, (IN_BACKWARD, *place))
        except BaseException:  # an interrupt: the job may go on
            self._open.pop(serial, None)
            self._local.open_passes = [one for one in open_passes if one is not opened]
            if opened.watch is not None:
                opened.watch.close(failed=False)
            raise
        totals.recorder_ns += start - entered
        return opened

    def _watch(
        self,
        opened: _OpenPass,
        half: str | None,
        follows_half: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Have an observer watch the pass, and note what there is to say of it beforehand."""
        recording, index = opened.recording, opened.index
        accumulates, top_level = opened.accumulates, opened.top_level
        if recording.timeline.is_recorded:
            if top_level and (accumulates or half == "weight") and recording.settings.records_state:
                self._record_carried(recording, index)
            outputs = argument("tensors", 0, args, kwargs, ())
            first = outputs[0] if len(outputs) else None
            opened.loss = scalar(first, recording)
            if recording.flight is not None:
                recording.flight.saw_loss(opened.loss)
            call = EngineCall(
                opened.serial,
                index,
                accumulates,
                bool(argument("create_graph", 3, args, kwargs, False)),
                half,
                follows_half,
                opened.stage_index,
                opened.gradient_ready,
                self._is_alone,
            )
            opened.watch = self._observer_of(recording).watch(recording, outputs, call)
            opened.device_began = recording.device_times.begin(first)

    def _observer_of(self, recording: Recording) -> PythonObserver:
        if recording.native is None:
            return self._observer
        if self._native is None:
            self._native = NativeObserver(self.guard, self._open)
        return self._native

    def end(
        self, opened: _OpenPass, error: BaseException | None, outputs: Sequence[Any] = ()
    ) -> None:
        """The pass is over."""
        recording = opened.recording
        timeline = recording.timeline
        end = timeline.now()
        self._local.open_passes.pop()
        self._open.pop(opened.serial, None)
        try:
            with unasked():
                self._close(opened, error, end, outputs)
            timeline.totals.recorder_ns += timeline.now() - end
        except Exception as ours:
            self.guard.failed(ours)

    def _close(
        self, opened: _OpenPass, error: BaseException | None, end: int, outputs: Sequence[Any]
    ) -> None:
        recording = opened.recording
        timeline = recording.timeline
        before = opened.place_before
        after: Place = (AFTER_BACKWARD, *opened.place)
        place = before if before[0] in INSIDE else after
        opened.device_ns = recording.device_times.end(opened.device_began)
        recording.journal.move(_get_ident(), end, place)
        watch = opened.watch
        failed = watch.close(failed=error is not None) if watch is not None else None
        self._sources.pass_ends(recording, opened, failed=error is not None)
        if error is not None and recording.flight is not None:
            recording.flight.failed(error)
        if watch is not None and failed is not None:
            # Behind the rows of its buckets: a pass that has a row has all of them.
            self._write(opened, watch, end, failed, error, outputs)
        if opened.top_level:
            timeline.totals.backward_ns += end - opened.start_ns
            timeline.passes += error is None
            if opened.accumulates and error is None:
                timeline.backward_done()

    def _is_alone(self) -> bool:
        own = threading.get_ident()
        return all(opened.thread == own for opened in list(self._open.values()))

    def _index_of_task(self, task: int) -> int | None:
        """The pass that the calling thread runs a Node of, though it was begun on another: a device's thread, or one
        of the pool that takes over where nested passes get deep."""
        for opened in list(self._open.values()):
            if opened.watch is not None and opened.watch.task == task:
                return opened.index
        return None

    def _write(
        self,
        opened: _OpenPass,
        watch: PassWatch,
        end: int,
        failed: Culprit,
        error: BaseException | None,
        outputs: Sequence[Any],
    ) -> None:
        recording = opened.recording
        if error is not None:
            recording.rows.failure(
                opened.index,
                opened.microbatch,
                opened.stage_index,
                *failed,
                type(error).__name__,
                str(error),
                "".join(traceback.format_exception(error)),
                end,
                watch.culprit,
                self._change(recording, watch, str(error), outputs),
            )
        recording.rows.backward_pass(
            opened.index,
            opened.microbatch,
            opened.parent,
            "backward" if opened.accumulates else "grad",
            watch.root_node_name,
            opened.loss,
            watch.node_count,
            watch.unattributed_count,
            opened.start_ns,
            end,
            None if error is None else f"{type(error).__name__}: {str(error)[:400]}",
            opened.ddp_sync,
            opened.device_ns,
        )

    def _change(
        self, recording: Recording, watch: PassWatch, text: str, outputs: Sequence[Any]
    ) -> Change | None:
        """Who changed what the failed Node had saved, if that is why it failed."""
        culprit = watch.culprit
        if culprit is None or "modified by an inplace operation" not in text:
            return None
        if culprit.number < 0 or not recording.attribution.is_of_one_thread:
            return None  # sequence numbers of several threads do not compare
        name = recording.journal.texts[culprit.name]
        nodes = nodes_numbered(culprit.number, name, [n for n in map(node_of, outputs) if n])
        if len(nodes) != 1:
            return None
        return recording.versions.change(nodes[0], culprit.number, culprit.frame, name, text)

    def _record_carried(self, recording: Recording, backward_index: int) -> None:
        """What `.grad` holds when the step's first backward pass begins: usually nothing.

        Not where several threads train: to ask for a `.grad` that another thread's engine is about to set ends the
        process, since the engine sets it without the GIL.
        Source: torch/csrc/autograd/functions/accumulate_grad.h, `AccumulateGrad::accumulateGrad` (2.13).
        """
        step = recording.timeline.step
        self._pass_threads.add(_get_ident())
        owners = recording.attribution
        ran_on_several = owners.has_several_threads and not owners.is_of_one_thread
        if self._carried_at == step or ran_on_several or len(self._pass_threads) > 1:
            return
        self._carried_at = step
        for root, _ in recording.names.roots():
            tensors = recording.names.tensors_of(root)
            record_gradients(
                recording, "carried", backward_index, recording.timeline.microbatch, tensors
            )


class _OpenPass(Pass):
    """A call into the engine that has not returned."""

    __slots__ = (
        "device_began", "device_ns", "loss", "parent", "place", "place_before", "recording", "serial", "source",
        "stage_index", "start_ns", "thread", "watch",
    )  # fmt: skip

    def __init__(
        self,
        source: EngineSource,
        recording: Recording,
        index: int,
        microbatch: int,
        accumulates: bool,
        top_level: bool,
    ) -> None:
        super().__init__(index, microbatch, accumulates, top_level)
        self.source = source
        self.recording = recording
        self.thread = threading.get_ident()
        self.serial = -1
        self.parent: int | None = None
        self.stage_index: int | None = None
        self.watch: PassWatch | None = None
        self.loss: float | None = None
        self.device_began: Moment | None = None
        self.device_ns = NULL_INT64
        self.start_ns = 0
        self.place_before = NOWHERE
        self.place = NOWHERE[1:]

    def returned(self) -> None:
        """The engine has returned."""
        self.source.end(self, None)

    def raised(self, error: BaseException, outputs: Any) -> BaseException | None:
        """The engine has raised. Gives what the job is to see instead, None for the same."""
        failure = RELAYS.own_failure(error)
        self.source.end(self, failure or error, outputs)
        return failure


never_compiled(EngineSource, _OpenPass)
