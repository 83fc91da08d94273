"""What was judged, asked row by row: which steps differ, the differences of one of them, how far they spread.

All that is read lies in the tables of the opened steps, in tallies, and in the runs' own views; Python sees only the
rows of one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import duckdb

from gradtrace_analyzer.diff.code.structure import Structure
from gradtrace_analyzer.diff.difference import Difference, differences
from gradtrace_analyzer.diff.judging import Judged
from gradtrace_analyzer.diff.links import LINK_TABLES, LINKS
from gradtrace_analyzer.diff.pairing.tally import merged_spread
from gradtrace_analyzer.diff.pairing.whereabouts import whereabouts_sql

# Rows of one step that are looked at one by one. Where more differ, of each rank and table the first ones are, in
# program order, and the first of those beyond tolerance and of those that read nothing that differs.
MOST_DIFFERENCES = 20_000

# Of a table whose rows are of several kinds: the condition of those of one kind, and the key columns it asks for.
_OF_THE_SAME_KIND = {
    "node_events": ("t.node_name = ?", ("node_name",)),
    "module_calls": (
        "t.module_class = (SELECT any_value(module_class) FROM baseline.module_calls "
        "WHERE root = ? AND module_fqn = ?)",
        ("root", "module_fqn"),
    ),
}


class JudgedRows:
    """The rows of what was `judged`, on the connection that holds them. What was read of a step last is kept."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, judged: Judged) -> None:
        self.judged = judged
        self._connection = connection
        self._last: tuple[int, list[Difference]] | None = None
        self._crowd = 0
        self._modules: tuple[int, dict[tuple[int, int], set[str]]] | None = None

    @property
    def structure(self) -> Structure:
        """What one side alone has."""
        return self.judged.structure

    def first_step(self, *, exceeding: bool) -> int | None:
        """The first step with a difference, or with one that exceeds its tolerance."""
        condition = "WHERE exceeds" if exceeding else ""
        steps = [
            self._number(f"SELECT min(step) FROM differing_{t.table} {condition}")
            for t in LINK_TABLES
        ]
        return min((s for s in steps if s is not None), default=None)

    def differences_at(self, step: int) -> list[Difference]:
        """All differences of one step, in program order within each rank."""
        if self._last is not None and self._last[0] == step:
            return self._last[1]
        found: list[Difference] = []
        crowd = self._crowd = sum(
            self._number(f"SELECT count(*) FROM differing_{table.table} WHERE step = ?", [step])
            for table in LINK_TABLES
        )
        most = max(20, MOST_DIFFERENCES // (3 * len(self.judged.index.ranks)))
        for table in LINK_TABLES:
            reads = "reads_differs" if table.reads is not None else "false"
            ordinal = "row_number() OVER (PARTITION BY rank, {} ORDER BY place)"
            cursor = self._connection.execute(
                f"SELECT * FROM differing_{table.table} WHERE step = ?"
                + (
                    f" QUALIFY {ordinal.format('0')} <= {most} OR {ordinal.format(reads)} <= {most} "
                    f"OR {ordinal.format('beyond')} <= {most}"
                    if crowd > MOST_DIFFERENCES
                    else ""
                ),
                [step],
            )
            names = [column[0] for column in cursor.description or ()]
            found += differences(table, names, cursor.fetchall())
        found.sort(key=lambda d: (d.rank, d.order))
        self._last = (step, found)
        return found

    def left_out(self, step: int) -> int:
        """How many differences that step has beyond those of `differences_at`."""
        return max(0, -len(self.differences_at(step)) + self._crowd)

    def equal_before(self, difference: Difference) -> int:
        """How many rows of its table and kind (class of Node or module) the rank had before it in that step, all
        equal."""
        same, names = _OF_THE_SAME_KIND.get(difference.table, ("true", ()))
        count: int = self._number(
            f"SELECT count(*) FROM baseline.{difference.table} t JOIN step_start s "
            "USING (rank, step) WHERE s.side = 'baseline' AND rank = ? AND step = ? "
            f"AND record_index - s.first < ? AND {same}",
            [
                difference.rank,
                difference.step,
                difference.order,
                *(difference.key.get(name) for name in names),
            ],
        )
        return count

    def spread(self) -> list[dict[str, Any]]:
        """For each rank and link: the first step that differs, and where; how many rows do, the largest error, how many
        have none (NaN on one side, or no tensor). In the order of ranks, steps and the chain."""
        rows: list[tuple[Any, ...]] = []
        for table in LINK_TABLES:
            point = "key_point" if "point" in table.key else "NULL"
            where = whereabouts_sql(table.table)
            rows += self._connection.execute(
                f"WITH g AS (SELECT rank, {point} AS point, min(step) AS step, count(*) AS n, max(error) AS error, "
                "bool_or(exceeds) AS is_beyond, count(*) FILTER (only_in IS NULL AND error IS NULL) AS unmeasured "
                f"FROM differing_{table.table} GROUP BY ALL) "
                f"SELECT g.rank, '{table.table}', g.point, g.step, any_value(n), any_value(g.error), "
                f"any_value(is_beyond), any_value(unmeasured), arg_min({where}, place) "
                f"FROM g JOIN differing_{table.table} d ON d.rank = g.rank AND d.step = g.step "
                f"AND {point} IS NOT DISTINCT FROM g.point GROUP BY ALL"
            ).fetchall()
        found = merged_spread(rows, self.judged.tallies)
        return sorted(found, key=lambda e: (e["rank"], e["first_step"], LINKS.index(e["link"])))

    def rng_to_blame(self, step: int) -> set[int]:
        """Ranks whose random generator stood elsewhere at this step's first forward, and at none before."""
        return {rank for rank, stretches in self._rng_apart.items() if stretches[0][0] == step}

    def rng_differs(self, step: int) -> set[int]:
        """Ranks whose random generator stood elsewhere at the step's first forward."""
        return {
            rank
            for rank, stretches in self._rng_apart.items()
            if any(first <= step <= last for first, last in stretches)
        }

    @cached_property
    def _rng_apart(self) -> dict[int, list[tuple[int, int]]]:
        """Of each rank the stretches of steps at whose first forward the generators stood elsewhere, in order."""
        rows = self._connection.execute(
            "SELECT rank, min(step), max(step) FROM (SELECT rank, step, "
            "step - row_number() OVER (PARTITION BY rank ORDER BY step) AS stretch "
            "FROM baseline.steps b JOIN candidate.steps c USING (rank, step) "
            "WHERE b.rng_fingerprint <> c.rng_fingerprint) GROUP BY rank, stretch ORDER BY 1, 2"
        ).fetchall()
        found: dict[int, list[tuple[int, int]]] = {}
        for rank, first, last in rows:
            found.setdefault(rank, []).append((first, last))
        return found

    def module_fqns(self, step: int, rank: int, root: int) -> set[str]:
        """The modules of a root that were called in a step."""
        if self._modules is None or self._modules[0] != step:
            rows = self._connection.execute(
                "SELECT rank, root, list(DISTINCT module_fqn) FROM baseline.module_calls WHERE step = ? GROUP BY ALL",
                [step],
            ).fetchall()
            self._modules = (step, {(rank, root): set(fqns) for rank, root, fqns in rows})
        return self._modules[1].get((rank, root), set())

    def abandoned_forwards(self, step: int, rank: int) -> tuple[int, int] | None:
        """How many of the step's forwards no backward pass followed, on both sides."""
        row: tuple[int, int] | None = self._connection.execute(
            "SELECT b.abandoned_forwards, c.abandoned_forwards FROM baseline.steps b "
            "JOIN candidate.steps c USING (rank, step) WHERE step = ? AND rank = ?",
            [step, rank],
        ).fetchone()
        return row

    def first_changed(self, step: int) -> Difference | None:
        """The first row of a step that changed code left on one side alone; None where it left none there."""
        row = self._connection.execute(
            "SELECT of_table, rank, step, place, only_in, module_fqn, node_name, phase, parameter_fqn "
            "FROM changed_code WHERE step = ? ORDER BY rank, place LIMIT 1",
            [step],
        ).fetchone()
        if row is None:
            return None
        table, rank, at, place, only_in, *names = row
        key = dict(zip(("module_fqn", "node_name", "phase", "parameter_fqn"), names, strict=True))
        point = {"gradients": "local", "parameters": "before"}.get(table)
        key |= {"point": point} if point is not None else {}
        return Difference(table, rank, at, float(place), only_in, key)

    def first_nonfinite(self) -> Difference | None:
        """The first pair, by step and program order, of which one side alone holds NaN or infinity, or row of one
        side alone that does."""
        first: Difference | None = None
        for table in LINK_TABLES:
            if not table.sides:
                continue
            apart = " OR ".join(
                f"(coalesce({role}_b_{s}, 0) > 0) <> (coalesce({role}_c_{s}, 0) > 0)"
                for role, _ in table.sides
                for s in ("nan_count", "inf_count")
            )
            cursor = self._connection.execute(
                f"SELECT * FROM differing_{table.table} WHERE {apart} "
                "ORDER BY step, place, rank LIMIT 1"
            )
            names = [column[0] for column in cursor.description or ()]
            for found in differences(table, names, cursor.fetchall()):
                if first is None or (found.step, found.order) < (first.step, first.order):
                    first = found
        return first

    def _number(self, query: str, parameters: Sequence[Any] = ()) -> Any:
        row = self._connection.execute(query, list(parameters)).fetchone()
        return row[0] if row else None
