"""A rank that left out a batch, or a reduction: told by the batches it was fed and the numbers of its collectives."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import duckdb

from gradtrace_analyzer.words.nouns import SIDES, other_side
from gradtrace_analyzer.words.numbers import noun, ranks_phrase, verb

# How many batches a rank may run ahead or behind and still be recognised.
_FARTHEST = 3
_MOST_RANKS = 64


def skipped_batches(connection: duckdb.DuckDBPyConnection, *, inputs: bool = True) -> list[str]:
    """For each rank that runs ahead of the other side, or lags behind in its reductions, a sentence. Without `inputs`
    these are known to be equal."""
    ahead = _shifted_inputs(connection) if inputs else ()
    return [*ahead, *_shifted_collectives(connection)]


def _shifted_inputs(connection: duckdb.DuckDBPyConnection) -> Iterator[str]:
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
        other = other_side(side)
        yield (
            f"{ranks_phrase(ranks).capitalize()} of the {side} {verb(ranks, 'reads', 'read')} from step "
            f"{first} on what the {other} reads {by} {noun(by, 'step')} later: "
            f"{verb(ranks, 'it', 'they')} left out {'a batch' if by == 1 else f'{by} batches'} there."
        )


def _shifted_collectives(connection: duckdb.DuckDBPyConnection) -> Iterator[str]:
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
        count = abs(round(off))
        what = "a collective" if count == 1 else f"{count} collectives"
        verb = "left out" if off < 0 else "launched one more:" if count == 1 else "launched more:"
        yield (
            f"Rank {rank} of the candidate {verb} {what} before or in step {step}: its reductions no longer meet "
            "those of the same step on the other ranks."
        )
