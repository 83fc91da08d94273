"""Which ranks of both sides hold which stage, where two pipelines are compared stage by stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradtrace_analyzer.words.numbers import and_more, verb


@dataclass(frozen=True)
class Stages:
    """Which ranks of each side hold which stage. Where several ranks hold it, each copy of the pipeline has its own
    numbers, `count` apart. `left_out` counts the parameters that are of no stage, as far as is known."""

    ranks: Mapping[str, Mapping[int, int]]
    count: int
    left_out: int = 0

    @property
    def common(self) -> list[int]:
        """The stages that both sides have, ascending."""
        return sorted(set(self.ranks["baseline"]) & set(self.ranks["candidate"]))

    def note(self) -> str:
        """That stages were compared, and where they are."""
        moved = [
            stage
            for stage in self.common
            if self.ranks["baseline"][stage] != self.ranks["candidate"][stage]
        ]
        said = (
            "The runs are scheduled otherwise: they were compared stage by stage and microbatch by microbatch, "
            "whatever the order, and a backward pass that was split as a whole one."
        )
        if self.left_out:
            are = verb(self.left_out, "parameter is", "parameters are")
            said += f" {self.left_out} {are} of no stage that is known, and not compared."
        if not moved:
            return said
        where = (
            f"stage {stage % self.count} on rank {self.ranks['candidate'][stage]} instead of rank "
            f"{self.ranks['baseline'][stage]}"
            for stage in moved[:2]
        )
        where_all = ", ".join(where) + and_more(len(moved) - 2)
        return f"{said} In the candidate stages are on other ranks ({where_all}); ranks are named as there."

    def spread(self, entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The entries of a spread with the candidate's ranks, and their stages."""
        held = self.ranks["candidate"]
        return [
            {**e, "rank": held[e["rank"]], "stage_index": e["rank"] % self.count} for e in entries
        ]

    def of_rank(self, side: str, rank: int) -> list[int]:
        """The stages that a rank of a side holds, in no order; a schedule may give a rank several."""
        return [stage for stage, holder in self.ranks[side].items() if holder == rank]
