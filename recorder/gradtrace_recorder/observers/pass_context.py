"""What is the same for all Nodes of one backward pass under watch: fixed when the engine is entered."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from gradtrace_recorder.guard import Guard
from gradtrace_recorder.recording.recording import Recording
from gradtrace_recorder.state.timeline import StepTotals
from gradtrace_recorder.summaries.device.times import DeviceTimes
from gradtrace_recorder.torch_internals.dynamo import never_compiled

GradientReady = Callable[[torch.Tensor, int], None]


class EngineCall(NamedTuple):
    """A call into the engine that is about to be watched. No other of the process has its `serial`.

    `create_graph` says that the pass makes Nodes, which belong to those that run.
    `half` is that of a pipeline stage's split backward: `input`, `weight`, None for no half; one that
    `follows_half` is torch's weight half, which runs nothing that its input half ran.
    `gradient_ready` is called with each parameter when its gradient was accumulated, and the time.
    `is_alone` tells whether no other thread has a call open.
    """

    serial: int
    backward_index: int
    accumulates: bool
    create_graph: bool
    half: str | None
    follows_half: bool
    stage_index: int | None
    gradient_ready: GradientReady | None
    is_alone: Callable[[], bool]


class PassContext(NamedTuple):
    """Into what a pass is recorded, and how the engine was called.

    `half_done` are numbers of the Nodes that input halves of the step have run, None where that does not matter, or is
    not known; `node_times` is None where Nodes are not timed on a device.
    """

    recording: Recording
    guard: Guard
    call: EngineCall
    zero_ns: int
    totals: StepTotals
    half_done: set[int] | None
    node_times: DeviceTimes | None

    @classmethod
    def of(cls, recording: Recording, guard: Guard, call: EngineCall) -> PassContext:
        """The context of a call that is made now."""
        timeline, times = recording.timeline, recording.device_times
        half_done = None
        if call.half is not None and recording.attribution.is_of_one_thread:
            half_done = recording.half_done.numbers(timeline.step)
        node_times = times if times.of_nodes else None
        return cls(recording, guard, call, timeline.zero_ns, timeline.totals, half_done, node_times)


never_compiled(PassContext)
