"""How much of each step differs, where its rows are counted and not kept: a few numbers a step, in arrays."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import duckdb
import numpy as np

from gradtrace_analyzer.diff.links import LINK_TABLES, LinkTable, link_of
from gradtrace_analyzer.diff.pairing.whereabouts import whereabouts_sql
from gradtrace_analyzer.numerics.arrays import Array

# What steps are counted in, whose rows are too many to be kept: per rank, step and table a few numbers.
_TALLY = (
    "SELECT rank, {point} AS point, step, count(*), max(error), bool_or({exceeds}), {nonfinite}, "
    "count(*) FILTER (only_in IS NULL AND error IS NULL), arg_min({where}, place) "
    "FROM {table} GROUP BY ALL ORDER BY rank, point, step"
)

_ARRAYS = ("steps", "rows", "errors", "exceeds", "nonfinite", "unmeasured", "places")


@dataclass(frozen=True)
class Tally:
    """The rows of a rank, of one table and point, that differ, by step: an element of each array is a step.

    `errors` are the largest relative errors, NaN where no row has one; `unmeasured` of the `rows` have none: NaN on one
    side, or no tensor. `places` say what the first row of a step is of, None where that is not known. Where a tally is
    not judged, `exceeds` says only that a row may be beyond its tolerance.
    """

    rank: int
    table: str
    point: str | None
    steps: Array
    rows: Array
    errors: Array
    exceeds: Array
    nonfinite: Array
    unmeasured: Array
    places: Array
    is_judged: bool = True

    def where(self, chosen: Array) -> Tally:
        """The same tally of those of its steps for which `chosen`, a bool array over its steps, is true."""
        if chosen.all():
            return self
        some: dict[str, Any] = {name: getattr(self, name)[chosen] for name in _ARRAYS}
        return replace(self, **some)

    def among(self, steps: Collection[int]) -> Array:
        """A bool array over its steps: which of them are among these."""
        return np.isin(self.steps, np.fromiter(steps, np.int64, len(steps)))

    def without(self, steps: Collection[int]) -> Tally:
        """The same tally without these steps; it may be left with none."""
        return self.where(~self.among(steps)) if steps else self


@dataclass
class SieveResult:
    """What the sieve found of one rank: the steps it tallied, and those that it could not pair."""

    rank: int
    tallies: list[Tally] = field(default_factory=list)
    unpaired: set[int] = field(default_factory=set)


def joined(parts: Sequence[Tally]) -> Tally:
    """Tallies of the same rank, table and point as one."""
    if len(parts) == 1:
        return parts[0]
    both: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS
    }
    return replace(parts[0], **both)


def tallied(
    connection: duckdb.DuckDBPyConnection,
    tables: Sequence[LinkTable] = LINK_TABLES,
    *,
    unjudged: Mapping[str, str] | None = None,
) -> list[Tally]:
    """Those of the opened steps, from their `differing_` tables; with `unjudged` from those that are paired, of which a
    row may exceed that counts as it is or fulfils that condition of its table."""
    found = []
    for table in tables:
        nonfinite = " OR ".join(
            f"(coalesce({role}_b_{s}, 0) > 0) <> (coalesce({role}_c_{s}, 0) > 0)"
            for role, _ in table.sides
            for s in ("nan_count", "inf_count")
        )
        query = _TALLY.format(
            point="key_point" if "point" in table.key else "NULL",
            table=f"{'differing' if unjudged is None else 'paired'}_{table.table}",
            exceeds="exceeds"
            if unjudged is None
            else f"given OR {unjudged.get(table.table, 'false')}",
            nonfinite=f"bool_or({nonfinite})" if nonfinite else "false",
            where=whereabouts_sql(table.table),
        )
        rows = connection.execute(query).fetchall()
        for (rank, point), of_point in groupby(rows, key=lambda row: row[:2]):
            steps, counts, errors, exceeds, apart, unmeasured, places = zip(
                *(row[2:] for row in of_point), strict=True
            )
            found.append(
                Tally(
                    rank,
                    table.table,
                    point,
                    np.array(steps),
                    np.array(counts),
                    np.array([np.nan if error is None else error for error in errors]),
                    np.array(exceeds, bool),
                    np.array([bool(is_apart) for is_apart in apart]),
                    np.array(unmeasured),
                    np.array(places, object),
                )
            )
    return found


def first_step(tallies: Iterable[Tally], what: str | None = None) -> set[int]:
    """The first step of all, or the first for which an array is true; no step where there is none."""
    kept = (t.steps if what is None else t.steps[getattr(t, what)] for t in tallies)
    firsts = [int(steps.min()) for steps in kept if len(steps)]
    return {min(firsts)} if firsts else set()


def steps_of(tallies: Iterable[Tally], what: str | None = None) -> set[int]:
    """All steps, or those for which an array is true."""
    found: set[int] = set()
    for t in tallies:
        found.update((t.steps if what is None else t.steps[getattr(t, what)]).tolist())
    return found


def merged_spread(
    rows: Iterable[tuple[Any, ...]], tallies: Iterable[Tally]
) -> list[dict[str, Any]]:
    """Of each rank and link the first step and what differs first in it, the number of rows, the largest error and how
    many have none, over both. Whether any is beyond tolerance is None where a step that may have one was not opened."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    told = [*rows, *(_told(t) for t in tallies if len(t.steps))]
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
    first = int(np.argmin(t.steps))
    errors = t.errors[~np.isnan(t.errors)]
    largest = float(errors.max()) if len(errors) else None
    exceeds = bool(t.exceeds.any())
    return (
        t.rank,
        t.table,
        t.point,
        int(t.steps[first]),
        int(t.rows.sum()),
        largest,
        exceeds if t.is_judged or not exceeds else None,
        int(t.unmeasured.sum()),
        t.places[first],
    )
