"""FSDP2 (`fully_shard`): the reduce-scatter of each parameter group, as a bucket.

Seen through the public `set_custom_reduce_scatter`: a subclass of torch's own reduce-scatter that does what it does and
looks at its two tensors. A group with another one of the job's keeps it and is not recorded.
Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (2.13), `foreach_reduce`.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import nn

from gradtrace_recorder.guard import Guard
from gradtrace_recorder.recording.recording import Gate, Recording
from gradtrace_recorder.sources.groups import collective_seq
from gradtrace_recorder.sources.source import Source
from gradtrace_recorder.state.naming import walk
from gradtrace_recorder.state.passes import Pass
from gradtrace_recorder.summaries.device.times import Moment


class FsdpSource(Source):
    """Places itself in every parameter group of a root before its forward. The hooks run on autograd threads.

    There is nothing to attach: parameter groups are met when their root is called.
    """

    def __init__(self, gate: Gate, guard: Guard) -> None:
        super().__init__(gate, guard)
        self._backward_index = 0
        # By identity: a module may be of a class that cannot be hashed.
        self._seen: dict[int, weakref.ref[nn.Module]] = {}
        self._placed: list[tuple[weakref.ref[Any], Any]] = []

    def detach(self) -> None:
        """Give every group its own reduce-scatter back."""
        self.guard.is_open = False
        for ref, original in self._placed:
            group = ref()
            if group is not None and hasattr(group._reduce_scatter_comm, "is_gradtrace"):
                group._reduce_scatter_comm = original
        self._placed = []

    def root_called(self, recording: Recording, root: nn.Module) -> None:
        """A root is called in grad mode: its sharded modules are seen from now on."""
        if "torch.distributed.fsdp._fully_shard._fsdp_param_group" not in sys.modules:
            return
        seen = self._seen.get(id(root))
        if seen is not None and seen() is root:
            return
        if not recording.settings.records_state:
            return
        self._seen[id(root)] = weakref.ref(root)
        index = 0
        for module, _ in walk(root):
            if hasattr(type(module), "_get_fsdp_state"):
                for group in _groups_of(module._get_fsdp_state()):  # type: ignore[operator]
                    if hasattr(group, "_reduce_scatter_comm"):
                        self._place(module, group, index)
                    else:  # torch 2.6
                        recording.problems.add(
                            f"torch {torch.__version__} lets nobody see the reductions of fully_shard: "
                            "they are not recorded"
                        )
                    recording.names.sharded += map(weakref.ref, group.fsdp_params)
                    index += 1

    def pass_begins(self, recording: Recording, begun: Pass) -> None:
        """What is reduced from now on is of this pass."""
        if begun.may_reduce:
            self._backward_index = begun.index

    def _place(self, module: nn.Module, group: Any, index: int) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

        original = group._reduce_scatter_comm
        if type(original) is not DefaultReduceScatter:
            return
        source, owner, of_group = self, weakref.ref(module), weakref.ref(group)

        class SeenReduceScatter(DefaultReduceScatter):
            """Torch's reduce-scatter, seen."""

            is_gradtrace = True

            def __call__(
                self, output_tensor: Any, input_tensor: Any, *args: Any, **kwargs: Any
            ) -> Any:
                opened = source._before(owner(), of_group(), index, input_tensor)
                result = super().__call__(output_tensor, input_tensor, *args, **kwargs)
                if opened is not None:
                    source._after(opened, output_tensor, args[0] if args else kwargs.get("group"))
                return result

        group._reduce_scatter_comm = SeenReduceScatter()
        self._placed.append((of_group, original))

    def _before(self, module: Any, group: Any, index: int, buffer: torch.Tensor) -> Any:
        recording = self._gate.recording
        if recording is None or not self.guard.is_open or module is None or group is None:
            return None
        try:
            if not recording.timeline.is_recorded:
                return None
            name = recording.names.module(module)
            fields = {
                "bucket_index": index,
                "is_last": False,
                "hook_name": None,
                "parameter_fqns": [p._param_fqn for p in group.fsdp_params],
                "size_bytes": buffer.numel() * buffer.element_size(),
                "ready_ns": None,
                "root": None if name is None else name.root,
                "module_fqn": None if name is None else name.fqn,
                "kind": "reduce_scatter",
                "layout_index": None,
                "divisor": None,
                "numel": buffer.numel(),
                "dtype": str(buffer.dtype).removeprefix("torch."),
                "before": recording.summariser.of(buffer),
            }
            began = recording.device_times.begin(buffer)
            return began, {**fields, "launched_ns": recording.timeline.now()}
        except Exception as error:
            self.guard.failed(error)
            return None

    def _after(
        self, opened: tuple[Moment | None, dict[str, Any]], output: torch.Tensor, group: Any
    ) -> None:
        recording = self._gate.recording
        began, fields = opened
        if recording is None:
            return
        try:
            timeline = recording.timeline
            # On a device the collective is only queued when the call returns.
            done = timeline.now() if output.device.type == "cpu" else None
            recording.rows.bucket(
                None,
                timeline.step,
                timeline.microbatch,
                self._backward_index,
                **fields,
                device_ns=recording.device_times.end(began),
                group=group.group_name,
                collective_seq=collective_seq(group),
                done_ns=done,
                after=recording.summariser.of(output),
            )
        except Exception as error:
            self.guard.failed(error)


def _groups_of(state: Any) -> list[Any]:
    """The parameter groups of a sharded module: one at most where torch has no list of them (2.9)."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        only = getattr(state, "_fsdp_param_group", None)
        return [] if only is None else [only]
    return list(groups)
