"""Rows of every table but the two of Nodes, as the journal packs them: their fields in order.

The order is that of the table's declaration in `gradtrace_schemas`; the journal's struct refuses a wrong count, not a
wrong order. Rows of `node_events` and `node_tensors` are written by `observers.node_hooks`, and by the native observer,
which also writes `gradients` of the point `local`: it knows no order, as Python hands it the place of each field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from gradtrace_recorder.journal.flight import Flight
from gradtrace_recorder.journal.writer import JournalWriter
from gradtrace_recorder.recording.row_fields import int32_field, int64_field, kinds_of, names_field
from gradtrace_recorder.state.attribution import Frame
from gradtrace_recorder.state.naming import ParameterName
from gradtrace_recorder.state.timeline import StepTotals, Timeline
from gradtrace_recorder.state.versions import Change
from gradtrace_recorder.summaries.summariser import shape_fields
from gradtrace_recorder.summaries.values import Packed, as_bytes
from gradtrace_schemas.journal import (
    KINDS,
    NULL_BOOL,
    NULL_FLOAT,
    NULL_INT32,
    NULL_INT64,
    NULL_STRING,
)
from gradtrace_schemas.steps import DIGEST_LINKS

NODE_EVENTS = KINDS["node_events"]
_STEPS = KINDS["steps"]
_BUCKETS = KINDS["buckets"]
_STAGE_EVENTS = KINDS["stage_events"]


class FailedNode(Protocol):
    """The Node that was running when a pass failed: what its row takes of it. Names are numbers of journal strings."""

    frame: Frame
    parameter_fqn: int
    number: int
    start: int
    came_in: list[tuple[torch.dtype, torch.Size] | None] | None


class Rows:
    """Writes rows at the timeline's present step and microbatch. Any thread that runs Python."""

    def __init__(
        self, journal: JournalWriter, timeline: Timeline, flight: Flight | None = None
    ) -> None:
        self.flight = flight
        self._journal = journal
        self._timeline = timeline

    def hold_step(self, totals: StepTotals) -> int | None:
        """The current step's row as it stands: kept in case the rank dies. Its place in the journal."""
        timeline = self._timeline
        values = self._step(totals)
        return self._journal.hold(_STEPS, timeline.step, timeline.microbatch, NULL_INT32, *values)

    def step(self, held: int | None, totals: StepTotals) -> None:
        """The current step's row. Its digests are filled in when the record is drained."""
        timeline = self._timeline
        values = self._step(totals)
        self._journal.settle(held, _STEPS, timeline.step, timeline.microbatch, NULL_INT32, *values)

    def _step(self, totals: StepTotals) -> tuple[float | bytes, ...]:
        abandoned = sum(not call.used for call in totals.root_calls)
        rng = totals.rng_fingerprint
        string = self._journal.string
        return (
            totals.start_ns,
            totals.end_ns,
            totals.forward_ns,
            totals.backward_ns,
            totals.optimizer_ns,
            NULL_BOOL if totals.skipped is None else int(totals.skipped),
            string(totals.ended_by),
            string(totals.framework),
            int64_field(totals.framework_step),
            totals.backward_count,
            abandoned,
            NULL_INT64 if rng is None else rng,
            totals.recorder_ns,
            *(NULL_INT64 for _ in DIGEST_LINKS),
        )

    def input(
        self,
        root: int | None,
        call_index: int,
        name: str,
        tensor: torch.Tensor,
        summary: Packed | None,
    ) -> None:
        """A tensor argument of a root's call, or a noted one (root None)."""
        self._append(
            "inputs",
            NULL_INT32,
            NULL_INT32 if root is None else root,
            call_index,
            self._journal.string(name),
            *shape_fields(tensor),
            as_bytes(summary),
        )

    def parameter(
        self, name: ParameterName, point: str, tensor: torch.Tensor, summary: Packed | None
    ) -> None:
        """A parameter or buffer at one point of the step."""
        string = self._journal.string
        self._append(
            "parameters",
            NULL_INT32,
            name.root,
            string(name.fqn),
            string(point),
            string(name.kind),
            *shape_fields(tensor),
            int(tensor.requires_grad),
            string(names_field(name.others) if name.others else None),
            as_bytes(summary),
        )

    def optimizer_group(
        self,
        optimizer_index: int,
        group_index: int,
        optimizer_class: str,
        wrapper_class: str | None,
        learning_rate: float | None,
        hyperparameters: str,
        parameter_fqns: Sequence[str | None],
    ) -> None:
        """A parameter group at an optimizer's step."""
        string = self._journal.string
        self._append(
            "optimizer_groups",
            NULL_INT32,
            optimizer_index,
            group_index,
            string(optimizer_class),
            string(wrapper_class),
            NULL_FLOAT if learning_rate is None else learning_rate,
            string(hyperparameters),
            string(names_field(parameter_fqns)),
        )

    def module_call(
        self,
        microbatch: int,
        root: int,
        fqn: int,
        phase: int,
        call_index: int,
        module_class: int,
        depth: int,
        start_ns: int,
        end_ns: int,
        received: Packed | None,
        sent: Packed | None,
    ) -> None:
        """A call of a module's forward; names are numbers of journal strings."""
        self._journal.append(
            KINDS["module_calls"],
            self._timeline.step,
            microbatch,
            NULL_INT32,
            root,
            fqn,
            phase,
            call_index,
            module_class,
            depth,
            start_ns,
            end_ns,
            as_bytes(received),
            as_bytes(sent),
        )

    def backward_pass(
        self,
        backward_index: int,
        microbatch: int,
        parent: int | None,
        kind: str,
        root_node_name: str | None,
        loss: float | None,
        node_count: int,
        unattributed_count: int,
        start_ns: int,
        end_ns: int,
        error: str | None,
        ddp_sync: str | None,
        device_ns: int = NULL_INT64,
    ) -> None:
        """A call into the engine that has returned or raised."""
        string = self._journal.string
        self._journal.append(
            KINDS["backward_passes"],
            self._timeline.step,
            microbatch,
            backward_index,
            NULL_INT32 if parent is None else parent,
            string(kind),
            string(root_node_name),
            NULL_FLOAT if loss is None else loss,
            node_count,
            unattributed_count,
            start_ns,
            end_ns,
            device_ns,
            string(error),
            string(ddp_sync),
        )

    def gradient(
        self,
        name: ParameterName,
        point: str,
        backward_index: int,
        microbatch: int,
        gradient: torch.Tensor,
        summary: Packed | None,
    ) -> None:
        """A parameter's gradient at one point."""
        if self.flight is not None and summary is not None:
            self.flight.saw(summary)
        string = self._journal.string
        self._journal.append(
            KINDS["gradients"],
            self._timeline.step,
            microbatch,
            backward_index,
            name.root,
            string(name.fqn),
            string(point),
            *shape_fields(gradient),
            as_bytes(summary),
        )

    def hold_bucket(
        self, step: int, microbatch: int, backward_index: int, **fields: Any
    ) -> int | None:
        """A bucket whose reduction is under way: kept in case the rank dies. Its place in the journal."""
        values = self._bucket(**fields, done_ns=None, after=None)
        return self._journal.hold(_BUCKETS, step, microbatch, backward_index, *values)

    def bucket(
        self, held: int | None, step: int, microbatch: int, backward_index: int, **fields: Any
    ) -> None:
        """A bucket as its backward pass left it."""
        values = self._bucket(**fields)
        self._journal.settle(held, _BUCKETS, step, microbatch, backward_index, *values)

    def _bucket(
        self,
        *,
        bucket_index: int,
        is_last: bool,
        hook_name: str | None,
        group: str | None,
        parameter_fqns: Sequence[str | None],
        size_bytes: int,
        ready_ns: int | None,
        launched_ns: int,
        done_ns: int | None,
        root: int | None,
        module_fqn: str | None,
        kind: str,
        layout_index: int | None,
        divisor: int | None,
        collective_seq: int | None,
        numel: int,
        dtype: str,
        before: Packed | None,
        after: Packed | None,
        device_ns: int = NULL_INT64,
    ) -> tuple[float | bytes, ...]:
        string = self._journal.string
        return (
            bucket_index,
            int(is_last),
            string(hook_name),
            string(group),
            string(names_field(parameter_fqns)),
            size_bytes,
            int64_field(ready_ns),
            launched_ns,
            int64_field(done_ns),
            device_ns,
            int32_field(root),
            string(module_fqn),
            string(kind),
            int32_field(layout_index),
            int32_field(divisor),
            int64_field(collective_seq),
            numel,
            string(dtype),
            as_bytes(before),
            as_bytes(after),
        )

    def hold_stage_event(self, step: int, microbatch: int, **fields: Any) -> int | None:
        """An action or a wait that has begun: kept in case the rank dies. Its place in the journal."""
        values = self._stage_event(**{"end_ns": None, **fields}, occurrence=0)
        return self._journal.hold(_STAGE_EVENTS, step, microbatch, NULL_INT32, *values)

    def release(self, held: int | None) -> None:
        """No row comes of what was held."""
        self._journal.release(held)

    def stage_event(self, held: int | None, step: int, microbatch: int, **fields: Any) -> None:
        """An action of a pipeline stage that is over, or a wait for what it receives or sends."""
        values = self._stage_event(**fields)
        self._journal.settle(held, _STAGE_EVENTS, step, microbatch, NULL_INT32, *values)

    def _stage_event(
        self,
        *,
        stage_index: int | None,
        kind: str,
        occurrence: int,
        start_ns: int,
        end_ns: int | None,
        error: str | None = None,
        received: Packed | None = None,
        sent: Packed | None = None,
        device_ns: int = NULL_INT64,
    ) -> tuple[float | bytes, ...]:
        string = self._journal.string
        return (
            int32_field(stage_index), string(kind), occurrence, start_ns, int64_field(end_ns), device_ns, string(error),
            as_bytes(received), as_bytes(sent),
        )  # fmt: skip

    def group(
        self,
        name: str,
        ranks: str,
        backend: str | None,
        role: str | None,
        root: int | None,
        module_fqn: str | None,
        hook_name: str | None,
        unobserved: str | None,
    ) -> None:
        """A process group, or a module whose gradients are reduced over it."""
        string = self._journal.string
        texts = (string(name), string(ranks), string(backend), string(role))
        reducing = (int32_field(root), string(module_fqn), string(hook_name), string(unobserved))
        timeline = self._timeline
        head = (timeline.step, timeline.microbatch, NULL_INT32)
        self._journal.append_lasting(KINDS["groups"], *head, *texts, *reducing)

    def failure(
        self,
        backward_index: int,
        microbatch: int,
        stage_index: int | None,
        event_index: int | None,
        node_name: int,
        root: int,
        module_fqn: int,
        call_index: int,
        exception_type: str,
        exception_text: str,
        traceback: str | None,
        time_ns: int,
        culprit: FailedNode | None,
        change: Change | None,
    ) -> None:
        """An exception that left a backward pass; `culprit` is the Node that was running, if one was."""
        string = self._journal.string
        of_node: tuple[int, ...] = (NULL_STRING, NULL_INT64, NULL_INT64, NULL_STRING)
        call: tuple[int, ...] = (NULL_INT32, NULL_INT32, NULL_STRING)
        if culprit is not None:
            frame = culprit.frame
            came = None if culprit.came_in is None else names_field(kinds_of(culprit.came_in))
            of_node = (culprit.parameter_fqn, culprit.number, culprit.start, string(came))
            call = (frame.step, frame.microbatch, frame.phase)
        changer = change.frame if change is not None else None
        changed = (NULL_INT32, NULL_STRING, NULL_INT32)
        if changer is not None:
            changed = (changer.root, changer.fqn_number, changer.call_index)
        self._journal.append(
            KINDS["failures"],
            self._timeline.step,
            microbatch,
            backward_index,
            NULL_INT32 if event_index is None else event_index,
            node_name,
            root,
            module_fqn,
            call_index,
            int32_field(stage_index),
            string(exception_type),
            string(exception_text[:4000]),
            string(traceback[-16000:] if traceback else None),
            time_ns,
            *of_node,
            *call,
            string(change.between if change is not None else None),
            *changed,
        )

    def _append(self, table: str, backward_index: int, *fields: float | bytes) -> None:
        timeline = self._timeline
        self._journal.append(
            KINDS[table], timeline.step, timeline.microbatch, backward_index, *fields
        )
