"""Two runs into pairs of rows, and of these the pairs that differ. Rows pair by what they are, not by when.

The SQL here reads the schemas `baseline` and `candidate` of a connection and leaves one temporary table per
link table; Python sees only the rows of one step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import duckdb

from gradtrace_analyzer.links import LINK_TABLES, LINKS, LinkTable, link_of
from gradtrace_analyzer.pairing import SEEN, STATISTICS, SUSPECTS, differing, digests_agree
from gradtrace_analyzer.tolerance import tolerance

# Rows of one step that are looked at one by one. Far more than any origin needs.
MOST_DIFFERENCES = 200_000


@dataclass(frozen=True)
class Change:
    """What one summary was on both sides. `error` is the relative error, None where finite values turned
    into non-finite ones, or one side has no summary. Statistics are None of a side that lacks the row."""

    differs: bool
    error: float | None
    tolerance: float
    baseline: Mapping[str, Any] | None
    candidate: Mapping[str, Any] | None

    def is_apart(self, *, exceeding: bool) -> bool:
        """Whether it differs; with `exceeding`, by more than rounding."""
        beyond = self.error is None or self.error > self.tolerance
        return self.differs and (beyond or not exceeding)

    @property
    def factor(self) -> float | None:
        """f where candidate = f x baseline within noise and f is not 1: from the sketches, which are linear."""
        if self.baseline is None or self.candidate is None:
            return None
        a, b = self.baseline.get("sketch"), self.candidate.get("sketch")
        if not a or not b or len(a) != len(b):
            return None
        square = sum(x * x for x in a)
        if square == 0 or not math.isfinite(square):
            return None
        factor = sum(x * y for x, y in zip(a, b, strict=True)) / square
        rest = math.sqrt(sum((y - factor * x) ** 2 for x, y in zip(a, b, strict=True)) / square)
        if not 1e-3 < abs(factor) < 1e3:
            return None  # unrelated values, such as memory that was never written
        # Another difference of the same size lies along the baseline this closely by chance about once in
        # a thousand times with 4 lanes, and far more rarely with 16.
        return factor if abs(factor - 1) > 1e-5 and rest < 0.05 * abs(factor - 1) else None


@dataclass(frozen=True)
class Difference:
    """A pair of rows that differ, or a row that one side alone has (`only_in`).

    `order` is the place in the rank's step, in program order; `exceeds`, whether it is more than rounding.
    """

    table: str
    rank: int
    step: int
    order: float
    only_in: str | None
    key: Mapping[str, Any]
    exceeds: bool = True
    event_index: int | None = None
    bucket_index: int | None = None
    reads: Change | None = None
    writes: Change | None = None
    values: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def link(self) -> str:
        """The link of the chain that the row stands for."""
        return link_of(self.table, self.key.get("point"))


class Alignment:
    """The pairs of two runs on one connection, which must hold the schemas `baseline` and `candidate`."""

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        ranks: Sequence[int],
        unread: Collection[tuple[str, int]] = (),
        *,
        unmatched: bool = True,
        torn_ends: Mapping[str, Mapping[int, int]] | None = None,
    ) -> None:
        """`unread` are the (table, rank) of which one side has lost rows: they are left out.

        Without `unmatched`, rows that one side alone has count for nothing: the sides were not asked for the
        same. `torn_ends` are, by side, the ranks that did not end their recording, each with the last
        step it reached: what is missing at its end is no difference.
        """
        self._connection = connection
        self._unread = {
            table.table: ", ".join(str(rank) for name, rank in unread if name == table.table)
            for table in LINK_TABLES
        }
        connection.execute(SEEN.format(ranks=", ".join(map(str, ranks)) or "NULL"))
        connection.execute(SUSPECTS.format(equal=digests_agree()))
        for table in LINK_TABLES:
            connection.execute(differing(table, self._unread[table.table]))
        # A gradient of zeros that is carried into a step is none: `zero_grad(set_to_none=False)`.
        connection.execute(
            "DELETE FROM differing_gradients WHERE only_in IS NOT NULL AND key_point = 'carried' "
            "AND coalesce(writes_b_abs_max, writes_c_abs_max) = 0 "
            "AND coalesce(writes_b_nan_count, writes_c_nan_count) = 0"
        )
        # Buckets of another size or order are no difference: parameters still pair by their gradients.
        connection.execute(
            "DELETE FROM differing_buckets d WHERE only_in IS NOT NULL AND EXISTS (SELECT 1 FROM "
            "(SELECT 'candidate' AS side, rank, step, backward_index FROM baseline.buckets UNION ALL "
            "SELECT 'baseline', rank, step, backward_index FROM candidate.buckets) o "
            "WHERE o.side = d.only_in AND o.rank = d.rank AND o.step = d.step "
            "AND o.backward_index = d.key_backward_index)"
        )
        other = {"baseline": "candidate", "candidate": "baseline"}
        for table in LINK_TABLES:
            name = f"differing_{table.table}"
            if not unmatched:
                connection.execute(f"DELETE FROM {name} WHERE only_in IS NOT NULL")
            for side, ends in (torn_ends or {}).items():
                for rank, step in ends.items():
                    connection.execute(
                        f"DELETE FROM {name} WHERE only_in = ? AND rank = ? AND step = ?",
                        [other[side], rank, step],
                    )

    def steps(self) -> dict[str, dict[int, list[int]]]:
        """Each rank's steps by where they were seen: `both`, `baseline`, `candidate` alone."""
        rows = self._connection.execute(
            "SELECT rank, step, bool_or(side = 'baseline'), bool_or(side = 'candidate') "
            "FROM seen GROUP BY rank, step ORDER BY rank, step"
        ).fetchall()
        found: dict[str, dict[int, list[int]]] = {"both": {}, "baseline": {}, "candidate": {}}
        for rank, step, in_baseline, in_candidate in rows:
            where = "both" if in_baseline and in_candidate else None
            where = where or ("baseline" if in_baseline else "candidate")
            found[where].setdefault(rank, []).append(step)
        return found

    def compared(self) -> dict[str, int]:
        """Rows of the baseline that had a step on the other side, by table."""
        counts = {}
        for table in LINK_TABLES:
            unread = self._unread[table.table]
            counts[table.table] = self._number(
                f"SELECT count(*) FROM baseline.{table.table} SEMI JOIN common USING (rank, step)"
                + (f" WHERE rank NOT IN ({unread})" if unread else "")
            )
        return counts

    def summarised(self) -> bool:
        """Whether both sides have summaries of anything."""
        return all(
            any(
                self._number(
                    f"SELECT count({table.sides[-1][1]}norm) FROM {side}.{table.table} "
                    "SEMI JOIN common USING (rank, step)"
                )
                for table in LINK_TABLES
                if table.sides
            )
            for side in ("baseline", "candidate")
        )

    def first_step(self, *, exceeding: bool) -> int | None:
        """The first step with a difference, or with one beyond tolerance.

        Parameters are not judged by tolerance: an adaptive optimizer makes a whole step of the last bit of
        a gradient.
        """
        condition = "WHERE exceeds" if exceeding else ""
        steps = [
            self._number(f"SELECT min(step) FROM differing_{t.table} {condition}")
            for t in LINK_TABLES
            if not (exceeding and t.table == "parameters")
        ]
        return min((s for s in steps if s is not None), default=None)

    def differences_at(self, step: int) -> list[Difference]:
        """All differences of one step, in program order within each rank."""
        found: list[Difference] = []
        for table in LINK_TABLES:
            cursor = self._connection.execute(
                f"SELECT * FROM differing_{table.table} WHERE step = ? ORDER BY place "
                f"LIMIT {MOST_DIFFERENCES}",
                [step],
            )
            names = [column[0] for column in cursor.description or ()]
            found += [
                _difference(table, dict(zip(names, row, strict=True))) for row in cursor.fetchall()
            ]
        found.sort(key=lambda d: (d.rank, d.order))
        return found

    def equal_before(self, difference: Difference) -> int:
        """How many rows of its table and kind the rank had before it in that step, all equal."""
        count: int = self._number(
            f"SELECT count(*) FROM baseline.{difference.table} t JOIN step_start s "
            "USING (rank, step) WHERE s.side = 'baseline' AND rank = ? AND step = ? "
            "AND record_index - s.first < ?",
            [difference.rank, difference.step, difference.order],
        )
        return count

    def spread(self) -> list[dict[str, Any]]:
        """For each rank and link: the first step that differs, how many rows do, the largest error. In the
        order of ranks, steps and the chain."""
        found = []
        for table in LINK_TABLES:
            point = "key_point" if "point" in table.key else "NULL"
            rows = self._connection.execute(
                f"SELECT rank, {point}, min(step), count(*), max(error), bool_or(exceeds) "
                f"FROM differing_{table.table} GROUP BY ALL"
            ).fetchall()
            found += [
                {
                    "rank": rank,
                    "link": link_of(table.table, name),
                    "first_step": first,
                    "row_count": count,
                    "largest_error": error,
                    "beyond_tolerance": beyond,
                }
                for rank, name, first, count, error, beyond in rows
            ]
        return sorted(found, key=lambda e: (e["rank"], e["first_step"], LINKS.index(e["link"])))

    def rng_to_blame(self, step: int) -> set[int]:
        """Ranks whose random generator stood elsewhere at this step's first forward, and at none before."""
        rows = self._connection.execute(
            "SELECT rank, min(step) FROM baseline.steps b JOIN candidate.steps c USING (rank, step) "
            "WHERE b.rng_fingerprint <> c.rng_fingerprint GROUP BY rank"
        ).fetchall()
        return {rank for rank, first in rows if first == step}

    def rng_differs(self, step: int) -> set[int]:
        """Ranks whose random generator stood elsewhere at the step's first forward."""
        rows = self._connection.execute(
            "SELECT rank FROM baseline.steps b JOIN candidate.steps c USING (rank, step) "
            "WHERE step = ? AND b.rng_fingerprint <> c.rng_fingerprint",
            [step],
        ).fetchall()
        return {rank for (rank,) in rows}

    def module_fqns(self, step: int, rank: int, root: int) -> set[str]:
        """The modules of a root that were called in a step."""
        rows = self._connection.execute(
            "SELECT DISTINCT module_fqn FROM baseline.module_calls "
            "WHERE step = ? AND rank = ? AND root = ?",
            [step, rank, root],
        ).fetchall()
        return {fqn for (fqn,) in rows}

    def lone_names(self) -> list[dict[str, str]]:
        """Modules and parameters that one side alone has, over all common steps."""
        found = []
        for kind, table, column in (
            ("module", "module_calls", "module_fqn"),
            ("parameter", "parameters", "parameter_fqn"),
        ):
            for side, other in (("baseline", "candidate"), ("candidate", "baseline")):
                rows = self._connection.execute(
                    f"SELECT DISTINCT {column} FROM {side}.{table} SEMI JOIN common USING (rank, step) "
                    f"EXCEPT SELECT DISTINCT {column} FROM {other}.{table} "
                    f"SEMI JOIN common USING (rank, step) ORDER BY 1"
                ).fetchall()
                found += [{"kind": kind, "name": name, "only_in": side} for (name,) in rows]
        return found

    def _number(self, query: str, parameters: Sequence[Any] = ()) -> Any:
        row = self._connection.execute(query, list(parameters)).fetchone()
        return row[0] if row else None


