"""How it is said what a bucket is that is not the mean, and why."""

from __future__ import annotations

from dataclasses import dataclass

from gradtrace_analyzer.check.laws.mean import DeviationCause
from gradtrace_analyzer.words.numbers import ranks_phrase


@dataclass(frozen=True)
class BucketPlace:
    """Where a bucket is not the mean: the group's ranks, the hook, and the ranks that came out so.

    `stale_since` is the earlier step in which the very same came out.
    """

    group_ranks: tuple[int, ...]
    hook: str | None
    ranks: tuple[int, ...]
    stale_since: int | None = None


def odd_rank(cause: DeviationCause, place: BucketPlace) -> int | None:
    """The rank to blame: whose contribution it is, or the only one on which it is so."""
    if cause.kind == "contribution" and cause.contributor is not None:
        return place.group_ranks[cause.contributor]
    return place.ranks[0] if len(place.ranks) == 1 else None


def cause_phrase(cause: DeviationCause, place: BucketPlace) -> str:
    """What a bucket is instead of the mean, and why: behind `it is`."""
    size = len(place.group_ranks)
    if cause.kind == "factor" and cause.factor is not None:
        return f"{_times(cause.factor)} the mean of the {size} ranks' buckets{_why_factor(cause.factor, place)}"
    if cause.kind == "contribution" and cause.factor is not None and cause.contributor is not None:
        rank = place.group_ranks[cause.contributor]
        return f"not the mean of the {size} ranks' buckets: rank {rank}'s contribution {_fate(cause.factor)}"
    if cause.kind == "unreduced":
        who = "the rank" if len(place.ranks) == 1 else "each rank"
        return f"still {who}'s own bucket, not reduced at all: {_who_skipped(place)} skipped the reduction"
    if cause.kind == "share":
        return (
            f"the rank's own bucket divided by {size}, the other ranks' missing: it was divided but not "
            f"summed, so {_who_skipped(place)} skipped the reduction"
        )
    if cause.kind == "subset":
        among = tuple(place.group_ranks[k] for k in cause.subset)
        return (
            f"the mean of the buckets of {ranks_phrase(among)} alone, not of the {size} ranks': it was reduced over "
            "another group"
        )
    if place.stale_since is not None:
        return (
            f"not the mean of the {size} ranks' buckets, but bit-equal to what came out in step {place.stale_since}: a "
            "result of that step was handed out again"
        )
    return (
        f"{cause.relative_error:.1e} away from the mean of the {size} ranks' buckets (relative, estimated within 18%), "
        "which no factor, and no missing or repeated contribution, explains"
    )


def _times(factor: float) -> str:
    return "all zero, not" if abs(factor) < 1e-6 else f"{factor:.4g} times"


def _why_factor(factor: float, place: BucketPlace) -> str:
    size = len(place.group_ranks)
    who = "DDP" if place.hook is None else "the hook"
    if abs(factor) < 1e-6:
        return ""
    if abs(factor - size) < 1e-3 * size:
        return f": {who} sums and does not divide"
    if abs(factor * size - 1) < 1e-3:
        return f": it was divided by {size} twice"
    if abs(factor + 1) < 1e-3:
        return ": its sign is flipped"
    return f" (world size {size}): it is scaled where it should not be"


def _fate(factor: float) -> str:
    if abs(factor + 1) < 1e-3:
        return "is missing"
    if abs(factor - 1) < 1e-3:
        return "is counted twice"
    return f"is scaled by {1 + factor:.4g}"


def _who_skipped(place: BucketPlace) -> str:
    return ranks_phrase(place.ranks)
