"""The Python side of the native observer: which passes it takes, and the names of what it hooks.

The walk, the hooks and their rows are in C++. What is not, is done by the Python observer, wholly: a pass beside
another, or inside one of which it is not known what it does; and in a pass that is taken the parameters whose gradient
some hook is told of. Each is counted by reason.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from gradtrace_recorder.guard import Guard
from gradtrace_recorder.observers.native.asked import foreign, makers
from gradtrace_recorder.observers.native.journal import NativeJournal
from gradtrace_recorder.observers.node_hooks import NO_SEQUENCE_NUMBER, NodeHooks
from gradtrace_recorder.observers.pass_context import EngineCall
from gradtrace_recorder.observers.python import (
    Culprit,
    PassWatch,
    PythonObserver,
    node_of,
)
from gradtrace_recorder.recording.native_library import Native
from gradtrace_recorder.recording.recording import Recording
from gradtrace_recorder.state.attribution import Frame
from gradtrace_recorder.state.naming import ParameterName
from gradtrace_recorder.summaries.device.backends import BACKENDS
from gradtrace_recorder.summaries.values import NOTHING, as_bytes
from gradtrace_recorder.torch_internals.dynamo import never_compiled
from gradtrace_recorder.torch_internals.release import release_waiting
from gradtrace_schemas import TABLES
from gradtrace_schemas.journal import (
    KINDS,
    NULL_BOOL,
    NULL_FLOAT,
    NULL_INT32,
    NULL_INT64,
    NULL_STRING,
    RECORD_BYTES,
    record_dtype,
)

# Then the engine has threads of its own, which run Nodes of any pass.
_HAS_DEVICES = hasattr(torch, "accelerator") and torch.accelerator.is_available()
# A leaf's names: root, its module's and its own as numbers of strings, the frame that stands for its module.
_Leaf = tuple[int, int, int, Frame]


class HookFailed(RuntimeError):
    """A hook in C++ failed; the text is what it said."""


class OpenPass(Protocol):
    """A call into the engine that has not returned; its watch, once there is one."""

    watch: PassWatch | None


class NativeObserver(PythonObserver):
    """Attaches watches. `open_passes` holds every call into the engine that has not returned, by serial."""

    def __init__(self, guard: Guard, open_passes: Mapping[int, OpenPass]) -> None:
        super().__init__(guard)
        self._open = open_passes
        self._waiting: list[Any] = []
        self._of: tuple[Recording, _Shared] | None = None
        self._records_nodes = False

    def watch(self, recording: Recording, outputs: Sequence[Any], call: EngineCall) -> PassWatch:
        """Watch every Node that can be reached from what the engine is given: in C++ where that can be."""
        if self._of is None or self._of[0] is not recording:
            native = recording.native
            assert native is not None
            self._of = (recording, _Shared(recording, native))
            self._records_nodes = recording.settings.records("nodes")
        shared = self._of[1]
        reason = self._why_python(recording, outputs)
        outer = self._outer(recording, call) if reason is None else None
        if outer is not None and recording.attribution.has_several_threads:
            reason = "modules on several threads"
        elif outer is not None:
            if self._waiting and not outer:
                self.release_waiting((call.serial,))
            watch = NativePassWatch(self, shared, recording, self._guard, call, outer)
            if watch.attach_apart(outputs):
                return watch
        reason = reason or "inside or beside another pass"
        shared.native.python_passes[reason] += 1
        return super().watch(recording, outputs, call)

    def put_on(self, watched: Any, own: tuple[int, ...]) -> bool:
        """Put the hooks on, unless another pass runs than these: the engine reads a Node's hooks unlocked."""
        done: bool = watched.put_on(self._open, own)
        return done

    def let_go(self, watched: Any, own: tuple[int, ...]) -> None:
        """Take the hooks off, or wait with that while another pass runs than these."""
        if not watched.release(self._open, own):
            self._waiting.append(watched)
        if not self._open:
            self.release_waiting(())

    def release_waiting(self, own: tuple[int, ...]) -> None:
        """Take off what waits, unless another pass runs than these."""
        waiting, self._waiting = self._waiting, []
        self._waiting += [one for one in waiting if not one.release(self._open, own)]

    def _outer(self, recording: Recording, call: EngineCall) -> Sequence[NativePassWatch] | None:
        """The passes that this one runs inside. None where others run, or where threads of a device may run Nodes
        of these meanwhile."""
        if len(self._open) == 1:
            return ()  # the pass itself
        found: list[NativePassWatch] = []
        thread = threading.get_ident()
        for serial, opened in list(self._open.items()):
            watch = opened.watch
            if serial == call.serial:
                continue
            if not isinstance(watch, NativePassWatch):
                return None
            if watch.began_on != thread or watch.context.recording is not recording:
                return None
            found.append(watch)
        return None if found and _HAS_DEVICES else found

    def _why_python(self, recording: Recording, outputs: Sequence[Any]) -> str | None:
        """Why this pass is left to Python, None where it is not."""
        if not self._records_nodes:
            return "Nodes are not recorded"
        summariser = recording.summariser
        if summariser.uses_devices or (not summariser.off and any(map(_begins_on_device, outputs))):
            return "summaries are made on a device"
        if recording.device_times.of_nodes:
            return "Nodes are timed on a device"
        return None


