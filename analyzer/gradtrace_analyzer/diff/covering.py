"""What of a scope was compared in the end: the steps of both sides, and how many rows were held against each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import duckdb

from gradtrace_analyzer.diff.judging import Judged
from gradtrace_analyzer.diff.links import LINK_TABLES, LinkTable
from gradtrace_analyzer.diff.scope.cover import Cover, all_steps, cover_of
from gradtrace_analyzer.diff.scope.recorded import Recorded
from gradtrace_analyzer.diff.scope.selection import Selection
from gradtrace_analyzer.diff.scoping import Scope
from gradtrace_analyzer.failures.crashes import crashes
from gradtrace_analyzer.words.nouns import SIDES

# Each rank's steps by where they were seen: on `both` sides, on the `baseline` or the `candidate` alone.
SeenSteps = Mapping[str, Mapping[int, list[int]]]


@dataclass(frozen=True)
class Covered:
    """The `cover` of a comparison, the steps by where they were seen, and what both sides hold with values."""

    cover: Cover
    steps: SeenSteps
    recorded: Recorded

    @property
    def common(self) -> list[int]:
        """The steps that any rank of both sides has, ascending."""
        return all_steps(self.steps["both"])


def covered(connection: duckdb.DuckDBPyConnection, scope: Scope, judged: Judged) -> Covered:
    """What of a scope was compared, once it is judged."""
    recorded = Recorded(connection)
    steps = steps_seen(connection, judged.chosen)
    cover = cover_of(
        scope.runs,
        scope.ranks,
        steps,
        rows_compared(connection, judged),
        scope.lost,
        scope.stages,
        scope.question.chosen,
        scope.question.aligned,
        {side: crashes(run) for side, run in scope.runs.items()},
        recorded,
    )
    return Covered(cover, steps, recorded)


def steps_seen(connection: duckdb.DuckDBPyConnection, chosen: Selection) -> SeenSteps:
    """Each rank's steps, of those that were asked for, by where they were seen."""
    rows = connection.execute(
        "SELECT rank, step, bool_or(side = 'baseline'), bool_or(side = 'candidate') "
        "FROM seen GROUP BY rank, step ORDER BY rank, step"
    ).fetchall()
    found: dict[str, dict[int, list[int]]] = {"both": {}, "baseline": {}, "candidate": {}}
    for rank, step, in_baseline, in_candidate in rows:
        if not chosen.wants_step(step):
            continue
        where = "both" if in_baseline and in_candidate else None
        where = where or ("baseline" if in_baseline else "candidate")
        found[where].setdefault(rank, []).append(step)
    return found


def rows_compared(connection: duckdb.DuckDBPyConnection, judged: Judged) -> dict[str, int]:
    """Rows of the baseline that were held against one of the candidate, by table."""
    uneven = connection.execute(
        "SELECT DISTINCT rank FROM (SELECT rank, step FROM seen WHERE side = 'baseline' "
        "EXCEPT SELECT rank, step FROM common)"
    ).fetchall()
    by_step = {rank for (rank,) in uneven}
    return {table.table: _compared(connection, judged, table, by_step) for table in LINK_TABLES}


def _compared(
    connection: duckdb.DuckDBPyConnection, judged: Judged, table: LinkTable, by_step: set[int]
) -> int:
    """The same of a table; of the ranks `by_step` the candidate lacks steps, so that rows are counted one by one."""
    index, chosen, name = judged.index, judged.chosen, table.table
    asked = [rank for rank in index.ranks if rank not in index.unread.get(name, ())]
    is_whole = not table.kinds and chosen.is_all
    whole = [rank for rank in asked if is_whole and rank not in by_step]
    count = sum(index.pair.counts["baseline"].of(name, rank) for rank in whole)
    rest = ", ".join(str(rank) for rank in asked if rank not in whole)
    if rest:
        [(some,)] = connection.execute(
            f"SELECT count(*) FROM baseline.{name} t SEMI JOIN common USING (rank, step) "
            f"WHERE t.rank IN ({rest}) AND {table.only} AND {chosen.condition(table)}"
        ).fetchall()
        count += some
    return count - sum(n for (of, _, _), n in judged.lone_rows.items() if of == name)


def has_summaries(connection: duckdb.DuckDBPyConnection) -> bool:
    """Whether both sides have summaries of anything."""
    return all(
        any(
            connection.execute(
                f"SELECT 1 FROM {side}.{table.table} SEMI JOIN common USING (rank, step) "
                f"WHERE {table.sides[-1][1]}norm IS NOT NULL LIMIT 1"
            ).fetchall()
            for table in LINK_TABLES
            if table.sides
        )
        for side in SIDES
    )
