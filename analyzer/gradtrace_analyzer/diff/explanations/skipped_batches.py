"""A rank that left out a batch, or a reduction: told by the batches it was fed and the numbers of its collectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import duckdb

from gradtrace_analyzer.diff.explanations.explanation import Context, Explainer, Explanation
from gradtrace_analyzer.words.nouns import SIDES

# How many batches a rank may run ahead or behind and still be recognised.
_FARTHEST = 3
_MOST_RANKS = 64


@dataclass(frozen=True)
class ShiftedInputs:
    """Ranks of a side that read from a step on what the other side reads `by` steps later."""

    side: str
    ranks: tuple[int, ...]
    step: int
    by: int


@dataclass(frozen=True)
class ShiftedReductions:
    """A rank of the candidate that took part in `count` reductions more than the others before or in a step, or in
    as many fewer where that is negative."""

    rank: int
    step: int
    count: int


@dataclass(frozen=True)
class SkippedBatches(Explanation):
    """Ranks that run ahead of the other side, and those that lag behind in their reductions."""

    ahead: tuple[ShiftedInputs, ...] = ()
    lagging: tuple[ShiftedReductions, ...] = ()


def skipped_batches(
    connection: duckdb.DuckDBPyConnection, *, inputs: bool = True
) -> SkippedBatches:
    """Both. Without `inputs` these are known to be equal."""
    ahead = tuple(_shifted_inputs(connection)) if inputs else ()
    return SkippedBatches(ahead, tuple(_shifted_reductions(connection)))


def _shifted_inputs(connection: duckdb.DuckDBPyConnection) -> Iterator[ShiftedInputs]:
    """Ranks that read from some step on what the other side reads one or more steps later."""
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE fed AS "
        + " UNION ALL ".join(
            f"SELECT '{side}' AS side, rank, step, list(fingerprint ORDER BY microbatch, root, call_index, name) "
            f"AS bits FROM {side}.inputs WHERE fingerprint IS NOT NULL GROUP BY rank, step"
            for side in SIDES
        )
    )
    apart = connection.execute(
        "SELECT b.rank, min(b.step) FROM fed b JOIN fed c USING (rank, step) WHERE b.side = 'baseline' "
        "AND c.side = 'candidate' AND b.bits <> c.bits GROUP BY b.rank ORDER BY b.rank LIMIT ?",
        [_MOST_RANKS],
    ).fetchall()
    alike: dict[tuple[str, int, int], list[int]] = {}
    for rank, first in apart:
        for by, side in product(range(1, _FARTHEST + 1), ("candidate", "baseline")):
            row = connection.execute(
                "SELECT count(*) FILTER (a.bits = b.bits), count(*) FROM fed a JOIN fed b ON a.rank = b.rank "
                "AND b.step = a.step + ? AND a.side <> b.side WHERE a.side = ? AND a.rank = ? AND a.step >= ?",
                [by, side, rank, first],
            ).fetchone()
            if row is not None and row[1] and row[0] == row[1]:
                alike.setdefault((side, first, by), []).append(rank)
                break
    for (side, first, by), ranks in alike.items():
        yield ShiftedInputs(side, tuple(ranks), first, by)


def _shifted_reductions(connection: duckdb.DuckDBPyConnection) -> Iterator[ShiftedReductions]:
    """Ranks that take part in fewer or more of a group's collectives per step than on the other side."""
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE reduced AS "
        + " UNION ALL ".join(
            f"SELECT '{side}' AS side, rank, step, max(collective_seq) - min(min(collective_seq)) "
            "OVER (PARTITION BY rank) AS number FROM "
            f"{side}.buckets WHERE collective_seq IS NOT NULL GROUP BY rank, step"
            for side in SIDES
        )
    )
    rows = connection.execute(
        "WITH lag AS (SELECT rank, step, c.number - b.number AS lag FROM reduced b JOIN reduced c USING (rank, step) "
        "WHERE b.side = 'baseline' AND c.side = 'candidate'), "
        "ranked AS (SELECT rank, step, lag, lag - median(lag) OVER (PARTITION BY step) AS off FROM lag) "
        "SELECT rank, min(step), arg_min(off, step) FROM ranked WHERE off <> 0 GROUP BY rank ORDER BY rank"
    ).fetchall()
    total = connection.execute("SELECT count(DISTINCT rank) FROM reduced").fetchone()
    if total is None or len(rows) * 2 > total[0]:
        return
    for rank, step, off in rows:
        yield ShiftedReductions(rank, step, round(off))


def _explain(context: Context) -> SkippedBatches | None:
    found = skipped_batches(context.connection, inputs=context.may_differ("inputs"))
    return found if found.ahead or found.lagging else None


EXPLAINER = Explainer(SkippedBatches, _explain, paired=frozenset({"ranks"}))
