"""Ranks that died or crashed: what others then failed or stopped with follows from that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradtrace_analyzer.diff.explanations.explanation import Context, Explainer, Explanation
from gradtrace_analyzer.diff.origin import CodeOrigin, FailureOrigin, Origin, StructureOrigin
from gradtrace_analyzer.diff.scope.cover import Cover
from gradtrace_analyzer.failures.crashes import Crash
from gradtrace_analyzer.failures.endings import Ending, endings
from gradtrace_analyzer.failures.failed_passes import OneSidedFailure
from gradtrace_analyzer.runs.run import Run

# Of a side that died, so many ranks are told.
_MOST_DIED = 4


@dataclass(frozen=True)
class Ends(Explanation):
    """By side, what ended its ranks: exceptions that are told of no backward pass, and ranks that died.

    `is_cause` says that the first origin is something that one side did not come to do, so that this is the reason.
    """

    crashed: Mapping[str, tuple[Crash, ...]]
    died: Mapping[str, tuple[Ending, ...]]
    is_cause: bool = False


def ends_of(
    runs: Mapping[str, Run], cover: Cover, failures: Sequence[OneSidedFailure], first: Origin
) -> Ends | None:
    """How ranks of both sides ended before their time; an exception that is one of `failures` is not told again."""
    told = {(f.side, f.row["exception_type"]) for f in failures}
    crashed, died = {}, {}
    for side, found in cover.crashes.items():
        left = [c for c in found if c.is_told and (side, c.exception_type) not in told]
        if left:
            crashed[side] = tuple(left)
    for side, run in runs.items():
        dead = endings(run).of("died", "silent") if run.incomplete_ranks else ()
        if dead:
            died[side] = dead[:_MOST_DIED]
    return Ends(crashed, died, is_undone(first)) if crashed or died else None


def is_undone(origin: Origin) -> bool:
    """Whether it is something that one side did not come to do: a rank that died is then the cause."""
    if isinstance(origin, FailureOrigin):
        return origin.failure.row["node_name"] is None  # it failed while it waited
    return isinstance(origin, StructureOrigin) and not isinstance(origin, CodeOrigin)


def _explain(context: Context) -> Ends | None:
    return ends_of(context.runs, context.cover, context.failures, context.origins[0])


EXPLAINER = Explainer(Ends, _explain)
