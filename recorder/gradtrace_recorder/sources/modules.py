"""Calls of modules: their intervals, their times, what went in and what came out."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import torch
from torch import nn

from gradtrace_recorder.guard import Guard
from gradtrace_recorder.journal.writer import INSIDE, NOWHERE, Place
from gradtrace_recorder.recording.recording import Gate, Left, Recording
from gradtrace_recorder.recording.replay import RUNNING
from gradtrace_recorder.recording.snapshots import (
    record_parameters_before,
    rng_fingerprint,
)
from gradtrace_recorder.sources.calls import Call, OpenCalls, OwnHooksDone
from gradtrace_recorder.sources.groups import Groups
from gradtrace_recorder.sources.inputs import Inputs
from gradtrace_recorder.sources.source import Source, Sources
from gradtrace_recorder.state.attribution import Frame, RootCall
from gradtrace_recorder.state.naming import ModuleName, holds_parameters, unwrapped
from gradtrace_recorder.state.passes import Pass
from gradtrace_recorder.summaries.nested import named_tensors
from gradtrace_recorder.summaries.values import Packed
from gradtrace_recorder.torch_internals.autograd import inside_backward, sequence_nr
from gradtrace_recorder.torch_internals.dry_runs import is_dry_run
from gradtrace_recorder.torch_internals.dynamo import never_compiled
from gradtrace_recorder.torch_internals.frames import is_of_a_compiler
from gradtrace_recorder.torch_internals.modes import unasked
from gradtrace_recorder.torch_internals.standing import TOLD, no_module_runs
from gradtrace_schemas.journal import AFTER_MODULE, IN_MODULE, NULL_INT32

_clock = time.monotonic_ns
_get_ident = threading.get_ident


class ModuleSource(Source):
    """Told by the global forward hooks: two calls for each module call, nothing for each operation.

    Source of the hooks' order and of `always_call`: torch/nn/modules/module.py, `_call_impl`.
    """

    # A call that it knew when it failed would name whatever is made from then on, unless a pass ended that.
    hears_when_closed = True

    def __init__(self, gate: Gate, guard: Guard, sources: Sources) -> None:
        super().__init__(gate, guard)
        self._sources = sources
        self._groups = Groups()
        self._local = OpenCalls()
        self._calls: dict[tuple[int, int, str, int], int] = {}
        self._calls_at: tuple[int, int | None] = (-1, -1)
        self._parameters_at: dict[int, int] = {}
        self._inputs = Inputs()
        self._phases: dict[str, int] = {}

    def attach(self) -> None:
        """Be told of calls."""
        TOLD.module_called, TOLD.module_left = self.before, self._after
        TOLD.modules_resumed = self._resumed

    def detach(self) -> None:
        """Be told no more."""
        for call in self._local.stack:
            call.forget()
        self.guard.is_open = False

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module is about to be called."""
        if not self.guard.is_open or RUNNING.now:
            return
        try:
            with unasked():
                recording = self._gate.recording or self._gate.enter()
                if recording is not None:
                    self._enter(recording, module, args)
        except Exception as error:
            self.guard.failed(error)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
        # Of a call that raised the output is `...`.
        if not self.guard.is_open or RUNNING.now:
            return
        recording = self._gate.recording
        if recording is None:
            return
        try:
            stack = self._local.stack
            call = self._innermost(stack, module)
            if call is None:
                return
            call.end_ns = _clock() - recording.timeline.zero_ns
            has_raised = output is ...
            if not has_raised and call.last_hook is not None:
                return  # the module's own hooks come now, and may replace the output
            with unasked():
                if not has_raised:
                    self._leave(recording, stack, call, args, kwargs, output)
                    self._exit(recording, stack, call, kwargs, output)
                else:
                    self._leave(recording, stack, call)
                    if call.phase == self._phase(recording, "recompute"):
                        # Ended early: what the backward pass needs is there. Its time was taken all the same.
                        self._exit(recording, stack, call, {}, None)
        except Exception as error:
            self.guard.failed(error)

    def _resumed(self) -> None:
        """A call is over that was lost: what is made from here on belongs to the call around it."""
        recording = self._gate.recording
        if self.guard.is_open and recording is not None and torch.is_grad_enabled():
            stack = self._local.stack
            recording.attribution.mark(sequence_nr(), stack[-1].frame if stack else None)

    def _own_hooks_done(
        self, module: nn.Module, call: Call, args: Any, kwargs: Any, output: Any
    ) -> None:
        """The module's own hooks have run after this call; called for other live calls of it too."""
        recording = self._gate.recording
        if not self.guard.is_open or recording is None:
            return
        try:
            stack = self._local.stack
            if call is self._innermost(stack, module):
                with unasked():
                    self._leave(recording, stack, call, args, kwargs, output)
                    self._exit(recording, stack, call, kwargs, output)
        except Exception as error:
            self.guard.failed(error)

    def _enter(self, recording: Recording, module: nn.Module, args: tuple[Any, ...]) -> None:
        timeline = recording.timeline
        entered = _clock()
        stack = self._local.stack
        native = recording.native
        # Asked here of the native library, which looks at one frame after the other: none of ours more than must be.
        if stack and (native is None or not native.library.calls_run(2)):
            self._forget_abandoned(recording, entering=True)
        if not stack and is_dry_run():
            return
        name = recording.names.module(module)
        if name is None:
            if is_of_a_compiler(unwrapped(module)):
                return
            around = stack[-1].name if stack else None
            name = recording.names.adopt(module, around.root if around is not None else None)
        if name.fqn_number < 0:
            name.fqn_number = recording.journal.string(name.fqn)
            name.class_number = recording.journal.string(name.class_name)
            name.wanted = recording.settings.wants_module(name.fqn)
        call = Call(id(module), name)
        grad_mode = torch.is_grad_enabled()
        root_call: RootCall | None = None
        outer: Frame | None = None
        if stack:
            last = stack[-1]
            around = last.name
            is_inner = (
                around is not None
                and around.wraps
                and (around.root, around.fqn) == (name.root, name.fqn)
            )
            last.saw_inner |= is_inner
            call.depth = last.depth + (not is_inner)
            outer = last.frame
            root_call = outer.root_call if outer is not None else None
        else:
            root_call = self._enter_root(recording, module, name, grad_mode)
            call.place_before = recording.journal.place_of(_get_ident())
        if not timeline.is_recorded:
            stack.append(call)
            self._move(recording, call, name, timeline.now(), NULL_INT32)
            return
        in_backward = inside_backward()
        phase = "recompute" if in_backward else "forward" if grad_mode else "no_grad"
        call.microbatch = timeline.microbatch
        call.phase = self._phase(recording, phase)
        index = self._call_index(recording, name, call.phase)
        call.frame = frame = Frame(
            name.root, name.fqn, name.fqn_number, index, root_call, name.wanted, timeline.step, call.microbatch,
            call.phase, outer,
        )  # fmt: skip
        if grad_mode:
            call.began = began = sequence_nr()
            recording.attribution.mark(began, frame)
            recording.versions.went_in(began, frame, args)
        if name.wraps and grad_mode:
            self._sources.wrapper_called(recording, module)
        if not stack and not in_backward:
            self._inputs.record(recording, module, name, index, args)
        summariser = recording.summariser
        if not summariser.off and (self._is_row(recording, name) or name.is_compiled):
            call.inputs = summariser.of_all(args)
        if module._forward_hooks:
            # A hook of the job's on the module may replace its output: see what the last of them leaves.
            hook = OwnHooksDone(self._own_hooks_done, call)
            # Unbound: a class of the job's may have a method of that name, and a scripted module has none.
            call.last_hook = nn.Module.register_forward_hook(module, hook, with_kwargs=True)
        stack.append(call)
        now = _clock()
        call.start_ns = start = now - timeline.zero_ns
        self._move(recording, call, name, start, index)
        timeline.totals.recorder_ns += now - entered

    def _move(
        self, recording: Recording, call: Call, name: ModuleName, at_ns: int, call_index: int
    ) -> None:
        """The thread is in this call now."""
        timeline = recording.timeline
        call.place = place = (
            name.fqn_number, name.root, call_index, timeline.step, timeline.microbatch, NULL_INT32,
        )  # fmt: skip
        call.inside = inside = (IN_MODULE, *place)
        recording.journal.move(_get_ident(), at_ns, inside)

    def pass_begins(self, recording: Recording, begun: Pass) -> None:
        """No call of a module runs around a pass, unless that is inside another."""
        if begun.top_level:
            self._forget_abandoned(recording)

    def _forget_abandoned(self, recording: Recording, *, entering: bool = False) -> None:
        """An exception that no hook saw may have left calls behind: what was made since is nobody's.

        `entering` says that a module is just being called.
        """
        native = recording.native
        library = None if native is None else native.library
        if self._local.forget_abandoned(entering=entering, library=library):
            no_module_runs()
            recording.attribution.lost(sequence_nr())
            recording.journal.move(_get_ident(), recording.timeline.now(), NOWHERE)

    def _innermost(self, stack: list[Call], module: nn.Module) -> Call | None:
        """The innermost call of this module, None for one entered before we were attached."""
        if stack and stack[-1].module_id == id(module):
            return stack[-1]
        for call in reversed(stack):
            if call.module_id == id(module):
                return call
        return None

    def _leave(
        self, recording: Recording, stack: list[Call], call: Call, args: Any = (), *rest: Any
    ) -> None:
        """The call is over, and so is any inside it whose exit no hook saw. `rest` is its kwargs and output."""
        while True:
            left = stack.pop()
            if left.last_hook is not None:
                left.forget()
            if left is call:
                break
        place: Place
        if stack:
            place = stack[-1].inside
        elif call.place_before[0] in INSIDE:
            place = call.place_before
        else:
            place = (AFTER_MODULE, *call.place)
        recording.journal.move(_get_ident(), call.end_ns, place)
        if not rest:
            error, known = id(sys.exc_info()[1]), recording.left
            inside = call.inside
            if known is not None and known.error_id == error:
                inside = known.inside
            recording.left = Left(error, inside, place)
        if call.frame is not None and torch.is_grad_enabled():
            outer = stack[-1].frame if stack else None
            attribution, number = recording.attribution, sequence_nr()
            attribution.mark(number, outer)
            if rest:
                recording.versions.came_out(number, call.frame, args, (rest[1],))
            if rest and not stack and attribution.must_tag:
                came, went = named_tensors([args, rest[0]]), named_tensors(rest[1])
                attribution.tag((t for _, t in went), call.began, number, (t for _, t in came))

    def _exit(
        self,
        recording: Recording,
        stack: list[Call],
        call: Call,
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        timeline = recording.timeline
        end = call.end_ns
        frame, name = call.frame, call.name
        if frame is None or name is None:
            return
        if self._is_row(recording, name) or self._stands_alone(recording, call):
            is_off = recording.summariser.off
            recording.rows.module_call(
                call.microbatch,
                name.root,
                name.fqn_number,
                call.phase,
                frame.call_index,
                name.class_number,
                call.depth,
                call.start_ns,
                end,
                None if is_off else self._with_kwargs(recording, call.inputs, kwargs),
                None if is_off else recording.summariser.of_all(output),
            )
        if not stack and not inside_backward():
            self._inputs.record_named(recording, name, frame.call_index, kwargs)
            if frame.root_call is not None:
                timeline.totals.forward_ns += end - call.start_ns
                if not any(t.requires_grad for _, t in named_tensors(output)):
                    frame.root_call.used = True  # nothing that a backward pass could start from
        timeline.totals.recorder_ns += _clock() - timeline.zero_ns - end

    def _enter_root(
        self, recording: Recording, module: nn.Module, name: ModuleName, grad_mode: bool
    ) -> RootCall | None:
        """What a call from outside any module begins: perhaps a step; the root's parameters once in it."""
        timeline = recording.timeline
        trains = grad_mode and not inside_backward() and holds_parameters(module)
        if not trains:
            if timeline.is_first:
                recording.counter.read_early()
            return None
        if timeline.is_by_parameters:
            recording.updates.root_called(name.root)
        timeline.activity()
        self._sources.root_called(recording, module)
        root_call = RootCall()
        timeline.totals.root_calls.append(root_call)
        if not timeline.is_recorded:
            return root_call
        self._groups.write(recording)
        if timeline.totals.rng_fingerprint is None:
            timeline.totals.rng_fingerprint = rng_fingerprint(recording)
        if recording.settings.records_state and self._parameters_at.get(name.root) != timeline.step:
            self._parameters_at[name.root] = timeline.step
            record_parameters_before(recording, name.root)
        return root_call

    def _with_kwargs(
        self, recording: Recording, inputs: Packed | None, kwargs: dict[str, Any]
    ) -> Packed | None:
        if not kwargs or recording.summariser.off or not named_tensors(kwargs):
            return inputs
        return recording.summariser.combined([inputs, recording.summariser.of_all(kwargs)])

    def _stands_alone(self, recording: Recording, call: Call) -> bool:
        """Whether a compiled module ran without the call of what it wraps: then its call is that call."""
        name, frame = call.name, call.frame
        if name is None or frame is None or not name.is_compiled or call.saw_inner:
            return False
        self._calls[call.microbatch, name.root, name.fqn, call.phase] = frame.call_index + 1
        return name.wanted and recording.settings.records_modules

    def _is_row(self, recording: Recording, name: ModuleName) -> bool:
        return not name.wraps and name.wanted and recording.settings.records_modules

    def _call_index(self, recording: Recording, name: ModuleName, phase: int) -> int:
        timeline = recording.timeline
        # A schedule comes back to a microbatch that it has left.
        at = (timeline.step, None if timeline.microbatch_given else timeline.microbatch)
        if at != self._calls_at:
            self._calls_at = at
            self._calls.clear()
        key = (timeline.microbatch, name.root, name.fqn, phase)
        index = self._calls.get(key, 0)
        if not name.wraps:  # a wrapper's call is the call of what it wraps
            self._calls[key] = index + 1
        return index

    def _phase(self, recording: Recording, phase: str) -> int:
        number = self._phases.get(phase)
        if number is None:
            number = self._phases[phase] = recording.journal.string(phase)
        return number


never_compiled(ModuleSource)
