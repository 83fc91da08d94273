"""The observer in Python: a prehook and a hook on each Node. It works everywhere, and is the reference.

It attaches when the engine is entered, by a walk of the graph, and lets go when the engine returns. Time and
"it is running" are noted before a Node, summaries after it: torch's own temporary prehooks may replace
gradients after ours has run, and a hook's `grad_outputs` is what the Node really got.
"""

from __future__ import annotations

import functools
import itertools
import resource
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from gradtrace_recorder.attribution import Frame
from gradtrace_recorder.dynamo import never_compiled
from gradtrace_recorder.guard import Guard
from gradtrace_recorder.naming import ParameterName
from gradtrace_recorder.observers.release import release_in_pieces, release_waiting
from gradtrace_recorder.observers.replay import NOT_REPLAYED, NodeReplay, Verdict
from gradtrace_recorder.recording import Recording
from gradtrace_recorder.rows import NODE_EVENTS
from gradtrace_recorder.summaries.handed_on import Gradients, handed_on, memory_address
from gradtrace_recorder.summaries.summariser import Summariser, shape_fields, unasked
from gradtrace_recorder.summaries.values import FINGERPRINT, NOTHING, Packed, as_bytes, combined
from gradtrace_schemas.journal import KINDS, NULL_BOOL, NULL_INT32, NULL_INT64, NULL_STRING

_NODE_TENSORS = KINDS["node_tensors"]
_NO_SEQUENCE_NUMBER = 2**64 - 1
_graph_task = torch._C._current_graph_task_id
_get_sequence_nr = torch._C._autograd._get_sequence_nr
_get_ident = threading.get_ident
_clock = time.monotonic_ns

# event_index, node_name, root, module_fqn and call_index of the Node in which a pass failed, if it was in one.
Culprit = tuple[int | None, int, int, int, int]
GradientReady = Callable[[torch.Tensor, int], None]

# Stands for the call of a Node that no module made, or whose module cannot be told.
_NO_MODULE = Frame(NULL_INT32, "", NULL_STRING, NULL_INT32, None, True)


