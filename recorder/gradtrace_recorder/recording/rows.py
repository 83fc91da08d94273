"""Rows of every table but the two of Nodes, as the journal packs them: their fields in order.

`held_rows` has those that are held until they are whole.

The order is that of the table's declaration in `gradtrace_schemas`; the journal's struct refuses a wrong count, not a
wrong order. Rows of `node_events` and `node_tensors` are written by `observers.node_rows`, and by the native observer,
which also writes `gradients` of the point `local`: it knows no order, as Python hands it the place of each field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from gradtrace_recorder.recording.held_rows import HeldRows
from gradtrace_recorder.recording.row_fields import int32_field, kinds_of, names_field
from gradtrace_recorder.state.attribution import Frame
from gradtrace_recorder.state.naming import ParameterName
from gradtrace_recorder.state.versions import Change
from gradtrace_recorder.summaries.summariser import shape_fields
from gradtrace_recorder.summaries.values import Packed, as_bytes
from gradtrace_schemas.journal import (
    KINDS,
    NULL_FLOAT,
    NULL_INT32,
    NULL_INT64,
    NULL_STRING,
)

NODE_EVENTS = KINDS["node_events"]


class FailedNode(Protocol):
    """The Node that was running when a pass failed: what its row takes of it. Names are numbers of journal strings."""

    frame: Frame
    parameter_fqn: int
    number: int
    start: int
    came_in: list[tuple[torch.dtype, torch.Size] | None] | None


class Rows(HeldRows):
    """Writes rows at the timeline's present step and microbatch. Any thread that runs Python."""

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
