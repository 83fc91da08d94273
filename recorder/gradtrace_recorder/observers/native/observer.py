"""The Python side of the native observer: which passes it takes, and the names of what it hooks.

The walk, the hooks and their rows are in C++. What is not, is done by the Python observer, wholly: a pass that makes
Nodes, one inside another, one beside another; and in a pass that is taken the Functions
that are defined in Python, and parameters whose gradient some hook is told of. Each is counted by reason.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence, Sized
from typing import Any

import torch

from gradtrace_recorder.attribution import Frame
from gradtrace_recorder.dynamo import never_compiled
from gradtrace_recorder.guard import Guard, is_of_a_signal_handler
from gradtrace_recorder.naming import ParameterName
from gradtrace_recorder.observers.native.choice import Native
from gradtrace_recorder.observers.native.journal import NativeJournal
from gradtrace_recorder.observers.node_hooks import NO_SEQUENCE_NUMBER, NodeHooks
from gradtrace_recorder.observers.python import (
    Culprit,
    EngineCall,
    PassWatch,
    PythonObserver,
)
from gradtrace_recorder.observers.release import release_waiting
from gradtrace_recorder.recording import Recording
from gradtrace_recorder.rows import NODE_EVENTS
from gradtrace_recorder.summaries.summariser import Summariser, shape_fields, unasked
from gradtrace_recorder.summaries.values import NOTHING, as_bytes
from gradtrace_schemas import TABLES
from gradtrace_schemas.journal import (
    KINDS,
    MAX_DIMENSIONS,
    NULL_BOOL,
    NULL_FLOAT,
    NULL_INT32,
    NULL_INT64,
    NULL_STRING,
    RECORD_BYTES,
    record_dtype,
)

_SHAPE = struct.Struct(f"<B{MAX_DIMENSIONS}q")
_HEAD = struct.Struct("<Hiii")
_PHASE = struct.Struct("<Ii")
# A leaf's names: root, its module's and its own as numbers of strings, the frame that stands for its module.
_Leaf = tuple[int, int, int, Frame]


class HookFailed(RuntimeError):
    """A hook in C++ failed; the text is what it said."""


class NativeObserver(PythonObserver):
    """Attaches watches. `open_passes` holds every call into the engine that has not returned."""

    def __init__(self, guard: Guard, open_passes: Sized) -> None:
        super().__init__(guard)
        self._open = open_passes
        self._waiting: list[Any] = []
        self._of: tuple[Recording, _Shared] | None = None

    def watch(self, recording: Recording, roots: Sequence[Any], call: EngineCall) -> PassWatch:
        """Watch every Node that can be reached from `roots`: in C++ where that can be."""
        native = recording.native
        assert native is not None
        reason = self._why_python(recording, call)
        if reason is not None:
            native.python_passes[reason] += 1
            return super().watch(recording, roots, call)
        self.release_waiting()
        if self._of is None or self._of[0] is not recording:
            self._of = (recording, _Shared(recording, native))
        watch = NativePassWatch(self, self._of[1], recording, self._guard, call)
        watch.attach(roots)
        return watch

    def let_go(self, watched: Any) -> None:
        """Take the hooks off, or wait with that while another pass runs: the engine reads a Node's hooks unlocked."""
        self._waiting.append(watched)
        if not len(self._open):
            self.release_waiting()

    def release_waiting(self) -> None:
        """Take off what waits. Called while no pass runs, with the GIL held throughout."""
        waiting, self._waiting = self._waiting, []
        for watched in waiting:
            watched.release()

    def _why_python(self, recording: Recording, call: EngineCall) -> str | None:
        """Why this pass is left to Python, None where it is not."""
        if not recording.settings.records("nodes"):
            return "Nodes are not recorded"
        if recording.summariser.uses_devices:
            return "summaries are made on a device"
        if recording.device_times.of_nodes:
            return "Nodes are timed on a device"
        if call.create_graph:
            return "create_graph"
        if len(self._open) > 1:
            return "inside or beside another pass"
        if recording.attribution.has_several_threads:
            return "modules on several threads"
        return None


