"""The one place that is asked whether both sides recorded something, before a sentence calls it equal.

A row of one side alone, or one without values, proves nothing equal: what is not held here is said not to be recorded,
or is not spoken of.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import duckdb

from gradtrace_analyzer.diff.links import LINK_TABLES, LinkTable
from gradtrace_analyzer.sql.views import text_literal
from gradtrace_analyzer.words.nouns import SIDES

# What a setting of an optimizer's group must hold to be one that was read.
_SET = "(learning_rate IS NOT NULL OR coalesce(hyperparameters, '{}') <> '{}')"


@dataclass(frozen=True)
class Rows:
    """Rows that a sentence rests on: those of a table in one step, on each of these ranks (None: on any).

    `values` is the prefix of the summary that they must hold, None where the rows themselves are enough. `equal` are
    columns with the value that they have; `among`, further conditions in SQL, `{side}` for the schema.
    """

    table: str
    step: int
    ranks: Collection[int] | None
    values: str | None = None
    equal: Mapping[str, Any] = field(default_factory=dict)
    among: str = "true"


class Recorded:
    """What both sides of a connection recorded, which must hold the schemas `baseline` and `candidate`."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection

    def both(self, rows: Rows) -> bool:
        """Whether both sides hold such rows, on each of the ranks."""
        return all(self._has(side, rows) for side in SIDES)

    def both_all(self, rows: Rows) -> bool:
        """Whether both sides hold such rows, and each of them has its values."""
        lone = f"count(*) > 0 AND count({rows.values}norm) = count(*)"
        everyone = replace(rows, values=None)
        return all(
            self._connection.execute(*_query(side, everyone, lone)).fetchone() == (True,)
            for side in SIDES
        )

    def _has(self, side: str, rows: Rows) -> bool:
        found = self._connection.execute(*_query(side, rows, "DISTINCT rank")).fetchall()
        return bool(found) and {rank for (rank,) in found} >= set(rows.ranks or ())

    def both_in_any_step(self, table: str, among: str, values: str) -> bool:
        """Whether both sides hold any such row with values, in a step that both recorded."""
        query = "SELECT 1 FROM {}.{} SEMI JOIN common USING (rank, step) WHERE {} AND {}norm IS NOT NULL LIMIT 1"
        return all(
            self._connection.execute(query.format(side, table, among, values)).fetchone()
            is not None
            for side in SIDES
        )

    def both_set(self, step: int, ranks: Collection[int] | None, fqn: str) -> bool:
        """Whether both sides recorded how the optimizer's group that holds a parameter was set."""
        return self.both(
            Rows(
                "optimizer_groups",
                step,
                ranks,
                among=f"{_SET} AND list_contains(parameter_fqns, {text_literal(fqn)})",
            )
        )

    def links(self, step: int, ranks: Collection[int] | None = None) -> set[str]:
        """The links of a step's chain of which both sides hold rows with values, on each of the ranks."""
        return {
            table.link_at(point)
            for table in LINK_TABLES
            # How an optimizer is set is no value of the step: `both_set` tells of it.
            if table.sides or table.holds is not None
            for point in table.each_point
            if self.both(_of_link(table, point, step, ranks))
        }

    def bit_for_bit(self) -> bool:
        """Whether of each table that holds values on both sides these have fingerprints: norms alone prove less."""
        return not any(
            self._any(side, table.table, f"{prefix}norm IS NOT NULL")
            and not self._any(side, table.table, f"{prefix}fingerprint IS NOT NULL")
            for table in LINK_TABLES
            for _, prefix in table.sides
            for side in SIDES
        )

    def without_values(self) -> list[str]:
        """The tables of which one side has rows, but values of none: their rows pair by name alone."""
        return [
            table.table
            for table in LINK_TABLES
            if table.sides
            and any(
                self._any(side, table.table, "true")
                and not any(
                    self._any(side, table.table, f"{prefix}norm IS NOT NULL")
                    for _, prefix in table.sides
                )
                for side in SIDES
            )
        ]

    def _any(self, side: str, table: str, condition: str) -> bool:
        query = f"SELECT 1 FROM {side}.{table} WHERE {condition} LIMIT 1"
        return self._connection.execute(query).fetchone() is not None


def _of_link(table: LinkTable, point: str | None, step: int, ranks: Collection[int] | None) -> Rows:
    """The rows of a link that hold something to compare."""
    among = "true" if table.holds is None else table.holds
    equal = {} if point is None else {"point": point}
    return Rows(table.table, step, ranks, table.writes, equal, among)


def _query(side: str, rows: Rows, what: str) -> tuple[str, dict[str, Any]]:
    terms = [f"step = {rows.step}", rows.among.replace("{side}", side)]
    terms += [f"{name} IS NOT DISTINCT FROM ${name}" for name in rows.equal]
    if rows.ranks is not None:
        terms.append(f"rank IN ({', '.join(map(str, rows.ranks)) or 'NULL'})")
    if rows.values is not None:
        terms.append(f"{rows.values}norm IS NOT NULL")
    return f"SELECT {what} FROM {side}.{rows.table} WHERE {' AND '.join(terms)}", dict(rows.equal)
