"""The observer in Python: a prehook and a hook on each Node. It works everywhere, and is the reference.

It attaches when the engine is entered, by a walk of the graph, and lets go when the engine returns.
"""

from __future__ import annotations

import functools
import itertools
import resource
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from gradtrace_recorder.guard import Guard
from gradtrace_recorder.observers.node_hooks import (
    NO_MODULE,
    NO_SEQUENCE_NUMBER,
    NodeHooks,
    RunningPass,
)
from gradtrace_recorder.observers.pass_context import EngineCall, PassContext
from gradtrace_recorder.recording.recording import Recording
from gradtrace_recorder.recording.replay import NOT_REPLAYED, NodeReplay
from gradtrace_recorder.state.attribution import Frame
from gradtrace_recorder.state.naming import ParameterName
from gradtrace_recorder.summaries.values import NOTHING
from gradtrace_recorder.torch_internals.autograd import FUNCTION_NODE
from gradtrace_recorder.torch_internals.dynamo import never_compiled
from gradtrace_recorder.torch_internals.leaf_tables import hook_first, take_off
from gradtrace_recorder.torch_internals.release import release_in_pieces, release_waiting
from gradtrace_recorder.torch_internals.tensors import is_functorch_wrapped
from gradtrace_schemas.journal import NULL_BOOL, NULL_INT32, NULL_STRING

# event_index, node_name, root, module_fqn and call_index of the Node in which a pass failed, if it was in one.
Culprit = tuple[int | None, int, int, int, int]


