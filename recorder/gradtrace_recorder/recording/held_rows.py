"""Rows of what takes a while: steps, buckets, actions of stages. They are held in the journal until they are whole.

A rank that is killed meanwhile leaves the row as far as it was known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradtrace_recorder.journal.flight import Flight
from gradtrace_recorder.journal.writer import JournalWriter
from gradtrace_recorder.recording.row_fields import int32_field, int64_field, names_field
from gradtrace_recorder.state.timeline import StepTotals, Timeline
from gradtrace_recorder.summaries.values import Packed, as_bytes
from gradtrace_schemas.journal import (
    KINDS,
    NULL_BOOL,
    NULL_INT32,
    NULL_INT64,
)
from gradtrace_schemas.steps import DIGEST_LINKS

_STEPS = KINDS["steps"]
_BUCKETS = KINDS["buckets"]
_STAGE_EVENTS = KINDS["stage_events"]


class HeldRows:
    """Each kind of row has a method that holds it and one that completes it. Any thread that runs Python."""

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