class _Shared:
    """What the passes of one recording share."""

    def __init__(self, recording: Recording, native: Native) -> None:
        journal = recording.journal
        assert isinstance(journal, NativeJournal)
        self.native = native
        self.accumulate = journal.string("AccumulateGrad")
        self._recording = recording
        self._summary = recording.settings.summary
        string = journal.string
        names = tuple(string(n) for n in ("float64", "float32", "float16", "bfloat16"))
        self._settings = native.library.Settings(
            journal.core,
            recording.timeline.zero_ns,
            (NODE_EVENTS, KINDS["node_tensors"], KINDS["gradients"]),
            _offsets(),
            self._summary,
            (*names, string("grad_output"), string("grad_input")),
            _foreign(recording.summariser),
        )
        nothing = as_bytes(NOTHING)
        null = (NULL_BOOL, NULL_BOOL, NULL_FLOAT)
        self._node = _record(
            "node_events",
            device_ns=NULL_INT64, outcome=string("ok"), grad_output_mutated=null[0], replay_equal=null[1],
            replay_error=null[2],
            grad_output_summary=nothing, grad_input_summary=nothing,
        )  # fmt: skip
        self._tensor = _record("node_tensors", summary=nothing)
        self._gradient = _record("gradients", point=string("local"), summary=nothing)
        node = record_dtype(TABLES["node_events"]).fields
        assert node is not None and node["stage_index"][1] == node["phase"][1] + 4
        self._phase_at = node["phase"][1]

    def begin(self, watch: NativePassWatch) -> Any:
        """The library's half of a pass."""
        head = (watch.step, watch.microbatch, watch.backward_index)
        _HEAD.pack_into(self._node, 8, NODE_EVENTS, *head)
        _PHASE.pack_into(self._node, self._phase_at, watch.phase, watch.stage_index)
        tensor = gradient = None
        if self._summary != "off":
            _HEAD.pack_into(self._tensor, 8, KINDS["node_tensors"], *head)
            _HEAD.pack_into(self._gradient, 8, KINDS["gradients"], *head)
            tensor, gradient = bytes(self._tensor), bytes(self._gradient)
        return self.native.library.Pass(
            self._settings, bytes(self._node), tensor, gradient, *head, watch.phase, watch.stage_index
        )  # fmt: skip

    def leaf(self, named: ParameterName) -> _Leaf:
        """The numbers that name a parameter's Node."""
        string = self._recording.journal.string
        holder = named.fqn.rpartition(".")[0]
        frame = Frame(named.root, holder, string(holder), NULL_INT32, None, True)
        return named.root, string(holder), string(named.fqn), frame


def _foreign(summariser: Summariser) -> Callable[[torch.Tensor], bytes | str]:
    """What C++ asks about a tensor that it does not read: its shape and summary. It holds no recording: C++ holds it.

    Called in a hook, on any thread. A failure of ours is given back as its text. What is raised is the job's: Ctrl-C,
    or what its signal handler raises.
    """

    def shape_and_summary(tensor: torch.Tensor) -> bytes | str:
        try:
            with unasked():
                shape = _SHAPE.pack(*shape_fields(tensor))
                return shape + as_bytes(summariser.of_gradient(tensor))
        except Exception as error:
            if is_of_a_signal_handler(error):
                raise
            return f"{type(error).__name__}: {error}"

    return shape_and_summary


