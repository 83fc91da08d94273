"""Ranks that a single origin reached in a later step only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradtrace_analyzer.diff.explanations.explanation import Context, Explainer, Explanation
from gradtrace_analyzer.diff.links import LINKS
from gradtrace_analyzer.diff.origin import Origin, Reached


@dataclass(frozen=True)
class LaterRanks(Explanation):
    """Where each rank first differs that the only origin had not reached in its own step."""

    reached: tuple[Reached, ...]

    def onto(self, origins: tuple[Origin, ...]) -> tuple[Origin, ...]:
        """The origin, having reached them too."""
        [origin] = origins
        return (replace(origin, reached=(*origin.reached, *self.reached)),)


def later_ranks(origin: Origin, spread: Sequence[Mapping[str, Any]]) -> tuple[Reached, ...]:
    """The ranks that an origin did not reach in its step, where they first differ after it."""
    known = {*origin.ranks, *(reached.rank for reached in origin.reached)}
    first: dict[int, Mapping[str, Any]] = {}
    for entry in sorted(spread, key=lambda e: (e["first_step"], LINKS.index(e["link"]))):
        if entry["rank"] not in known and entry["first_step"] >= origin.step:
            first.setdefault(entry["rank"], entry)
    return tuple(Reached(rank, e["first_step"], e["link"], {}) for rank, e in sorted(first.items()))


def _explain(context: Context) -> LaterRanks | None:
    if len(context.origins) != 1:
        return None  # nobody knows which of several reached it
    later = later_ranks(context.origins[0], context.spread)
    return LaterRanks(later) if later else None


EXPLAINER = Explainer(LaterRanks, _explain, paired=frozenset({"ranks", "stages"}))
