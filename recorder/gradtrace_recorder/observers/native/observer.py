"""The Python side of the native observer: which passes it takes, and the names of what it hooks.

The walk, the hooks and their rows are in C++. What is not, is done by the Python observer, wholly: a pass beside
another, or inside one of which it is not known what it does; and in a pass that is taken the parameters whose gradient
some hook is told of. Each is counted by reason.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from gradtrace_recorder.attribution import Attribution, Frame
from gradtrace_recorder.dynamo import never_compiled
from gradtrace_recorder.guard import Guard
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
    """Attaches watches. `open_passes` holds every call into the engine that has not returned, by backward_index."""

    def __init__(self, guard: Guard, open_passes: Mapping[int, OpenPass]) -> None:
        super().__init__(guard)
        self._open = open_passes
        self._waiting: list[Any] = []
        # Held while hooks are put on or taken off: a pass of another thread, which asks for it before it runs,
        # does not begin meanwhile, wherever Python lets go of the GIL in between.
        self._changing = threading.RLock()
        self._pid = os.getpid()
        self._several_threads = False  # passes have run at once: from then on Python watches all
        self._of: tuple[Recording, _Shared] | None = None

    def watch(self, recording: Recording, roots: Sequence[Any], call: EngineCall) -> PassWatch:
        """Watch every Node that can be reached from `roots`: in C++ where that can be."""
        with self._changing:
            return self._watch(recording, roots, call)

    def _watch(self, recording: Recording, roots: Sequence[Any], call: EngineCall) -> PassWatch:
        native = recording.native
        assert native is not None
        if self._runs_elsewhere():
            # The engine may be reading the hooks of a parameter's Node, which both passes share, at this moment.
            self._several_threads = True
            lost = "Nodes of a pass that began while one was watched in C++ on another thread"
            recording.summariser.unsummarised[lost] += 1
            return PassWatch(recording, self._guard, call)
        reason = self._why_python(recording, call)
        outer = self._outer(recording, call) if reason is None else None
        if outer is not None:
            if not outer:
                self.release_waiting()
            if self._of is None or self._of[0] is not recording:
                self._of = (recording, _Shared(recording, native))
            watch = NativePassWatch(self, self._of[1], recording, self._guard, call, outer)
            if watch.attach_apart(roots):
                return watch
        native.python_passes[reason or "inside or beside another pass"] += 1
        return super().watch(recording, roots, call)

    def let_go(self, watched: Any, outer: Sequence[PassWatch]) -> None:
        """Take the hooks off, or wait with that while another pass runs than those that this one ran inside: the engine
        reads a Node's hooks unlocked."""
        if os.getpid() != self._pid:
            return  # forked inside a hook: a thread that is not here may have held the lock
        with self._changing:
            if all(opened.watch in outer for opened in list(self._open.values())):
                watched.release()
            else:
                self._waiting.append(watched)
            if not self._open:
                self.release_waiting()

    def release_waiting(self) -> None:
        """Take off what waits. Called while no pass runs, with the GIL held throughout."""
        waiting, self._waiting = self._waiting, []
        for watched in waiting:
            watched.release()

    def _runs_elsewhere(self) -> bool:
        """Whether a pass that is watched in C++ runs on another thread."""
        thread = threading.get_ident()
        passes = [opened.watch for opened in list(self._open.values())]
        return any(isinstance(w, NativePassWatch) and w.began_on != thread for w in passes)

    def _outer(self, recording: Recording, call: EngineCall) -> list[NativePassWatch] | None:
        """The passes that this one runs inside. None where others run, or where threads of a device may run Nodes
        of these meanwhile."""
        found: list[NativePassWatch] = []
        thread = threading.get_ident()
        for index, opened in list(self._open.items()):
            watch = opened.watch
            if index == call.backward_index:
                continue
            if not isinstance(watch, NativePassWatch):
                return None
            if watch.began_on != thread or watch.recording is not recording:
                return None
            found.append(watch)
        return None if found and _HAS_DEVICES else found

    def _why_python(self, recording: Recording, call: EngineCall) -> str | None:
        """Why this pass is left to Python, None where it is not."""
        if self._several_threads:
            return "passes on several threads"
        if not recording.settings.records("nodes"):
            return "Nodes are not recorded"
        if recording.summariser.uses_devices:
            return "summaries are made on a device"
        if recording.device_times.of_nodes:
            return "Nodes are timed on a device"
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
            _makers(recording.attribution),
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


def _foreign(summariser: Summariser) -> Callable[[torch.Tensor], bytes]:
    """What C++ asks about a tensor that it does not read: its shape and summary. It holds no recording: C++ holds it.

    Called in a hook, on any thread.
    """

    def shape_and_summary(tensor: torch.Tensor) -> bytes:
        with unasked():
            return _SHAPE.pack(*shape_fields(tensor)) + as_bytes(summariser.of_gradient(tensor))

    return shape_and_summary


def _makers(
    attribution: Attribution,
) -> tuple[Callable[[int, Frame], None], Callable[[int], None]]:
    """What C++ tells of a Node that may make others: it begins, it ends. They hold no recording either.

    Called in a hook, on the thread that runs the Node.
    """

    def ends(number: int) -> None:
        began = attribution.node_ends(number)
        if began is not None and attribution.must_tag:
            attribution.tag((), began, number, ())  # without their outputs they cannot be told

    return attribution.node_begins, ends


class NativePassWatch(PassWatch):
    """One backward pass, watched in C++; what is left to Python shares its counters."""

    def __init__(
        self,
        observer: NativeObserver,
        shared: _Shared,
        recording: Recording,
        guard: Guard,
        call: EngineCall,
        outer: Sequence[NativePassWatch],
    ) -> None:
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

    def attach_apart(self, roots: Sequence[Any]) -> bool:
        """Attach, unless one of the passes that this one runs inside may be reading hooks that would be changed: it is
        not known which Node that runs, or it is one of this pass too."""
        done = self.half_done if self.follows_half and len(set(roots)) == 1 else None
        self.node_count = self._native.walk(roots, done or None)
        if not all(self._native.is_apart_from(outer._native) for outer in self._outer):
            self.close(failed=False)
            return False
        self.attach(roots)
        return True

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
            self._observer.let_go(self._native, self._outer)
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
        self.unattributed_count, self.may_begin_with_leaf = native.attach(
            numbers, frames, first_known, unknown, recording.journal.string, bool(recording.settings.modules),
            self._makes_graph,
        )  # fmt: skip

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
