"""The pair of hooks on one Node in one pass: what is noted before the Node runs, and written when it has.

Time and "it is running" are noted before a Node, summaries after it: torch's own temporary prehooks may replace
gradients after ours has run, and a hook's `grad_outputs` is what the Node really got.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import torch

from gradtrace_recorder.observers.node_rows import NodeRows
from gradtrace_recorder.observers.pass_context import PassContext
from gradtrace_recorder.recording.replay import NOT_REPLAYED, NodeReplay, Verdict
from gradtrace_recorder.state.attribution import Frame
from gradtrace_recorder.state.naming import ParameterName
from gradtrace_recorder.summaries.device.times import Moment
from gradtrace_recorder.summaries.handed_on import Gradients, handed_on, memory_address
from gradtrace_recorder.summaries.summariser import Summariser
from gradtrace_recorder.summaries.values import FINGERPRINT, NOTHING, STATE, Packed
from gradtrace_recorder.torch_internals.autograd import graph_task, sequence_nr
from gradtrace_recorder.torch_internals.dynamo import never_compiled
from gradtrace_recorder.torch_internals.modes import unasked
from gradtrace_schemas.journal import NULL_BOOL, NULL_INT32, NULL_INT64, NULL_STRING
from gradtrace_schemas.summary import STATE_PENDING

# What autograd says of a Node without a number: AccumulateGrad.
NO_SEQUENCE_NUMBER = 2**64 - 1
_get_ident = threading.get_ident
_clock = time.monotonic_ns

# Stands for the call of a Node that no module made, or whose module cannot be told.
NO_MODULE = Frame(NULL_INT32, "", NULL_STRING, NULL_INT32, None, True)


class RunningPass:
    """What the hooks of one pass share: its context, its rows, and what of it is under way.

    `task` is the engine's number of the pass, once a Node of it has run; `running` are Nodes that have begun and not
    ended, by index.
    """

    __slots__ = ("context", "indexes", "may_begin_with_leaf", "rows", "running", "task")

    def __init__(self, context: PassContext) -> None:
        self.context = context
        self.rows = NodeRows(context.recording, context.call)
        self.indexes: Iterator[int] = itertools.count()
        self.task: int | None = None
        # Where others that have hooks run before any AccumulateGrad, one that seems the first is run by a pass beside
        # this one, for a parameter of both.
        self.may_begin_with_leaf = False
        self.running: dict[int, NodeHooks] = {}


class NodeHooks:
    """The pair of hooks on one Node in one pass. Keeps names and numbers, never the Node or a tensor.

    The engine calls them on whichever thread runs the Node. A Node that another pass runs meanwhile (a nested
    one, over a shared graph) is left to that pass's own pair, told by the engine's task.
    """

    __slots__ = (
        "came_in",
        "device_began",
        "frame",
        "index",
        "is_maker",
        "local",
        "makes_nodes",
        "mutable_before",
        "name",
        "number",
        "occurrence",
        "own_ns",
        "parameter",
        "parameter_fqn",
        "python_defined",
        "replay",
        "start",
        "thread",
        "watch",
    )

    def __init__(
        self, watch: RunningPass, name: int, number: int, frame: Frame | None, occurrence: int
    ) -> None:
        self.watch = watch
        self.name = name
        self.number = NULL_INT64 if number == NO_SEQUENCE_NUMBER else number
        self.frame = frame or NO_MODULE
        self.makes_nodes = frame is not None
        self.is_maker = False
        self.occurrence = occurrence
        self.parameter: ParameterName | None = None
        self.parameter_fqn = NULL_STRING
        self.python_defined = False
        self.replay: NodeReplay | None = None
        self.mutable_before: Packed | None = None
        self.local: tuple[tuple[int, ...], int, Packed] | None = None
        self.device_began: Moment | None = None
        self.came_in: list[tuple[torch.dtype, torch.Size] | None] | None = None
        self.index = -1
        self.start = self.thread = self.own_ns = 0

    def set_parameter(self, named: ParameterName) -> None:
        """The Node accumulates this parameter: it is named by it, not by an interval."""
        string = self.watch.context.recording.journal.string
        self.parameter = named
        self.parameter_fqn = string(named.fqn)
        holder = named.fqn.rpartition(".")[0]
        self.frame = Frame(named.root, holder, string(holder), NULL_INT32, None, True)

    def before(self, grad_outputs: Gradients) -> None:
        """The engine is about to run the Node."""
        watch = self.watch
        context = watch.context
        if not context.guard.is_open:
            return
        try:
            task = graph_task()
            if task != watch.task:
                if watch.task is not None:
                    return
                if self.number == NULL_INT64 and not watch.may_begin_with_leaf:
                    return
                watch.task = task
            self.index = index = next(watch.indexes)
            watch.running[index] = self
            self.thread = _get_ident()
            self.came_in = [
                # A nested tensor has no sizes to tell (2.13 raises).
                None if g is None or g.is_nested else (g.dtype, g.shape)
                for g in grad_outputs
            ]
            if self.python_defined:
                with unasked():
                    self.mutable_before = _all_of(context.recording.summariser, grad_outputs)
            if self.replay is not None:
                self.replay.before(grad_outputs, context.totals.engine_calls)
            if (self.python_defined or torch.is_grad_enabled()) and self.makes_nodes:
                # Reentrant checkpointing switches gradients on inside; create_graph has them on.
                context.recording.attribution.node_begins(sequence_nr(), self.frame)
                self.is_maker = True
            if context.node_times is not None:
                self.device_began = context.node_times.begin_node()
            self.start = _clock() - context.zero_ns
            watch.rows.begins(self)
        except Exception as error:
            context.guard.failed(error)

    def after(self, grad_inputs: Gradients, grad_outputs: Gradients) -> None:
        """The Node has run: `grad_outputs` is what it got, `grad_inputs` what it gave."""
        watch = self.watch
        context = watch.context
        if not context.guard.is_open or self.index not in watch.running:
            return
        try:
            if graph_task() != watch.task:
                return
            end = _clock() - context.zero_ns
            del watch.running[self.index]
            device_ns = NULL_INT64
            if context.node_times is not None:
                device_ns = context.node_times.end(self.device_began)
                self.device_began = None
            self.came_in = None
            if context.half_done is not None and context.call.half == "input":
                context.half_done.add(self.number)
            watch.rows.ends(self.thread)
            with unasked():
                if self.is_maker:
                    self._end_making(grad_inputs, grad_outputs)
                # What the hook after accumulation took is ours, not the Node's.
                self._record(end - self.own_ns, device_ns, grad_inputs, grad_outputs)
            self.own_ns = 0
            context.totals.recorder_ns += _clock() - context.zero_ns - end
        except Exception as error:
            context.guard.failed(error)

    def _end_making(self, grad_inputs: Gradients, grad_outputs: Gradients) -> None:
        """What is made from here on is made by whatever ran before this Node."""
        self.is_maker = False
        attribution, number = self.watch.context.recording.attribution, sequence_nr()
        began = attribution.node_ends(number)
        if began is not None and attribution.must_tag:
            made = [gradient for gradient in grad_inputs if gradient is not None]
            attribution.tag(made, began, number, [g for g in grad_outputs if g is not None])

    def accumulated(self, parameter: torch.Tensor) -> None:
        """The parameter's gradient was accumulated, and no other hook has seen it."""
        watch = self.watch
        if not watch.context.guard.is_open or self.parameter is None:
            return
        try:
            task = graph_task()
            if watch.task is None and watch.may_begin_with_leaf:
                watch.task = task
            if task == watch.task:
                with unasked():
                    self._record_local(parameter, self.parameter)
        except Exception as error:
            watch.context.guard.failed(error)

    def _record_local(self, parameter: torch.Tensor, named: ParameterName) -> None:
        watch = self.watch
        context, rows = watch.context, watch.rows
        gradient = parameter.grad
        if gradient is None:
            return
        recording = context.recording
        entered = recording.timeline.now()
        if context.call.gradient_ready is not None:
            context.call.gradient_ready(parameter, entered)
        if recording.summariser.off:
            return
        summary = recording.summariser.of(gradient)
        if summary is not None and type(gradient) is torch.Tensor:
            self.local = (gradient.stride(), memory_address(gradient), summary)
        recording.rows.gradient(
            named, "local", rows.backward_index, rows.microbatch, gradient, summary
        )
        self.own_ns = recording.timeline.now() - entered
        recording.timeline.totals.recorder_ns += self.own_ns

    def _record(
        self, end: int, device_ns: int, grad_inputs: Gradients, grad_outputs: Gradients
    ) -> None:
        rows = self.watch.rows
        summariser = self.watch.context.recording.summariser
        came, went = _present(grad_outputs), _present(grad_inputs)
        if summariser.off:
            replayed = self._run_again(grad_inputs, grad_outputs, NULL_BOOL)
            rows.node(
                self, end, rows.ok, came, went, NOTHING, NOTHING, NULL_BOOL, replayed, device_ns
            )
            return
        if self.local is not None and len(grad_outputs) == 1 and grad_outputs[0] is not None:
            strides, address, packed = self.local
            came_in = grad_outputs[
                0
            ]  # the parameter's shape, and where it was not copied its memory
            if memory_address(came_in) == address and came_in.stride() == strides:
                summariser.remember(came_in, packed)
        self.local = None
        summary: Callable[[torch.Tensor], Packed | None] = summariser.of_gradient
        if self.replay is not None and self.mutable_before is not None:
            summary = (
                summariser.of
            )  # a Function may have changed it through other eyes: its version says nothing
        incoming = [None if g is None else summary(g) for g in grad_outputs]
        outgoing = [
            None if g is None else handed_on(summariser, g, grad_outputs, incoming)
            for g in grad_inputs
        ]
        grad_output, grad_input = summariser.combined(incoming), summariser.combined(outgoing)
        mutated = NULL_BOOL
        if self.mutable_before is not None:
            if STATE_PENDING not in (self.mutable_before[STATE], grad_output[STATE]):
                mutated = int(self.mutable_before[FINGERPRINT] != grad_output[FINGERPRINT])
            self.mutable_before = None
        replayed = self._run_again(grad_inputs, grad_outputs, mutated)
        rows.node(
            self, end, rows.ok, came, went, grad_output, grad_input, mutated, replayed, device_ns
        )
        if came > 1:
            rows.tensors(self.index, rows.incoming, grad_outputs, incoming)
        if went > 1:
            rows.tensors(self.index, rows.outgoing, grad_inputs, outgoing)

    def _run_again(self, grad_inputs: Gradients, grad_outputs: Gradients, mutated: int) -> Verdict:
        """Whether the Node gives the same once more, where that was asked for."""
        if self.replay is None:
            return NOT_REPLAYED
        calls = self.watch.context.totals.engine_calls
        return self.replay.again(grad_inputs, grad_outputs, calls, mutated=mutated == 1)


def _present(gradients: Gradients) -> int:
    count = 0
    for gradient in gradients:
        if gradient is not None:
            count += 1
    return count


def _all_of(summariser: Summariser, gradients: Gradients) -> Packed | None:
    if summariser.off:
        return None
    return summariser.combined(
        [None if g is None else summariser.of_gradient(g) for g in gradients]
    )


never_compiled(NodeHooks, RunningPass)
