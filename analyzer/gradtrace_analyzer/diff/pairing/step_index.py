"""Which steps two runs have in common, and which of them may differ: read before any row is paired."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import duckdb

from gradtrace_analyzer.diff.links import LINK_TABLES
from gradtrace_analyzer.diff.pairing.pairs import seen
from gradtrace_analyzer.diff.pairing.run_pair import RunPair
from gradtrace_analyzer.diff.pairing.suspect_steps import RankStep, suspect_steps
from gradtrace_analyzer.diff.scope.selection import Selection
from gradtrace_analyzer.progress import progress
from gradtrace_analyzer.words.nouns import SIDES

# Rows of both sides that are opened at once without looking first: they take about 100 MB.
MOST_ROWS = 250_000


@dataclass(frozen=True)
class StepIndex:
    """The steps of two runs, of which the tables `seen` and `common` hold (rank, step).

    `suspects` are those that may differ, each with the tables in which it may; `firsts` each rank's first step.
    `unread` are, by table, the ranks of which a side has lost rows: they are left out. With `realigns`, Nodes of a call
    that are not the same on both sides are numbered by what they are alike in.
    """

    pair: RunPair
    ranks: tuple[int, ...]
    suspects: Mapping[RankStep, frozenset[str]]
    firsts: frozenset[RankStep]
    common_count: int
    unread: Mapping[str, frozenset[int]] = field(default_factory=dict)
    realigns: bool = False

    @property
    def proves_any(self) -> bool:
        """Whether digests prove some step of a rank equal."""
        return self.common_count > len(self.suspects)

    @property
    def fits(self) -> bool:
        """Whether all that may differ is little enough to be opened at once."""
        return self.row_count(self.suspects) <= MOST_ROWS

    def may_differ(self, table: str) -> bool:
        """Whether digests leave it open that a table differs in any step."""
        return any(table in tables for tables in self.suspects.values())

    def unread_sql(self, table: str) -> str:
        """The ranks of which a side has lost rows of a table, as a SQL list without brackets."""
        return ", ".join(map(str, sorted(self.unread.get(table, ()))))

    def row_count(self, places: Collection[RankStep]) -> int:
        """About how many rows these steps have, on both sides together."""
        steps: dict[int, int] = {}
        for rank, _ in places:
            steps[rank] = steps.get(rank, 0) + 1
        return round(
            sum(
                counts.of(table.table, rank) * some / max(1, counts.of("steps", rank) or some)
                for counts in self.pair.counts.values()
                for table in LINK_TABLES
                for rank, some in steps.items()
            )
        )

    def loads(self, places: Collection[RankStep]) -> Iterator[list[RankStep]]:
        """These steps, the earliest first, in portions that may be open at once."""
        each = max(1, self.row_count(places) // max(1, len(places)))
        yield from portions(sorted(places, key=lambda p: (p[1], p[0])), max(1, MOST_ROWS // each))


def step_index(
    connection: duckdb.DuckDBPyConnection,
    pair: RunPair,
    ranks: Sequence[int],
    *,
    unread: Mapping[str, frozenset[int]] | None = None,
    chosen: Selection | None = None,
    realigns: bool = False,
) -> StepIndex:
    """The steps of these ranks; leaves `seen` and `common` on the connection. Of a run of which one step was
    `chosen`, that alone is a suspect, beside each rank's first."""
    closed = {side: pair.closed(side, ranks) for side in SIDES}
    others = {side: [r for r in ranks if r not in set(closed[side])] for side in SIDES}
    with progress("reading which steps there are"):
        connection.execute(seen(closed, others))
        firsts = frozenset(
            connection.execute("SELECT rank, min(step) FROM common GROUP BY rank").fetchall()
        )
        suspects = suspect_steps(connection, pair.counts)
    if chosen is not None and chosen.step is not None:
        suspects = {p: t for p, t in suspects.items() if p[1] == chosen.step or p in firsts}
    [(count,)] = connection.execute("SELECT count(*) FROM common").fetchall()
    return StepIndex(pair, tuple(ranks), suspects, firsts, count, unread or {}, realigns)


def portions(places: Sequence[RankStep], size: int) -> Iterator[list[RankStep]]:
    """The same in the same order, at most `size` at a time."""
    for start in range(0, len(places), size):
        yield list(places[start : start + size])