def _difference(table: LinkTable, row: Mapping[str, Any]) -> Difference:
    changes: dict[str, Change] = {}
    only_in = row["only_in"]
    for role, _ in table.sides:
        sides = {side: {s: row[f"{role}_{side}_{s}"] for s in STATISTICS} for side in ("b", "c")}
        baseline = None if only_in == "candidate" else sides["b"]
        candidate = None if only_in == "baseline" else sides["c"]
        dtypes = [sides[side]["dtype"] for side in ("b", "c")]
        changes[role] = Change(
            differs=bool(row[f"{role}_differs"]),
            error=row[f"{role}_error"],
            tolerance=max(tolerance(dtype, row["steps_before"]) for dtype in dtypes),
            baseline=baseline,
            candidate=candidate,
        )
    pairs = {v: (row[f"value_b_{v}"], row[f"value_c_{v}"]) for v in table.values}
    return Difference(
        table=table.table,
        rank=row["rank"],
        step=row["step"],
        order=float(row["place"]),
        only_in=only_in,
        key={k: row[f"key_{k}"] for k in table.key},
        exceeds=bool(row["exceeds"]),
        event_index=row.get("event_index"),
        bucket_index=row.get("bucket_index"),
        reads=changes.get("reads"),
        writes=changes.get("writes"),
        values={v: pair for v, pair in pairs.items() if not _same(*pair)},
    )


def _same(a: Any, b: Any) -> bool:
    both_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
    return both_nan or a == b
