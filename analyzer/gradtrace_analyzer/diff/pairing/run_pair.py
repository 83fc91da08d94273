"""Two runs as a comparison reads them: their rows' counts, and the parts that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gradtrace_analyzer.diff.pairing.rows_of_part import RowsOfPart
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.sql.footers import Counts


@dataclass(frozen=True)
class RunPair:
    """The two runs as they are read: `counts` are the rows of each side by table and rank.

    Where rows `are_arranged`, they are no longer those of the parts: these prove and hold nothing of a rank. Where they
    `are_renamed`, they are those of the parts with other names. With `has_same_names` no module or parameter has a name
    on one side alone, as far as was looked: fingerprints that agree are then of rows that pair.
    """

    runs: Mapping[str, Run]
    counts: Mapping[str, Counts]
    are_arranged: bool = False
    are_renamed: bool = False
    has_same_names: bool = False

    def closed(self, side: str, ranks: Iterable[int]) -> list[int]:
        """The ranks whose steps are all named by `steps`: they ended by themselves and lost nothing."""
        if self.are_arranged:
            return []
        run, counts = self.runs[side], self.counts[side]
        if run.history:
            return []  # an attempt before the newest was cut off, as a rule
        damaged = {d.part.rank for d in run.damaged}
        return [
            rank
            for rank in ranks
            if run.ranks[rank].is_complete
            and rank not in damaged
            and rank not in run.journals
            and not any((run.ranks[rank].facts.get("dropped") or {}).values())
            and counts.of("steps", rank) > 0
            and counts.of("steps", rank)
            == (run.ranks[rank].facts.get("recorded") or {}).get("steps")
        ]

    def parts(self, side: str, table: str, rank: int) -> list[RowsOfPart]:
        """The Parquet parts that hold a rank's rows of a table, in the order in which they were written."""
        return [
            RowsOfPart(part.path, of.run.step_shift, of.end)
            for of in self.runs[side].stretches
            for part in of.run.parts[table].get(rank, ())
        ]

    @property
    def in_journals(self) -> set[int]:
        """The ranks of which either side has rows that only a journal holds."""
        return {
            rank for run in self.runs.values() for of in run.stretches for rank in of.run.journals
        }
