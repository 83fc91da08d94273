"""What the journal gets of the Nodes of one backward pass: notes of what runs, and rows of what has run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from gradtrace_recorder.observers.pass_context import EngineCall
from gradtrace_recorder.recording.recording import Recording
from gradtrace_recorder.recording.replay import Verdict
from gradtrace_recorder.recording.rows import NODE_EVENTS
from gradtrace_recorder.state.attribution import Frame
from gradtrace_recorder.summaries.summariser import shape_fields
from gradtrace_recorder.summaries.values import Packed, as_bytes
from gradtrace_recorder.torch_internals.dynamo import never_compiled
from gradtrace_schemas.journal import KINDS, NULL_INT32, NULL_INT64

_NODE_TENSORS = KINDS["node_tensors"]


class RanNode(Protocol):
    """What a row takes of a Node. Names are numbers of journal strings; `start` is in ns since the recording began."""

    index: int
    number: int
    name: int
    frame: Frame
    occurrence: int
    parameter_fqn: int
    thread: int
    start: int


class NodeRows:
    """Writes at the place of one pass. On whichever thread runs the Node.

    `ok`, `failed`, `incoming` and `outgoing` are numbers of journal strings: outcomes, and directions of gradients.
    """

    __slots__ = (
        "_append", "_flight", "_pop_running", "_push_running", "backward_index", "failed", "incoming", "microbatch",
        "ok", "outgoing", "phase", "stage_index", "step",
    )  # fmt: skip

    def __init__(self, recording: Recording, call: EngineCall) -> None:
        journal, timeline = recording.journal, recording.timeline
        string = journal.string
        self._append = journal.append
        self._push_running = journal.push_running
        self._pop_running = journal.pop_running
        self._flight = recording.flight
        self.step = timeline.step
        self.microbatch = timeline.microbatch
        self.backward_index = call.backward_index
        self.phase = string(call.half or ("backward" if call.accumulates else "grad"))
        self.stage_index = NULL_INT32 if call.stage_index is None else call.stage_index
        self.ok = string("ok")
        self.failed = string("failed")
        self.incoming = string("grad_output")
        self.outgoing = string("grad_input")

    def begins(self, node: RanNode) -> None:
        """The thread is about to run it."""
        frame = node.frame
        self._push_running(
            node.thread,
            node.name,
            frame.fqn_number,
            frame.root,
            frame.call_index,
            self.step,
            self.microbatch,
            self.backward_index,
            node.index,
            self.phase,
            node.parameter_fqn,
            node.number,
            node.start,
            self.stage_index,
        )

    def ends(self, thread: int) -> None:
        """The thread has run what it began last."""
        self._pop_running(thread)

    def node(
        self,
        node: RanNode,
        end: int,
        outcome: int,
        came: int,
        went: int,
        grad_output: Packed,
        grad_input: Packed,
        mutated: int,
        replayed: Verdict,
        device_ns: int = NULL_INT64,
    ) -> None:
        """The Node's row."""
        frame = node.frame
        if self._flight is not None:
            self._flight.saw(grad_output)
            self._flight.saw(grad_input)
        self._append(
            NODE_EVENTS,
            self.step,
            self.microbatch,
            self.backward_index,
            node.index,
            node.number,
            node.name,
            frame.root,
            frame.fqn_number,
            frame.call_index,
            node.occurrence,
            node.parameter_fqn,
            self.phase,
            self.stage_index,
            node.thread,
            node.start,
            end,
            device_ns,
            came,
            went,
            outcome,
            mutated,
            *replayed,
            as_bytes(grad_output),
            as_bytes(grad_input),
        )

    def tensors(
        self,
        index: int,
        direction: int,
        gradients: Sequence[torch.Tensor | None],
        summaries: Sequence[Packed | None],
    ) -> None:
        """Rows of the gradients that a Node got or gave, where they are several."""
        for position, gradient in enumerate(gradients):
            if gradient is not None:
                self._append(
                    _NODE_TENSORS,
                    self.step,
                    self.microbatch,
                    self.backward_index,
                    index,
                    direction,
                    position,
                    *shape_fields(gradient),
                    as_bytes(summaries[position]),
                )


never_compiled(NodeRows)