def _begins_on_device(output: Any) -> bool:
    """Whether what a graph ends with lies on a device, of which no tensor may have been summarised yet."""
    if isinstance(output, torch.Tensor):
        return output.device.type in BACKENDS
    return any(
        about.device.type in BACKENDS for about in getattr(node_of(output), "_input_metadata", ())
    )


class _Shared:
    """What the passes of one recording share."""

    def __init__(self, recording: Recording, native: Native) -> None:
        journal = recording.journal
        assert isinstance(journal, NativeJournal)
        self.native = native
        self.accumulate = journal.string("AccumulateGrad")
        self._recording = recording
        string = journal.string
        names = tuple(string(n) for n in ("float64", "float32", "float16", "bfloat16"))
        nothing = as_bytes(NOTHING)
        null = (NULL_BOOL, NULL_BOOL, NULL_FLOAT)
        node = _record(
            "node_events",
            device_ns=NULL_INT64, outcome=string("ok"), grad_output_mutated=null[0], replay_equal=null[1],
            replay_error=null[2],
            grad_output_summary=nothing, grad_input_summary=nothing,
        )  # fmt: skip
        tensor = _record("node_tensors", summary=nothing)
        gradient = _record("gradients", point=string("local"), summary=nothing)
        self._settings = native.library.Settings(
            journal.core,
            recording.timeline.zero_ns,
            (node, tensor, gradient),
            recording.settings.summary,
            (*names, string("grad_output"), string("grad_input")),
            foreign(recording.summariser),
            makers(recording.attribution),
        )

    def begin(self, watch: NativePassWatch) -> Any:
        """The library's half of a pass."""
        at = watch.rows
        return self.native.library.Pass(
            self._settings, at.step, at.microbatch, at.backward_index, at.phase, at.stage_index
        )

    def leaf(self, named: ParameterName) -> _Leaf:
        """The numbers that name a parameter's Node."""
        string = self._recording.journal.string
        holder = named.fqn.rpartition(".")[0]
        frame = Frame(named.root, holder, string(holder), NULL_INT32, None, True)
        return named.root, string(holder), string(named.fqn), frame


