"""DDP: its buckets, as their relays see them, and whether a backward pass was to reduce at all."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec

import torch
from torch import nn

from gradtrace_recorder.guard import Guard
from gradtrace_recorder.recording.recording import Gate, Recording
from gradtrace_recorder.recording.snapshots import record_gradients
from gradtrace_recorder.sources.ddp_modules import (
    KnownDdp,
    OpenBucket,
    layout_of,
    result_of,
    why_unobserved,
)
from gradtrace_recorder.sources.groups import collective_seq, write_reducing_module
from gradtrace_recorder.sources.source import Source
from gradtrace_recorder.state.passes import Pass
from gradtrace_recorder.summaries.device.backends import is_on_device
from gradtrace_recorder.torch_internals.autograd import inside_backward
from gradtrace_recorder.torch_internals.relays import RELAYS, Relay, hook_name

P = ParamSpec("P")


def _guarded(
    method: Callable[Concatenate[DdpSource, P], None],
) -> Callable[Concatenate[DdpSource, P], None]:
    """For what relays tell: our failure ends this source's recording, and the reduction goes on."""

    @functools.wraps(method)
    def call(self: DdpSource, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.guard.is_open:
            try:
                method(self, *args, **kwargs)
            except Exception as error:
                self.guard.failed(error)

    return call


class DdpSource(Source):
    """Gives DDP modules their relays and writes a row for each bucket.

    Launches come on autograd threads (or, as shadows, on the job's), ends of reductions on threads of the process
    group; all hold the GIL. Rows are written when the backward pass has returned, in the order of launch.
    """

    def __init__(self, gate: Gate, guard: Guard) -> None:
        super().__init__(gate, guard)
        self._known: weakref.WeakKeyDictionary[Any, KnownDdp] = weakref.WeakKeyDictionary()
        self._open: list[OpenBucket] = []
        self._ready: dict[int, int] = {}
        self._backward_index = 0

    def attach(self) -> None:
        """See buckets from now on."""
        RELAYS.attach()
        RELAYS.observer = self

    def recording_ends(self, recording: Recording) -> None:
        """Write the rows of buckets that are open."""
        self._settle(recording)

    def detach(self) -> None:
        """See no more."""
        self.guard.is_open = False
        if RELAYS.observer is self:
            RELAYS.detach()

    # What the other sources see.

    def root_called(self, recording: Recording, root: nn.Module) -> None:
        """DDP modules that were made since the last root was called get their relays."""
        if len(RELAYS.ddps) != len(self._known):
            for ddp in list(RELAYS.ddps):
                self._about(ddp)
        for about in self._known.values():
            if about.state is None and id(root) in about.inner_ids:
                about.state = "bypassed"

    def wrapper_called(self, recording: Recording, wrapper: nn.Module) -> None:
        """The reducer of a DDP module prepares unless `no_sync` is on.

        Source: torch/nn/parallel/distributed.py, `_pre_forward`.
        """
        from torch.nn.parallel import DistributedDataParallel

        if isinstance(wrapper, DistributedDataParallel):
            about = self._about(wrapper)
            about.state = "sync" if wrapper.require_backward_grad_sync else "no_sync"

    def pass_begins(self, recording: Recording, begun: Pass) -> None:
        """Where there is any DDP module, times of gradients matter."""
        if not self._known:
            return
        begun.gradient_ready = self._gradient_ready
        if begun.may_reduce:
            self._settle(recording)
            self._backward_index = begun.index
            self._ready.clear()

    def pass_ends(self, recording: Recording, ended: Pass, *, failed: bool) -> None:
        """Rows of its buckets, and of the gradients they left."""
        if not ended.may_reduce or not self._known:
            return
        ended.ddp_sync = self._sync_of_pass()
        if recording.timeline.is_recorded and recording.settings.records_state:
            self._write_reduced(recording, ended, failed=failed)

    def _gradient_ready(self, parameter: torch.Tensor, at_ns: int) -> None:
        """A parameter's gradient was accumulated. On an autograd thread."""
        self._ready[id(parameter)] = at_ns

    def _sync_of_pass(self) -> str | None:
        """How the DDP models that the pass went through were called."""
        states = {self._state(about) for about in self._touched()}
        return next((s for s in ("sync", "no_sync", "bypassed") if s in states), None)

    def _write_reduced(self, recording: Recording, ended: Pass, *, failed: bool) -> None:
        launched = {key for bucket in self._open for key in bucket.parameter_ids}
        states = [(about, self._state(about)) for about in self._touched()]
        self._settle(recording)
        waiting: set[int] = set()
        for about, state in states:
            if state == "sync":
                waiting |= (
                    about.parameter_ids if about.unobserved else about.parameter_ids & launched
                )
            about.state = None
            self._write_group(recording, about)
        if failed or not waiting:
            return
        for root, _ in recording.names.roots():
            chosen = [
                (name, tensor)
                for name, tensor in recording.names.tensors_of(root)
                if id(tensor) in waiting
            ]
            record_gradients(recording, "reduced", ended.index, ended.microbatch, chosen)

    # What the relays tell.

    def launched(self, relay: Relay, bucket: Any) -> OpenBucket | None:
        """A bucket's hook is about to run."""
        recording = self._gate.recording
        if recording is None or not self.guard.is_open:
            return None
        try:
            if recording.timeline.is_recorded and recording.settings.records_state:
                return self._launched(recording, relay, bucket)
        except Exception as error:
            self.guard.failed(error)
        return None

    @_guarded
    def reducing(self, opened: OpenBucket, future: Any) -> None:
        """Its hook has returned a future."""
        recording, relay = self._gate.recording, opened.relay
        if recording is None:
            return
        opened.fields["divisor"] = relay.divisor if relay.is_free else None
        ddp = relay.ddp
        if ddp is not None:
            opened.fields["collective_seq"] = collective_seq(ddp.process_group)
        # What is no future is refused by DDP in its own words. A device's is done when the reduction is queued.
        if isinstance(future, torch._C.Future) and opened.is_on_cpu:
            opened.future = future
            if not relay.is_free:
                future.add_done_callback(lambda _: self.done(opened))
        elif isinstance(future, torch._C.Future) and opened.device_began is not None:
            # Called in streams that wait for the reduction: the event is over when it is.
            future.add_done_callback(lambda _: self.done_on_device(opened))
        opened.held = recording.rows.hold_bucket(*opened.place, **opened.fields)

    def done(self, opened: OpenBucket) -> None:
        """Its reduction is done."""
        recording = self._gate.recording
        if recording is not None:
            opened.done_ns = recording.timeline.now()

    @_guarded
    def done_on_device(self, opened: OpenBucket) -> None:
        """The device has been given its reduction."""
        recording, began = self._gate.recording, opened.device_began
        opened.device_began = None
        if recording is not None and began is not None:
            opened.device_ns = recording.device_times.end(began)

    def _launched(self, recording: Recording, relay: Relay, bucket: Any) -> OpenBucket:
        timeline = recording.timeline
        entered = timeline.now()
        is_shadow = not inside_backward()
        if is_shadow:
            self._settle(recording, only_done=True)  # a rank that has joined runs no pass
        parameters = bucket.parameters()
        ids = tuple(map(id, parameters))
        about = self._about(relay.ddp) if relay.ddp is not None else None
        buffer = bucket.buffer()
        index = bucket.index()
        opened = OpenBucket(relay, ids, is_on_cpu=not is_on_device(buffer))
        opened.place = (timeline.step, timeline.microbatch, self._backward_index)
        ready = [self._ready[key] for key in ids if key in self._ready]
        root, module_fqn = self._place(recording, about, parameters)
        opened.fields = {
            "bucket_index": index,
            "is_last": bucket.is_last(),
            "hook_name": relay.hook_name,
            "group": about.group if about is not None else None,
            "parameter_fqns": [n and n.fqn for n in map(recording.names.tensor, parameters)],
            "size_bytes": buffer.numel() * buffer.element_size(),
            "ready_ns": min(ready) if ready and not is_shadow else None,
            "root": root,
            "module_fqn": module_fqn,
            "kind": "shadow" if is_shadow else "all_reduce",
            "layout_index": None if about is None else layout_of(about, index, ids),
            "numel": buffer.numel(),
            "dtype": str(buffer.dtype).removeprefix("torch."),
            "divisor": None,
            "collective_seq": None,
            "before": recording.summariser.of(buffer),
        }
        self._open.append(opened)
        if not opened.is_on_cpu:
            opened.device_began = recording.device_times.begin(buffer)
        opened.fields["launched_ns"] = launched = timeline.now()
        timeline.totals.recorder_ns += launched - entered
        return opened

    def _settle(self, recording: Recording, *, only_done: bool = False) -> None:
        """Rows of what was launched so far, in order; with `only_done` up to the first that is not done."""
        while self._open:
            bucket = self._open[0]
            if only_done and bucket.done_ns is None:
                break
            del self._open[0]
            after, done_ns = None, None
            result = result_of(bucket.future)
            if result is not None:
                # A callback that notes the time may run a moment after the reducer has stopped waiting.
                done_ns = bucket.done_ns or recording.timeline.now()
                after = recording.summariser.of(result)
            began, bucket.device_began = bucket.device_began, None
            recording.device_times.forget(began)
            recording.rows.bucket(
                bucket.held,
                *bucket.place,
                **bucket.fields,
                done_ns=done_ns,
                after=after,
                device_ns=bucket.device_ns,
            )

    def _about(self, ddp: Any) -> KnownDdp:
        """What is known of a DDP module; the first time it is looked at, it gets a relay."""
        about = self._known.get(ddp)
        if about is None:
            about = self._known[ddp] = KnownDdp(ddp)
            RELAYS.ddps.add(ddp)
            about.group = ddp.process_group.group_name
            about.unobserved = why_unobserved(ddp)
            if about.unobserved is None and RELAYS.of(ddp.reducer) is None:
                RELAYS.give(ddp)
        return about

    def _touched(self) -> Iterable[KnownDdp]:
        """The DDP modules of which the pass accumulated a gradient; where that was not watched for, all."""
        every = [about for ddp, about in self._known.items()]
        touched = [about for about in every if about.parameter_ids & self._ready.keys()]
        return touched if self._ready else every

    def _state(self, about: KnownDdp) -> str | None:
        if any(not about.parameter_ids.isdisjoint(bucket.parameter_ids) for bucket in self._open):
            return "sync"  # a pipeline's stage prepares the reducer itself, after a forward under `no_sync`
        ddp = about.module()
        if about.is_called or ddp is None:
            return about.state
        return "sync" if ddp.require_backward_grad_sync else "no_sync"

    def _place(
        self, recording: Recording, about: KnownDdp | None, parameters: list[torch.Tensor]
    ) -> tuple[int | None, str | None]:
        """Root and FQN of what DDP wraps."""
        if about is None:
            return None, None
        if about.place[0] is None:
            ddp = about.module()
            # A wrapper that was never called has no name of its own.
            wrappers = [] if ddp is None else [ddp, ddp.module]
            names = [recording.names.module(m) for m in wrappers]
            name = next((n for n in names if n is not None), None)
            if name is not None:
                about.place = (name.root, name.fqn)
            elif not about.is_called:
                owners = [recording.names.tensor(p) for p in parameters]
                root = next((owner.root for owner in owners if owner is not None), None)
                about.place = (root, None if root is None else "")
        return about.place

    def _write_group(self, recording: Recording, about: KnownDdp) -> None:
        if about.is_written or not recording.timeline.is_recorded:
            return
        ddp = about.module()
        if ddp is None:
            return
        about.is_written = True
        relay = RELAYS.of(ddp.reducer) if hasattr(ddp, "reducer") else None
        root, module_fqn = self._place(recording, about, list(ddp.parameters()))
        name = relay.hook_name if relay is not None else None
        if relay is None and getattr(ddp, "_comm_hooks", None):
            name = hook_name(ddp._comm_hooks[0][0])
        write_reducing_module(
            recording, ddp.process_group, root, module_fqn, name, about.unobserved
        )
