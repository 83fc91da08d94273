"""How much of a step differs, where its rows are counted and not kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import duckdb

from gradtrace_analyzer.links import LINK_TABLES, LinkTable, link_of
from gradtrace_analyzer.whereabouts import whereabouts_sql

# What steps are counted in, whose rows are too many to be kept: per rank, step and table a few numbers.
_TALLY = (
    "SELECT rank, {point}, step, count(*), max(error), bool_or(exceeds), {nonfinite}, "
    "count(*) FILTER (only_in IS NULL AND error IS NULL), arg_min({where}, place) "
    "FROM differing_{table} GROUP BY ALL"
)


@dataclass
class Tally:
    """The rows of one step, table and point of a rank that differ.

    `unmeasured` of them have no relative error: NaN on one side, or no tensor. `place` says what the first of them is
    of, as far as it is known. Where a tally is not judged, `exceeds` says only that a row may be beyond its tolerance.
    """

    rank: int
    table: str
    point: str | None
    step: int
    rows: int
    largest_error: float | None
    exceeds: bool
    nonfinite: bool
    unmeasured: int = 0
    place: str | None = None
    is_judged: bool = True


@dataclass
class Sieved:
    """What the sieve found of one rank: the steps it tallied, and those that it could not pair."""

    rank: int
    tallies: list[Tally] = field(default_factory=list)
    unpaired: set[int] = field(default_factory=set)


def tallied(
    connection: duckdb.DuckDBPyConnection, tables: Sequence[LinkTable] = LINK_TABLES
) -> list[Tally]:
    """Those of the opened steps, from their `differing_` tables."""
    found = []
    for table in tables:
        nonfinite = " OR ".join(
            f"(coalesce({role}_b_{s}, 0) > 0) <> (coalesce({role}_c_{s}, 0) > 0)"
            for role, _ in table.sides
            for s in ("nan_count", "inf_count")
        )
        query = _TALLY.format(
            point="key_point" if "point" in table.key else "NULL",
            table=table.table,
            nonfinite=f"bool_or({nonfinite})" if nonfinite else "false",
            where=whereabouts_sql(table.table),
        )
        rows = connection.execute(query).fetchall()
        found += [
            Tally(rank, table.table, point, step, count, error, exceeds, bool(apart), *more)
            for rank, point, step, count, error, exceeds, apart, *more in rows
        ]
    return found


def merged_spread(
    rows: Iterable[tuple[Any, ...]], tallies: Iterable[Tally]
) -> list[dict[str, Any]]:
    """Of each rank and link the first step and what differs first in it, the number of rows, the largest error and how
    many have none, over both. Whether any is beyond tolerance is None where a step that may have one was not opened."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    told = [*rows, *(_told(t) for t in tallies)]
    for rank, table, point, step, count, error, exceeds, unmeasured, place in told:
        link = link_of(table, point)
        entry = found.setdefault(
            (rank, link),
            {"rank": rank, "link": link, "first_step": step, "row_count": 0, "largest_error": None,
             "unmeasured_count": 0, "beyond_tolerance": False, "place": None},
        )  # fmt: skip
        if step < entry["first_step"] or entry["place"] is None:
            entry["place"] = place
        entry["first_step"] = min(entry["first_step"], step)
        entry["row_count"] += count
        entry["unmeasured_count"] += unmeasured
        known = [e for e in (entry["largest_error"], error) if e is not None]
        entry["largest_error"] = max(known, default=None)
        either = (entry["beyond_tolerance"], exceeds)
        entry["beyond_tolerance"] = True if True in either else None if None in either else False
    return list(found.values())


def _told(t: Tally) -> tuple[Any, ...]:
    exceeds = t.exceeds if t.is_judged or not t.exceeds else None
    of = (t.rank, t.table, t.point, t.step)
    return (*of, t.rows, t.largest_error, exceeds, t.unmeasured, t.place)