class NativePassWatch(PassWatch):
    """One backward pass, watched in C++; what is left to Python shares its counters."""

    __slots__ = (
        "_is_released", "_left", "_makes_graph", "_native", "_observer", "_outer", "_own", "_shared", "began_on",
        "serial",
    )  # fmt: skip

    def __init__(
        self,
        observer: NativeObserver,
        shared: _Shared,
        recording: Recording,
        guard: Guard,
        call: EngineCall,
        outer: Sequence[NativePassWatch],
    ) -> None:
        self.serial = call.serial
        self.began_on = threading.get_ident()
        self._outer = outer
        self._native: Any = None
        super().__init__(recording, guard, call)
        self._observer = observer
        self._shared = shared
        self._native = shared.begin(self)
        self.indexes = self._native
        self._is_released = False
        self._makes_graph = call.create_graph
        self._own: tuple[int, ...] = (call.serial, *(one.serial for one in outer))
        self._left: list[str] = []

    def attach_apart(self, outputs: Sequence[Any]) -> bool:
        """Attach, unless another pass may be reading hooks that would be changed: one on another thread, or one that
        this one runs inside, of which it is not known which Node that runs, or it is one of this pass too."""
        release_waiting()
        done = None
        if (
            self.context.call.follows_half
            and len({node for node in map(node_of, outputs) if node}) == 1
        ):
            done = self.context.half_done or None
        self.node_count, self.root_node_name = self._native.walk(
            outputs, node_of, self.context.recording.journal.string, done
        )
        is_watching = False
        try:
            if all(self._native.is_apart_from(outer._native) for outer in self._outer):
                self.attach(outputs)
                is_watching = self._observer.put_on(self._native, self._own)
        finally:
            if not is_watching:  # an interrupt, too: nothing of ours stays on a Node or a parameter
                self.close(failed=False)
        if is_watching:
            self._shared.native.python_nodes.update(self._left)
        return is_watching

    @property
    def task(self) -> int | None:
        """The engine's task, once a Node of the pass has run."""
        task: int | None = self._native.task
        return task

    @task.setter
    def task(self, task: int | None) -> None:
        if self._native is not None:
            self._native.task = task

    def close(self, *, failed: bool) -> Culprit:
        """Let go of all Nodes. Gives the one that was running when the pass failed; its row is written now."""
        running, own_ns, late_hooks, error = self._native.close()
        half_done = self.context.half_done
        if half_done is not None and self.context.call.half == "input":
            half_done.update(self._native.ended())
        for (
            index,
            name,
            number,
            frame,
            occurrence,
            parameter,
            start,
            thread,
            making,
            came_in,
        ) in running:
            hooks = NodeHooks(
                self, name, NO_SEQUENCE_NUMBER if number == NULL_INT64 else number, frame, occurrence
            )  # fmt: skip
            hooks.index, hooks.start, hooks.thread = index, start, thread
            hooks.parameter_fqn = parameter
            hooks.is_maker = making
            hooks.came_in = [c and (c[0], torch.Size(c[1])) for c in came_in]
            self.running[index] = hooks
        culprit = super().close(failed=failed)
        if not self._is_released:
            self._is_released = True
            if not failed or self.context.recording.names.device is None:
                self._observer.let_go(self._native, self._own)
            # Else they stay on, and do nothing: a device's thread may still read hooks of the Node that it was running
            # when another one failed.
            self.context.totals.recorder_ns += own_ns
            if late_hooks:
                reason = "a hook on a parameter came while the pass ran"
                self.context.recording.summariser.unsummarised[reason] += late_hooks
            if error is not None:
                self.context.guard.failed(HookFailed(error))
        return culprit

    def _attach(self, roots: Sequence[Any]) -> None:
        """`roots` are what the engine is given."""
        recording, native, shared = self.context.recording, self._native, self._shared
        names = recording.names
        if names.sharded:
            self._stand_ins = names.stand_ins()
        only_named = bool(recording.settings.modules)
        if self.context.call.accumulates:  # autograd.grad never runs them
            all_left = only_named or self.context.call.gradient_ready is not None
            places = None if all_left else names.places
            for which, variable, used_by in native.attach_leaves(
                places, names.places_given, shared.leaf, shared.accumulate, recording.summariser.off
            ):
                self._attach_native_leaf(which, variable, used_by)
        recording.attribution.mark_running()
        self.unattributed_count, self.may_begin_with_leaf = native.attach(
            *recording.attribution.boundaries(),
            recording.journal.string,
            only_named,
            self._makes_graph,
        )

    def _attach_native_leaf(self, which: int, variable: torch.Tensor, used_by: int) -> None:
        recording, native = self.context.recording, self._native
        names = recording.names
        named = names.tensor(variable)
        if named is None and recording.attribution.is_of_one_thread:
            named = names.orphan(variable, used_by)
        shown = named or (self._stand_ins.get(id(variable)) if self._stand_ins else None)
        reason = None
        if named is not None and self.context.call.gradient_ready is not None:
            reason = "a reducer waits for the gradient"
        else:
            root, holder, own, frame = NULL_INT32, NULL_STRING, NULL_STRING, None
            if shown is not None:
                root, holder, own, frame = self._shared.leaf(shown)
                if not recording.settings.wants_module(frame.fqn):
                    return
            is_local = named is not None and not recording.summariser.off and variable.requires_grad
            accumulate = self._shared.accumulate
            if not native.attach_leaf(which, accumulate, root, holder, own, frame, is_local):
                reason = "a hook sees the gradient first"
        if reason is not None:
            self._attach_leaf(native.leaf(which), used_by, True)
            self._left.append(reason)


def _record(table: str, **fields: Any) -> bytes:
    """A record of the table with its kind and these fields, and zeros elsewhere."""
    import numpy as np

    dtype = record_dtype(TABLES[table])
    record = np.zeros((), dtype)
    record["record_kind"] = KINDS[table]
    for name, value in fields.items():
        if isinstance(value, bytes):
            record[name] = np.frombuffer(value, dtype[name])[0]
        else:
            record[name] = value
    return record.tobytes().ljust(RECORD_BYTES, b"\0")


never_compiled(NativeObserver, NativePassWatch, _Shared)