class PythonObserver:
    """Attaches watches. Called on the thread that enters the engine."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def watch(
        self,
        recording: Recording,
        roots: Sequence[Any],
        *,
        backward_index: int,
        accumulates: bool,
        half: str | None,
        stage_index: int | None,
        gradient_ready: GradientReady | None,
    ) -> PassWatch:
        """Watch every Node that can be reached from `roots`, until the watch is closed.

        `half` is that of a pipeline stage's split backward: `input`, `weight`, None for no half.
        `gradient_ready` is called with each parameter when its gradient was accumulated, and the time.
        """
        watch = PassWatch(
            recording, self._guard, backward_index, accumulates, half, stage_index, gradient_ready
        )
        if recording.settings.records("params"):
            watch.attach(roots)
        return watch


class PassWatch:
    """One backward pass under watch: its Nodes' hooks, the order in which they ran, what is running."""

    def __init__(
        self,
        recording: Recording,
        guard: Guard,
        backward_index: int,
        accumulates: bool,
        half: str | None,
        stage_index: int | None,
        gradient_ready: GradientReady | None,
    ) -> None:
        timeline, journal = recording.timeline, recording.journal
        self.recording = recording
        self.guard = guard
        self.gradient_ready = gradient_ready
        self.backward_index = backward_index
        self.step = timeline.step
        self.microbatch = timeline.microbatch
        self.phase = journal.string(half or ("backward" if accumulates else "grad"))
        self.accumulates = accumulates
        self.stage_index = NULL_INT32 if stage_index is None else stage_index
        self.half = half
        self.half_done: set[int] | None = None
        if half is not None and recording.attribution.is_of_one_thread:
            self.half_done = recording.half_done.numbers(self.step)
        self.ok = journal.string("ok")
        self.failed = journal.string("failed")
        self.incoming = journal.string("grad_output")
        self.outgoing = journal.string("grad_input")
        self.zero_ns = timeline.zero_ns
        self.totals = timeline.totals
        self.append = journal.append
        self.flight = recording.flight
        self.push_running = journal.push_running
        self.pop_running = journal.pop_running
        self.node_count = 0
        self.unattributed_count = 0
        self.indexes = itertools.count()
        self.task: int | None = None
        self.running: dict[int, NodeHooks] = {}
        self.culprit: NodeHooks | None = None  # what was running when the pass failed
        chosen = recording.settings.replay
        self._replay = chosen if chosen is not None and self.step in chosen.steps else None
        self._handles: list[RemovableHandle] = []
        self._stand_ins: dict[int, ParameterName] = {}
        # As long as the graph holds them too: one pass.
        self._hooked_leaves: list[torch.Tensor] = []

    def attach(self, roots: Sequence[Any]) -> None:
        """Walk the graph (no recursion) and hook its Nodes."""
        try:
            self._attach(roots)
        except BaseException:
            self.close(failed=False)  # an interrupt: nothing of ours stays on a Node or a parameter
            raise

    def _attach(self, roots: Sequence[Any]) -> None:
        recording = self.recording
        whole = recording.settings.records("nodes")
        if self.half == "weight" and not whole and not self.accumulates:
            return  # one of many passes of a weight half: nothing here is to be watched, and the graph is large
        release_waiting()
        done = self.half_done if self.half == "weight" and len(set(roots)) == 1 else None
        nodes, leaves = _reachable(roots, done or ())
        is_long = len(nodes) > _most_in_a_row()
        self.node_count = len(nodes) + len(leaves)
        self._stand_ins = recording.names.stand_ins()
        for leaf, number in leaves if self.accumulates else ():  # autograd.grad never runs them
            self._attach_leaf(leaf, number, whole)
        if is_long:
            nodes.sort(key=_first, reverse=True)
            release_in_pieces(nodes)
        if not whole:
            return
        recording.attribution.mark_running()
        occurrences: dict[tuple[int, int], int] = {}
        string = recording.journal.string
        owner = recording.attribution.owner
        nodes.sort(key=_first)
        for number, node in nodes:
            frame, known = owner(number, node)
            if not known:
                self.unattributed_count += 1
            name = string(node.name().rpartition("::")[2])
            key = (id(frame), name)
            occurrence = occurrences.get(key, 0)
            occurrences[key] = occurrence + 1
            if frame is not None:
                if frame.root_call is not None:
                    frame.root_call.used = True
                if not frame.wanted:
                    continue
            elif recording.settings.modules:
                continue
            hooks = NodeHooks(self, name, number, frame, occurrence)
            hooks.python_defined = isinstance(node, BackwardCFunction)
            if self._replay is not None:
                hooks.replay = self._prepared(node, hooks.frame)
            self._hook(node, hooks)

    def close(self, *, failed: bool) -> Culprit:
        """Let go of all Nodes. Gives the one that was running when the pass failed; its row is written now."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for leaf in self._hooked_leaves:
            if not leaf._post_accumulate_grad_hooks:
                # An empty table left behind would keep hooks of the job from working after a swap of tensors.
                leaf._post_accumulate_grad_hooks = None  # type: ignore[assignment]
        self._hooked_leaves.clear()
        self.recording.summariser.forget()
        culprit: Culprit = (
            None, NULL_STRING, NULL_INT32, NULL_STRING, NULL_INT32,
        )  # fmt: skip
        if failed:
            end = self.recording.timeline.now()
            for index, hooks in sorted(self.running.items()):
                hooks.write(end, self.failed, 0, 0, NOTHING, NOTHING, NULL_BOOL, NOT_REPLAYED)
                if hooks.is_maker:
                    self.recording.attribution.node_failed(hooks.thread)
                self.recording.journal.pop_running(hooks.thread)
                frame = hooks.frame
                self.culprit = hooks
                culprit = (index, hooks.name, frame.root, frame.fqn_number, frame.call_index)
        self.running.clear()
        return culprit

    def _attach_leaf(self, node: Any, used_by: int, whole: bool) -> None:
        """An AccumulateGrad: its parameter's gradient after accumulation, before anybody's hook.

        `used_by` is the number of a Node that leads to it.
        """
        variable = node.variable
        names = self.recording.names
        named = names.tensor(variable)
        if named is None and self.recording.attribution.is_of_one_thread:
            named = names.orphan(variable, used_by)
        # A parameter gathered from its shards has a gradient that is yet to be reduced: its Node alone is named.
        shown = named or self._stand_ins.get(id(variable))
        if shown is not None:
            module_fqn = shown.fqn.rpartition(".")[0]
            if not self.recording.settings.wants_module(module_fqn):
                return
        hooks = NodeHooks(
            self, self.recording.journal.string("AccumulateGrad"), _NO_SEQUENCE_NUMBER, None, 0
        )
        if shown is not None:
            hooks.set_parameter(shown)
        # A leaf may have been frozen after the forward: it takes no hook then.
        is_asked = self.gradient_ready is not None or not self.recording.summariser.off
        if named is not None and variable.requires_grad and is_asked:
            handle = variable.register_post_accumulate_grad_hook(hooks.accumulated)
            table = variable._post_accumulate_grad_hooks
            for key in list(table) if len(table) > 1 else ():
                # The engine calls them in the order in which they came into the table (2.13: `PyDict_Next`).
                if key != handle.id:
                    table[key] = table.pop(key)
            self._handles.append(handle)
            self._hooked_leaves.append(variable)
        if whole:
            if self._replay is not None:
                hooks.replay = self._prepared(node, hooks.frame, is_leaf=True)
            self._hook(node, hooks)

    def _prepared(self, node: Any, frame: Frame, *, is_leaf: bool = False) -> NodeReplay | None:
        """How to run the Node again, None where it is not to be."""
        assert self._replay is not None
        fqn = None if frame is _NO_MODULE else frame.fqn
        name = node.name().rpartition("::")[2]
        if not self._replay.chooses(fqn, name):
            return None
        by_request = self._replay.chooses_by_request(fqn, name)
        return self.recording.replays.prepared(node, by_request=by_request, is_leaf=is_leaf)

    def _hook(self, node: Any, hooks: NodeHooks) -> None:
        self._handles.append(node.register_prehook(hooks.before))
        handle = node.register_hook(hooks.after)
        self._handles.append(handle)
        if hooks.replay is not None:
            # Hooks run in the order in which they were registered; another pair of ours changes nothing.
            before = itertools.takewhile(
                lambda e: e[0] != handle.id, handle.hooks_dict_ref().items()
            )
            hooks.replay.is_first = all(
                isinstance(getattr(hook, "__self__", None), NodeHooks) for _, hook in before
            )


class NodeHooks:
    """The pair of hooks on one Node in one pass. Keeps names and numbers, never the Node or a tensor.

    The engine calls them on whichever thread runs the Node. A Node that another pass runs meanwhile (a nested
    one, over a shared graph) is left to that pass's own pair, told by the engine's task.
    """

    __slots__ = (
        "came_in",
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
        self, watch: PassWatch, name: int, number: int, frame: Frame | None, occurrence: int
    ) -> None:
        self.watch = watch
        self.name = name
        self.number = NULL_INT64 if number == _NO_SEQUENCE_NUMBER else number
        self.frame = frame or _NO_MODULE
        self.makes_nodes = frame is not None
        self.is_maker = False
        self.occurrence = occurrence
        self.parameter: ParameterName | None = None
        self.parameter_fqn = NULL_STRING
        self.python_defined = False
        self.replay: NodeReplay | None = None
        self.mutable_before: Packed | None = None
        self.local: tuple[tuple[int, ...], int, Packed] | None = None
        self.came_in: list[tuple[torch.dtype, torch.Size] | None] | None = None
        self.index = -1
        self.start = self.thread = self.own_ns = 0

    def set_parameter(self, named: ParameterName) -> None:
        """The Node accumulates this parameter: it is named by it, not by an interval."""
        string = self.watch.recording.journal.string
        self.parameter = named
        self.parameter_fqn = string(named.fqn)
        holder = named.fqn.rpartition(".")[0]
        self.frame = Frame(named.root, holder, string(holder), NULL_INT32, None, True)

    def before(self, grad_outputs: Gradients) -> None:
        """The engine is about to run the Node."""
        watch = self.watch
        if not watch.guard.is_open:
            return
        try:
            task = _graph_task()
            if task != watch.task:
                if watch.task is not None:
                    return
                watch.task = task
            self.index = index = next(watch.indexes)
            watch.running[index] = self
            self.thread = _get_ident()
            frame = self.frame
            self.came_in = [None if g is None else (g.dtype, g.shape) for g in grad_outputs]
            if self.python_defined:
                with unasked():
                    self.mutable_before = _all_of(watch.recording.summariser, grad_outputs)
            if self.replay is not None:
                self.replay.before(grad_outputs, watch.totals.engine_calls)
            if (self.python_defined or torch.is_grad_enabled()) and self.makes_nodes:
                # Reentrant checkpointing switches gradients on inside; create_graph has them on.
                watch.recording.attribution.node_begins(_get_sequence_nr(), frame)
                self.is_maker = True
            self.start = _clock() - watch.zero_ns
            watch.push_running(
                self.thread,
                self.name,
                frame.fqn_number,
                frame.root,
                frame.call_index,
                watch.step,
                watch.microbatch,
                watch.backward_index,
                index,
                watch.phase,
                self.parameter_fqn,
                self.number,
                self.start,
                watch.stage_index,
            )
        except Exception as error:
            watch.guard.failed(error)

    def after(self, grad_inputs: Gradients, grad_outputs: Gradients) -> None:
        """The Node has run: `grad_outputs` is what it got, `grad_inputs` what it gave."""
        watch = self.watch
        if not watch.guard.is_open or self.index not in watch.running:
            return
        try:
            if _graph_task() != watch.task:
                return
            end = _clock() - watch.zero_ns
            del watch.running[self.index]
            self.came_in = None
            if watch.half == "input" and watch.half_done is not None:
                watch.half_done.add(self.number)
            watch.pop_running(self.thread)
            with unasked():
                if self.is_maker:
                    self._end_making(grad_inputs, grad_outputs)
                # What the hook after accumulation took is ours, not the Node's.
                self._record(end - self.own_ns, grad_inputs, grad_outputs)
            self.own_ns = 0
            watch.totals.recorder_ns += _clock() - watch.zero_ns - end
        except Exception as error:
            watch.guard.failed(error)

    def _end_making(self, grad_inputs: Gradients, grad_outputs: Gradients) -> None:
        """What is made from here on is made by whatever ran before this Node."""
        self.is_maker = False
        attribution, number = self.watch.recording.attribution, _get_sequence_nr()
        began = attribution.node_ends(number)
        if began is not None and attribution.must_tag:
            made = [gradient for gradient in grad_inputs if gradient is not None]
            attribution.tag(made, began, number, [g for g in grad_outputs if g is not None])

    def accumulated(self, parameter: torch.Tensor) -> None:
        """The parameter's gradient was accumulated, and no other hook has seen it."""
        watch = self.watch
        if not watch.guard.is_open or self.parameter is None:
            return
        try:
            if _graph_task() == watch.task:
                with unasked():
                    self._record_local(parameter, self.parameter)
        except Exception as error:
            watch.guard.failed(error)

    def _record_local(self, parameter: torch.Tensor, named: ParameterName) -> None:
        watch = self.watch
        gradient = parameter.grad
        if gradient is None:
            return
        recording = watch.recording
        entered = recording.timeline.now()
        if watch.gradient_ready is not None:
            watch.gradient_ready(parameter, entered)
        if recording.summariser.off:
            return
        summary = recording.summariser.of(gradient)
        if summary is not None and type(gradient) is torch.Tensor:
            self.local = (gradient.stride(), memory_address(gradient), summary)
        recording.rows.gradient(
            named, "local", watch.backward_index, watch.microbatch, gradient, summary
        )
        self.own_ns = recording.timeline.now() - entered
        recording.timeline.totals.recorder_ns += self.own_ns

    def write(
        self,
        end: int,
        outcome: int,
        came: int,
        went: int,
        grad_output: Packed,
        grad_input: Packed,
        mutated: int,
        replayed: Verdict,
    ) -> None:
        """The Node's row."""
        watch, frame = self.watch, self.frame
        if watch.flight is not None:
            watch.flight.saw(grad_output)
            watch.flight.saw(grad_input)
        watch.append(
            NODE_EVENTS,
            watch.step,
            watch.microbatch,
            watch.backward_index,
            self.index,
            self.number,
            self.name,
            frame.root,
            frame.fqn_number,
            frame.call_index,
            self.occurrence,
            self.parameter_fqn,
            watch.phase,
            watch.stage_index,
            self.thread,
            self.start,
            end,
            came,
            went,
            outcome,
            mutated,
            *replayed,
            as_bytes(grad_output),
            as_bytes(grad_input),
        )

    def _record(self, end: int, grad_inputs: Gradients, grad_outputs: Gradients) -> None:
        summariser = self.watch.recording.summariser
        came, went = _present(grad_outputs), _present(grad_inputs)
        if summariser.off:
            replayed = self._run_again(grad_inputs, grad_outputs, NULL_BOOL)
            self.write(end, self.watch.ok, came, went, NOTHING, NOTHING, NULL_BOOL, replayed)
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
        grad_output, grad_input = combined(incoming), combined(outgoing)
        mutated = NULL_BOOL
        if self.mutable_before is not None:
            mutated = int(self.mutable_before[FINGERPRINT] != grad_output[FINGERPRINT])
            self.mutable_before = None
        replayed = self._run_again(grad_inputs, grad_outputs, mutated)
        self.write(end, self.watch.ok, came, went, grad_output, grad_input, mutated, replayed)
        if came > 1:
            self._record_each(self.watch.incoming, grad_outputs, incoming)
        if went > 1:
            self._record_each(self.watch.outgoing, grad_inputs, outgoing)

    def _run_again(self, grad_inputs: Gradients, grad_outputs: Gradients, mutated: int) -> Verdict:
        """Whether the Node gives the same once more, where that was asked for."""
        if self.replay is None:
            return NOT_REPLAYED
        calls = self.watch.totals.engine_calls
        return self.replay.again(grad_inputs, grad_outputs, calls, mutated=mutated == 1)

    def _record_each(
        self, direction: int, gradients: Gradients, summaries: list[Packed | None]
    ) -> None:
        watch = self.watch
        for position, gradient in enumerate(gradients):
            if gradient is not None:
                watch.recording.journal.append(
                    _NODE_TENSORS,
                    watch.step,
                    watch.microbatch,
                    watch.backward_index,
                    self.index,
                    direction,
                    position,
                    *shape_fields(gradient),
                    as_bytes(summaries[position]),
                )