class PythonObserver:
    """Attaches watches. Called on the thread that enters the engine."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def watch(self, recording: Recording, outputs: Sequence[Any], call: EngineCall) -> PassWatch:
        """Watch every Node that can be reached from what the engine is given, until the watch is closed."""
        watch = PassWatch(recording, self._guard, call)
        roots = [node_of(output) for output in outputs]
        if roots and roots[0] is not None:
            watch.root_node_name = node_name(roots[0])
        if recording.settings.records("params"):
            watch.attach([root for root in roots if root is not None])
        return watch


class PassWatch(RunningPass):
    """One backward pass under watch: puts hooks on its Nodes, and takes them off.

    `culprit` is what was running when it failed.
    """

    __slots__ = (
        "_handles", "_hooked_leaves", "_replay", "_stand_ins", "culprit", "node_count", "root_node_name",
        "unattributed_count",
    )  # fmt: skip

    def __init__(self, recording: Recording, guard: Guard, call: EngineCall) -> None:
        super().__init__(PassContext.of(recording, guard, call))
        self.root_node_name: str | None = None
        self.node_count = 0
        self.unattributed_count = 0
        self.culprit: NodeHooks | None = None
        chosen = recording.settings.replay
        self._replay = chosen if chosen is not None and self.rows.step in chosen.steps else None
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
        recording, call = self.context.recording, self.context.call
        whole = recording.settings.records("nodes")
        if call.half == "weight" and not whole and not call.accumulates:
            return  # one of many passes of a weight half: nothing here is to be watched, and the graph is large
        release_waiting()
        done = self.context.half_done if call.follows_half and len(set(roots)) == 1 else None
        nodes, leaves = _reachable(roots, done or ())
        is_long = len(nodes) > _most_in_a_row()
        self.node_count = len(nodes) + len(leaves)
        self._stand_ins = recording.names.stand_ins()
        self.may_begin_with_leaf = not whole
        for leaf, number in leaves if call.accumulates else ():  # autograd.grad never runs them
            self._attach_leaf(leaf, number, whole)
        if is_long:
            nodes.sort(key=_first, reverse=True)
            release_in_pieces(nodes)
        if not whole:
            return
        # Where some modules are not wanted, their Nodes may come first.
        self.may_begin_with_leaf = bool(recording.settings.modules) or not nodes
        recording.attribution.mark_running()
        occurrences: dict[tuple[int, int], int] = {}
        string = recording.journal.string
        owner = recording.attribution.owner
        nodes.sort(key=_first)
        for number, node in nodes:
            frame, known = owner(number, node)
            if not known:
                self.unattributed_count += 1
            name = string(node_name(node))
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
            hooks.python_defined = isinstance(node, FUNCTION_NODE)
            if self._replay is not None:
                hooks.replay = self._prepared(node, hooks.frame)
            self._hook(node, hooks)

    def close(self, *, failed: bool) -> Culprit:
        """Let go of all Nodes. Gives the one that was running when the pass failed; its row is written now."""
        recording, rows = self.context.recording, self.rows
        take_off(self._handles, self._hooked_leaves, self.context.call.is_alone)
        self._handles.clear()
        self._hooked_leaves.clear()
        recording.summariser.forget()
        culprit: Culprit = (
            None, NULL_STRING, NULL_INT32, NULL_STRING, NULL_INT32,
        )  # fmt: skip
        if failed:
            end = recording.timeline.now()
            for index, hooks in sorted(self.running.items()):
                recording.device_times.forget(hooks.device_began)
                rows.node(hooks, end, rows.failed, 0, 0, NOTHING, NOTHING, NULL_BOOL, NOT_REPLAYED)
                if hooks.is_maker:
                    recording.attribution.node_failed(hooks.thread)
                rows.ends(hooks.thread)
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
        recording = self.context.recording
        names = recording.names
        named = names.tensor(variable)
        if named is None and recording.attribution.is_of_one_thread:
            named = names.orphan(variable, used_by)
        # A parameter gathered from its shards has a gradient that is yet to be reduced: its Node alone is named.
        shown = named or self._stand_ins.get(id(variable))
        if shown is not None:
            module_fqn = shown.fqn.rpartition(".")[0]
            if not recording.settings.wants_module(module_fqn):
                return
        hooks = NodeHooks(
            self, recording.journal.string("AccumulateGrad"), NO_SEQUENCE_NUMBER, None, 0
        )
        if shown is not None:
            hooks.set_parameter(shown)
        # A leaf may have been frozen after the forward: it takes no hook then.
        is_asked = self.context.call.gradient_ready is not None or not recording.summariser.off
        if named is not None and variable.requires_grad and is_asked:
            self._handles.append(hook_first(variable, hooks.accumulated))
            self._hooked_leaves.append(variable)
        if whole:
            if self._replay is not None:
                hooks.replay = self._prepared(node, hooks.frame, is_leaf=True)
            self._hook(node, hooks)

    def _prepared(self, node: Any, frame: Frame, *, is_leaf: bool = False) -> NodeReplay | None:
        """How to run the Node again, None where it is not to be."""
        assert self._replay is not None
        fqn = None if frame is NO_MODULE else frame.fqn
        name = node_name(node)
        if not self._replay.chooses(fqn, name):
            return None
        by_request = self._replay.chooses_by_request(fqn, name)
        return self.context.recording.replays.prepared(node, by_request=by_request, is_leaf=is_leaf)

    def _hook(self, node: Any, hooks: NodeHooks) -> None:
        kind = type(node)
        self._handles.append(kind.register_prehook(node, hooks.before))
        handle = kind.register_hook(node, hooks.after)
        self._handles.append(handle)
        if hooks.replay is not None:
            # Hooks run in the order in which they were registered; another pair of ours changes nothing.
            before = itertools.takewhile(
                lambda e: e[0] != handle.id, handle.hooks_dict_ref().items()
            )
            hooks.replay.is_first = all(
                isinstance(getattr(hook, "__self__", None), NodeHooks) for _, hook in before
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
        number = type(node)._sequence_nr(node)
        if number in beyond and node not in roots:
            continue
        if number == NO_SEQUENCE_NUMBER and hasattr(node, "variable"):
            leaves.append((node, used_by))
            continue
        nodes.append((number, node))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append((following, number))
    return nodes, leaves


def node_of(output: Any) -> Any:
    """The Node that a tensor, or a GradientEdge, starts from, None for none."""
    if not isinstance(output, torch.Tensor):
        return getattr(output, "node", None)
    if is_functorch_wrapped(output):
        return None
    return output.grad_fn


def node_name(node: Any) -> str:
    """Such as `MmBackward0`. Asked of the Node's class, as all of a Node's methods are: one of a Function defined in
    Python is its `ctx` too, on which the job may have put what it likes."""
    name: str = type(node).name(node)
    return name.rpartition("::")[2]


def nodes_numbered(number: int, name: str, roots: Sequence[Any]) -> list[Any]:
    """The Nodes of that sequence number and name that can be reached from the roots."""
    nodes, _ = _reachable(roots)
    return [n for at, n in nodes if at == number and node_name(n) == name]


def _first(entry: tuple[int, Any]) -> int:
    return entry[0]


@functools.cache
def _most_in_a_row() -> int:
    """Nodes that are freed safely even in one chain: 2,000 for each MiB of stack (one took about 210 bytes)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_STACK)
    stack = 8 << 20 if limit == resource.RLIM_INFINITY else limit
    return max(1000, 2000 * (stack >> 20))


never_compiled(PythonObserver, PassWatch)
