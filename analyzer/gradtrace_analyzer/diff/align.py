"""Two runs into pairs of rows, and of these the pairs that differ. Rows pair by what they are, not by when.

The SQL here reads the schemas `baseline` and `candidate` of a connection and leaves one temporary table per
link table; Python sees only the rows of one step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import duckdb

from gradtrace_analyzer.diff.code.structure import ModelNames, Structure, structure_of
from gradtrace_analyzer.diff.difference import Difference, differences
from gradtrace_analyzer.diff.links import LINK_TABLES, LINKS
from gradtrace_analyzer.diff.pairing.ignored_rows import ignore_rows
from gradtrace_analyzer.diff.pairing.opening import RunPair, StepOpener
from gradtrace_analyzer.diff.pairing.pairs import leave_unjudged
from gradtrace_analyzer.diff.pairing.tally import merged_spread, steps_of
from gradtrace_analyzer.diff.pairing.whereabouts import whereabouts_sql
from gradtrace_analyzer.diff.scope.selection import Selection
from gradtrace_analyzer.diff.tolerances.judgement import Judgement
from gradtrace_analyzer.failures.failed_passes import OneSidedFailure, one_sided_failures
from gradtrace_analyzer.words.nouns import SIDES

# Rows of one step that are looked at one by one. Where more differ, of each rank and table the first ones are, in
# program order, and the first of those beyond tolerance and of those that read nothing that differs.
MOST_DIFFERENCES = 20_000


class Alignment:
    """The pairs of two runs on one connection, which must hold the schemas `baseline` and `candidate`."""

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        reading: RunPair,
        ranks: Sequence[int],
        unread: Collection[tuple[str, int]] = (),
        *,
        unmatched: bool = True,
        tells_structure: bool = True,
        torn_ends: Mapping[str, Mapping[int, Sequence[int]]] | None = None,
        chosen: Selection | None = None,
        judgement: Judgement | None = None,
    ) -> None:
        """`unread` are the (table, rank) of which one side has lost rows: they are left out.

        Without `unmatched`, rows that one side alone has count for nothing: the sides were not asked for the
        same. With `tells_structure` what one side alone has is told, and changed code taken out of the differences.
        `torn_ends` are, by side, the ranks that did not end their recording, each with the last
        step it reached: what is missing at its end is no difference.
        """
        self._connection = connection
        self._reading = reading
        self._ranks = ranks
        self._chosen = chosen or Selection()
        self._judgement = judgement
        self._last: tuple[int, list[Difference]] | None = None
        self._crowd = 0
        self._modules: tuple[int, dict[tuple[int, int], set[str]]] | None = None
        self._unread = {
            table.table: ", ".join(str(rank) for name, rank in unread if name == table.table)
            for table in LINK_TABLES
        }
        self._alone: dict[tuple[str, int, int], int] = {}  # by table, rank and step
        self._unmatched = unmatched
        self._torn_ends = torn_ends or {}
        self._parts = ModelNames(connection)
        self._failures: list[OneSidedFailure] | None = None
        self._tells_structure = tells_structure
        self.structure = Structure()
        self._opening = StepOpener(
            connection,
            reading,
            ranks,
            self._unread,
            self._clean,
            realigns=unmatched,
            chosen=self._chosen,
            lower_bound=None if judgement is None else judgement.lower_bound,
        )

    def _clean(self, is_whole: bool) -> int | None:
        """Take out of the `differing_` tables what is no difference; `is_whole` as in `StepOpener`.

        Returns the first step of what is told although no row of it may be left.
        """
        connection = self._connection
        for table in LINK_TABLES:
            for *place, count in connection.execute(
                f"SELECT rank, step, count(*) FROM paired_{table.table} "
                f"WHERE only_in = 'baseline' AND {self._chosen.condition(table, 'key_')} GROUP BY rank, step"
            ).fetchall():
                self._alone[table.table, place[0], place[1]] = count
        ignore_rows(connection, self._torn_ends, unmatched=self._unmatched)
        judgement = self._judgement
        if judgement is None:
            leave_unjudged(connection)
        else:
            judgement.write()
            # Casts and forwards that run again are no other code; what else changes nothing is told with the code.
            judgement.set_aside(known=True)
        if self._tells_structure:
            self.structure = structure_of(
                connection,
                self._parts,
                self._all_failures(),
                proves_names=is_whole and self._reading.has_same_names,
            )
        if judgement is not None:
            judgement.set_aside(known=False)
        # What changed code is can be told from all that differs alone: what was not asked for goes afterwards.
        for table in LINK_TABLES if not self._chosen.is_all else ():
            connection.execute(
                f"DELETE FROM differing_{table.table} WHERE NOT ({self._chosen.condition(table, 'key_')})"
            )
        aside = judgement.aside if judgement is not None else []
        steps = [a.first_step for a in aside]
        steps += [
            lone.first_step for lone in self.structure.one_sided if lone.first_step is not None
        ]
        return min(steps, default=None)

    @property
    def counted_steps(self) -> int:
        """How many of the steps that differ are not opened, but only counted."""
        return len(steps_of(self._opening.tallies))

    def steps(self) -> dict[str, dict[int, list[int]]]:
        """Each rank's steps by where they were seen: `both`, `baseline`, `candidate` alone."""
        rows = self._connection.execute(
            "SELECT rank, step, bool_or(side = 'baseline'), bool_or(side = 'candidate') "
            "FROM seen GROUP BY rank, step ORDER BY rank, step"
        ).fetchall()
        found: dict[str, dict[int, list[int]]] = {"both": {}, "baseline": {}, "candidate": {}}
        for rank, step, in_baseline, in_candidate in rows:
            if not self._chosen.wants_step(step):
                continue
            where = "both" if in_baseline and in_candidate else None
            where = where or ("baseline" if in_baseline else "candidate")
            found[where].setdefault(rank, []).append(step)
        return found

    def compared(self) -> dict[str, int]:
        """Rows of the baseline that were held against one of the candidate, by table."""
        uneven = self._connection.execute(
            "SELECT DISTINCT rank FROM (SELECT rank, step FROM seen WHERE side = 'baseline' "
            "EXCEPT SELECT rank, step FROM common)"
        ).fetchall()
        by_step = {rank for (rank,) in uneven}
        counts = {}
        for table in LINK_TABLES:
            name = table.table
            unread = {int(rank) for rank in self._unread[name].split(",") if rank}
            asked = [rank for rank in self._ranks if rank not in unread]
            whole = [
                rank
                for rank in asked
                if rank not in by_step and not table.kinds and self._chosen.is_all
            ]
            counts[name] = sum(self._reading.counts["baseline"].of(name, rank) for rank in whole)
            rest = ", ".join(str(rank) for rank in asked if rank not in whole)
            if rest:
                counts[name] += self._number(
                    f"SELECT count(*) FROM baseline.{name} t SEMI JOIN common USING (rank, step) "
                    f"WHERE t.rank IN ({rest}) AND {table.only} AND {self._chosen.condition(table)}"
                )
            counts[name] -= sum(n for (of, _, _), n in self._alone.items() if of == name)
        return counts

    def summarised(self) -> bool:
        """Whether both sides have summaries of anything."""
        return all(
            any(
                self._any(f"{side}.{table.table}", f"{table.sides[-1][1]}norm IS NOT NULL")
                for table in LINK_TABLES
                if table.sides
            )
            for side in SIDES
        )

    def _any(self, table: str, condition: str) -> bool:
        return bool(
            self._connection.execute(
                f"SELECT 1 FROM {table} SEMI JOIN common USING (rank, step) WHERE {condition} LIMIT 1"
            ).fetchall()
        )

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
        most = max(20, MOST_DIFFERENCES // (3 * len(self._ranks)))
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
        kinds = {"node_events": "node_name", "module_calls": "module_class"}
        kind = kinds.get(difference.table)
        same = ""
        if kind is not None:
            value = (
                "?"
                if kind == "node_name"
                else f"(SELECT any_value({kind}) FROM baseline.module_calls WHERE root = ? AND module_fqn = ?)"
            )
            same = f" AND t.{kind} = {value}"
        parameters = {
            "node_events": [difference.key.get("node_name")],
            "module_calls": [difference.key.get("root"), difference.key.get("module_fqn")],
        }.get(difference.table, [])
        count: int = self._number(
            f"SELECT count(*) FROM baseline.{difference.table} t JOIN step_start s "
            "USING (rank, step) WHERE s.side = 'baseline' AND rank = ? AND step = ? "
            f"AND record_index - s.first < ?{same}",
            [difference.rank, difference.step, difference.order, *parameters],
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
        found = merged_spread(rows, self._opening.tallies)
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

    @property
    def proves_any(self) -> bool:
        """Whether digests prove some step of a rank equal on both sides."""
        return self._opening.proves_any

    def may_differ(self, table: str) -> bool:
        """Whether digests leave it open that a table differs in any step."""
        return self._opening.may_differ(table)

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

    def failures(self) -> list[OneSidedFailure]:
        """Exceptions that left a backward pass on one side alone."""
        chosen = self._chosen
        if chosen.modules or not chosen.wants_link("backward"):
            return []
        return [
            f
            for f in self._all_failures()
            if chosen.wants_rank(f.rank) and chosen.wants_step(f.step)
        ]

    def _all_failures(self) -> list[OneSidedFailure]:
        if self._failures is None:
            self._failures = one_sided_failures(self._connection)
        return self._failures

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