def _reachable(
    roots: Sequence[Any], beyond: Collection[int] = ()
) -> tuple[list[tuple[int, Any]], list[tuple[Any, int]]]:
    """(Nodes with their sequence numbers, AccumulateGrad Nodes with that of one that leads there) from the roots.

    Numbers in `beyond` are of Nodes that will not run, unless they are roots: the walk ends there. A single root of a
    weight half leads to its parameters past Nodes that no input half ran; else those would be roots as well.
    """
    seen = set(roots)
    waiting = [(node, 0) for node in seen]
    nodes: list[tuple[int, Any]] = []
    leaves: list[tuple[Any, int]] = []
    while waiting:
        node, used_by = waiting.pop()
        number = node._sequence_nr()
        if number in beyond and node not in roots:
            continue
        if number == _NO_SEQUENCE_NUMBER and hasattr(node, "variable"):
            leaves.append((node, used_by))
            continue
        nodes.append((number, node))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append((following, number))
    return nodes, leaves


def nodes_numbered(number: int, name: str, roots: Sequence[Any]) -> list[Any]:
    """The Nodes of that sequence number and name that can be reached from the roots."""
    nodes, _ = _reachable(roots)
    return [n for at, n in nodes if at == number and n.name().rpartition("::")[2] == name]


def _first(entry: tuple[int, Any]) -> int:
    return entry[0]


@functools.cache
def _most_in_a_row() -> int:
    """Nodes that are freed safely even in one chain: 2,000 for each MiB of stack (one took about 210 bytes)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_STACK)
    stack = 8 << 20 if limit == resource.RLIM_INFINITY else limit
    return max(1000, 2000 * (stack >> 20))


def _present(gradients: Gradients) -> int:
    count = 0
    for gradient in gradients:
        if gradient is not None:
            count += 1
    return count


def _all_of(summariser: Summariser, gradients: Gradients) -> Packed | None:
    if summariser.off:
        return None
    return combined([None if g is None else summariser.of_gradient(g) for g in gradients])


never_compiled(PythonObserver, PassWatch, NodeHooks)