class NativePassWatch(PassWatch):
    """One backward pass, watched in C++; what is left to Python shares its counters."""

    def __init__(
        self,
        observer: NativeObserver,
        shared: _Shared,
        recording: Recording,
        guard: Guard,
        call: EngineCall,
    ) -> None:
        self._native: Any = None
        super().__init__(recording, guard, call)
        self._observer = observer
        self._shared = shared
        self._native = shared.begin(self)
        self.indexes = self._native
        self._is_released = False

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
        running = self._native.close()
        if self.half == "input" and self.half_done is not None:
            self.half_done.update(self._native.ended())
        for index, name, number, frame, occurrence, parameter, start, thread, came_in in running:
            hooks = NodeHooks(
                self, name, NO_SEQUENCE_NUMBER if number == NULL_INT64 else number, frame, occurrence
            )  # fmt: skip
            hooks.index, hooks.start, hooks.thread = index, start, thread
            hooks.parameter_fqn = parameter
            hooks.came_in = [c and (c[0], torch.Size(c[1])) for c in came_in]
            self.running[index] = hooks
        culprit = super().close(failed=failed)
        if not self._is_released:
            self._is_released = True
            if not failed or self.recording.names.device is None:
                self._observer.let_go(self._native)
            # Else they stay on, and do nothing: a device's thread may still read hooks of the Node that it was running
            # when another one failed.
            self.totals.recorder_ns += self._native.own_ns
            if self._native.late_hooks:
                reason = "a hook on a parameter came while the pass ran"
                self.recording.summariser.unsummarised[reason] += self._native.late_hooks
            if self._native.error is not None:
                self.guard.failed(HookFailed(self._native.error))
        return culprit

    def _attach(self, roots: Sequence[Any]) -> None:
        recording, native = self.recording, self._native
        release_waiting()
        done = self.half_done if self.follows_half and len(set(roots)) == 1 else None
        self.node_count = native.walk(roots, done or None)
        self._stand_ins = recording.names.stand_ins()
        if self.accumulates:  # autograd.grad never runs them
            all_left = self.gradient_ready is not None or recording.settings.modules
            shared = self._shared
            left = native.attach_leaves(
                None if all_left else recording.names.places,
                shared.leaf,
                shared.accumulate,
                recording.summariser.off,
            )
            for which, variable, used_by in left:
                self._attach_native_leaf(which, variable, used_by)
        recording.attribution.mark_running()
        numbers, frames, first_known, unknown = recording.attribution.boundaries()
        self.unattributed_count, own, self.may_begin_with_leaf = native.attach(
            numbers, frames, first_known, unknown, recording.journal.string, bool(recording.settings.modules)
        )  # fmt: skip
        for node, name, number, frame, occurrence in own:
            hooks = NodeHooks(self, name, number, frame, occurrence)
            hooks.python_defined = True
            self._hook(node, hooks)
        if own:
            self._shared.native.python_nodes["defined in Python"] += len(own)

    def _attach_native_leaf(self, which: int, variable: torch.Tensor, used_by: int) -> None:
        recording, native = self.recording, self._native
        names = recording.names
        named = names.tensor(variable)
        if named is None and recording.attribution.is_of_one_thread:
            named = names.orphan(variable, used_by)
        shown = named or (self._stand_ins.get(id(variable)) if self._stand_ins else None)
        reason = None
        if named is not None and self.gradient_ready is not None:
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
            self._shared.native.python_nodes[reason] += 1


def _record(table: str, **fields: Any) -> bytearray:
    """A record of the table with these fields, and zeros elsewhere."""
    import numpy as np

    dtype = record_dtype(TABLES[table])
    record = np.zeros((), dtype)
    for name, value in fields.items():
        if isinstance(value, bytes):
            record[name] = np.frombuffer(value, dtype[name])[0]
        else:
            record[name] = value
    return bytearray(record.tobytes().ljust(RECORD_BYTES, b"\0"))


def _offsets() -> dict[str, int]:
    """Where the fields lie that hooks fill in."""
    offsets: dict[str, int] = {}
    for table, prefix in (
        ("node_events", ""), ("node_tensors", "node_tensors."), ("gradients", "gradients."),
    ):  # fmt: skip
        fields = record_dtype(TABLES[table]).fields
        assert fields is not None
        offsets |= {prefix + name: field[1] for name, field in fields.items()}
    return offsets


never_compiled(NativeObserver, NativePassWatch, _Shared)
