"""The parts of a rank's steps: forward, backward, optimizer, and the recorder's own time."""

from __future__ import annotations

from dataclasses import dataclass

import duckdb

from gradtrace_analyzer.timing.slices import Steps

PARTS = ("step", "forward", "backward", "optimizer")


@dataclass(frozen=True)
class RankSteps:
    """A rank's closed steps. `median_ns` and `total_ns` are by part, in the order of PARTS."""

    rank: int
    step_count: int
    median_ns: tuple[int, ...]
    total_ns: tuple[int, ...]
    recorder_share: float | None


_PARTS_OF_STEPS = """
WITH parts AS (
    SELECT rank, end_ns - start_ns AS step_ns, forward_ns, backward_ns, optimizer_ns, recorder_ns
    FROM steps WHERE end_ns IS NOT NULL AND start_ns IS NOT NULL AND {steps})
SELECT rank, count(*), {medians}, {totals}, CAST(sum(recorder_ns) AS DOUBLE) / nullif(sum(step_ns), 0)
FROM parts GROUP BY rank ORDER BY rank
"""


def rank_steps(connection: duckdb.DuckDBPyConnection, steps: Steps) -> tuple[RankSteps, ...]:
    """The times of the steps asked for, of each rank that closed one of them, by rank."""
    query = _PARTS_OF_STEPS.format(
        steps=steps.condition(),
        medians=", ".join(f"median({part}_ns)" for part in PARTS),
        totals=", ".join(f"sum({part}_ns)" for part in PARTS),
    )
    return tuple(
        RankSteps(
            rank=row[0],
            step_count=row[1],
            median_ns=tuple(round(ns or 0) for ns in row[2 : 2 + len(PARTS)]),
            total_ns=tuple(int(ns or 0) for ns in row[2 + len(PARTS) : 2 + 2 * len(PARTS)]),
            recorder_share=row[-1],
        )
        for row in connection.execute(query).fetchall()
    )


def median_step_ns(connection: duckdb.DuckDBPyConnection, steps: Steps) -> int | None:
    """The median time of a step over all ranks, None where none was closed."""
    row = connection.execute(
        f"SELECT median(end_ns - start_ns) FROM steps WHERE {steps.condition()}"
    ).fetchone()
    return None if row is None or row[0] is None else round(row[0])
