"""How the attempts of a run follow each other: what is known of each, and which of them are one history.

An attempt continues those before it where something says with which step it goes on: its own numbers (a framework's
counter, GRADTRACE_STEP_OFFSET, or the job's), or the parameters that it began with. It takes over with its first step:
what was recorded of that step and later ones before is not read. Where nothing tells, it stands alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

JoinedBy = Literal["framework", "offset", "job", "parameters"]


@dataclass(frozen=True)
class Span:
    """What is known of an attempt by itself.

    `first` and `last` are the steps that it recorded, as it numbered them, None of one that recorded none.
    `numbered_by` says why its first step has that number, None where it counted from 0 for want of anything better;
    `begins` is that step, where it is said. `asked` is what it was asked to record, as text. `began_ns` and `seen_ns`
    are its first and last sign of life, by the wall clock; None where it left none.
    """

    attempt: int
    first: int | None
    last: int | None
    numbered_by: Literal["framework", "offset", "job"] | None
    begins: int | None
    world_size: int | None
    asked: str
    began_ns: int | None = None
    seen_ns: int | None = None


@dataclass(frozen=True)
class AttemptStory:
    """What became of an attempt, in the numbers of the history that it belongs to.

    It recorded the steps `first` to `last`, numbered `step_shift` higher than by itself, and ended as `ending` says.
    It continues the attempts before it as `joined_by` says, or not, and `why_not`. `same_parameters`: whether it began
    with the parameters that were there before, bit for bit; None where that was not recorded. `repeated` are its steps
    that others had recorded before, `gap` those between that nobody did, `read` those of which its rows are read; first
    and last.
    """

    attempt: int
    ending: str
    first: int | None
    last: int | None
    step_shift: int = 0
    joined_by: JoinedBy | None = None
    why_not: str | None = None
    same_parameters: bool | None = None
    repeated: tuple[int, int] | None = None
    gap: tuple[int, int] | None = None
    read: tuple[int, int] | None = None


@dataclass(frozen=True)
class Link:
    """How an attempt follows those before it: joined, with so much added to its steps; else why it is not."""

    joined_by: JoinedBy | None = None
    step_shift: int = 0
    why_not: str | None = None


def link(
    earlier: Sequence[Span], first: int, last: int, span: Span, equal_before: Collection[int]
) -> Link:
    """How an attempt follows `earlier` ones, a history that recorded the steps `first` to `last`.

    `equal_before` are the steps of that history that began with the parameters with which the attempt began; it is
    asked where numbers do not tell, or may be those of an attempt before.
    """
    assert span.first is not None
    apart = _recorded_otherwise(earlier[-1], span)
    if apart is not None:
        return Link(why_not=apart)
    begins = span.first if span.begins is None else span.begins
    if is_doubtful(earlier[-1], span) and len(equal_before) == 1 and min(equal_before) > first:
        [step] = equal_before
        if step != span.first:
            return Link("parameters", step - span.first)
    if span.numbered_by is not None:
        if begins > first:
            return Link(span.numbered_by)
        return Link(why_not=f"it begins again at step {begins} ({SOURCES[span.numbered_by]})")
    if not equal_before:
        return Link(why_not="nothing tells with which step it goes on")
    if min(equal_before) <= first:
        also = " (other steps did, too)" if len(equal_before) > 1 else ""
        return Link(
            why_not=f"it begins anew, with the parameters that step {first} began with{also}"
        )
    if len(equal_before) > 1:
        several = " and ".join(map(str, sorted(equal_before)[:3]))
        return Link(
            why_not=f"it begins with the parameters of several steps ({several}): which it goes on with cannot be told"
        )
    [step] = equal_before
    return Link("parameters", step - span.first)


def is_doubtful(before: Span, after: Span) -> bool:
    """Whether an attempt's number may be that of the one before: a launcher that restarts ranks keeps the variable."""
    return after.numbered_by == before.numbered_by == "offset" and after.begins == before.begins


# What the numbers of an attempt that continues others do not say.
OTHER_PARAMETERS = "it begins with other parameters than those that were there before"

SOURCES: dict[JoinedBy, str] = {
    "framework": "the framework's counter",
    "offset": "GRADTRACE_STEP_OFFSET",
    "job": "the job's own numbers",
    "parameters": "it begins with the parameters that this step began with",
}


# Heartbeats come once a second, and clocks of hosts differ by less than this.
_BOTH_AT_ONCE_NS = 5 * 10**9


def _recorded_otherwise(before: Span, after: Span) -> str | None:
    """Why two attempts cannot be read as one: their rows would not be of the same kind."""
    is_known = before.seen_ns is not None and after.began_ns is not None
    if is_known and before.seen_ns - after.began_ns > _BOTH_AT_ONCE_NS:  # type: ignore[operator]
        return f"it began while attempt {before.attempt} was still recording"
    if before.world_size != after.world_size:
        return f"it has {after.world_size} ranks, attempt {before.attempt} had {before.world_size}"
    if before.asked != after.asked:
        return f"it was asked to record {after.asked}, attempt {before.attempt} {before.asked}"
    return None
