"""How an explanation of a bucket that is not the mean is said."""

from __future__ import annotations

from dataclasses import dataclass

from gradtrace_analyzer.check.laws.mean import Explanation
from gradtrace_analyzer.words.numbers import ranks_phrase


@dataclass(frozen=True)
class Place:
    """Where a bucket is not the mean: the group's ranks, the hook, and the ranks that came out so.

    `stale_since` is the earlier step in which the very same came out.
    """

    group_ranks: tuple[int, ...]
    hook: str | None
    ranks: tuple[int, ...]
    stale_since: int | None = None


def odd_rank(e: Explanation, place: Place) -> int | None:
    """The rank to blame: whose contribution it is, or the only one on which it is so."""
    if e.kind == "contribution" and e.contributor is not None:
        return place.group_ranks[e.contributor]
    return place.ranks[0] if len(place.ranks) == 1 else None


def said(e: Explanation, place: Place) -> str:
    """What a bucket is instead of the mean, and why: behind `it is`."""
    size = len(place.group_ranks)
    if e.kind == "factor" and e.factor is not None:
        return f"{_times(e.factor)} the mean of the {size} ranks' buckets{_why_factor(e.factor, place)}"
    if e.kind == "contribution" and e.factor is not None and e.contributor is not None:
        rank = place.group_ranks[e.contributor]
        return f"not the mean of the {size} ranks' buckets: rank {rank}'s contribution {_fate(e.factor)}"
    if e.kind == "unreduced":
        who = "the rank" if len(place.ranks) == 1 else "each rank"
        return f"still {who}'s own bucket, not reduced at all: {_who_skipped(place)} skipped the reduction"
    if e.kind == "share":
        return (
            f"the rank's own bucket divided by {size}, the other ranks' missing: it was divided but not "
            f"summed, so {_who_skipped(place)} skipped the reduction"
        )
    if e.kind == "subset":
        among = tuple(place.group_ranks[k] for k in e.subset)
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
        f"{e.relative_error:.1e} away from the mean of the {size} ranks' buckets (relative, estimated within 18%), "
        "which no factor, and no missing or repeated contribution, explains"
    )


def _times(factor: float) -> str:
    return "all zero, not" if abs(factor) < 1e-6 else f"{factor:.4g} times"


def _why_factor(factor: float, place: Place) -> str:
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


def _who_skipped(place: Place) -> str:
    return ranks_phrase(place.ranks)
