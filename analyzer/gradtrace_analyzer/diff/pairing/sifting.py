"""What the steps hold that are too many to be opened: tallied a rank at a time, and those that do not pair by place.

Digests have left more steps than fit. The sieve reads them through, so that what is read and held does not grow with
the run; here it is asked for every rank, and what has no summaries is counted where it lies.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import duckdb
import pyarrow as pa

from gradtrace_analyzer.diff.links import LINK_TABLES, link_of
from gradtrace_analyzer.diff.pairing.opening import name_places
from gradtrace_analyzer.diff.pairing.pairs import other_values, pairing_of, within
from gradtrace_analyzer.diff.pairing.step_index import StepIndex, portions
from gradtrace_analyzer.diff.pairing.suspect_steps import RankStep
from gradtrace_analyzer.diff.pairing.tally import SieveResult, Tally, tallied
from gradtrace_analyzer.diff.scope.configuration import recorded_alike
from gradtrace_analyzer.diff.scope.selection import Selection
from gradtrace_analyzer.numerics.tolerance import LowerBound
from gradtrace_analyzer.progress import progress
from gradtrace_analyzer.sql.views import usable_cores
from gradtrace_analyzer.words.nouns import SIDES

# Steps of which losses and settings are held side by side at once.
_STEPS_AT_ONCE = 50_000


@dataclass(frozen=True)
class Sifted:
    """The `tallies` of the steps that pair by place, and the steps that must be paired row by row."""

    tallies: tuple[Tally, ...]
    unpaired: frozenset[RankStep]

    @property
    def by_step(self) -> dict[int, list[RankStep]]:
        """The unpaired steps of all ranks, by step."""
        return grouped_by_step(self.unpaired)


def sift(
    connection: duckdb.DuckDBPyConnection,
    index: StepIndex,
    lower_bound: LowerBound,
    chosen: Selection,
) -> Sifted:
    """Tally all suspect steps. What is beyond the `lower_bound` of what a rule can allow is proposed as exceeding."""
    tallies, unpaired = _sieved(connection, index, lower_bound, chosen)
    pa.default_memory_pool().release_unused()
    with progress("comparing losses and optimizer settings"):
        tallies += _values_apart(connection, index, index.suspects.keys() - unpaired, lower_bound)
    wanted = [t for t in tallies if chosen.wants_link(link_of(t.table, t.point))]
    if chosen.step is not None:
        wanted = [t.where(t.steps == chosen.step) for t in wanted]
    by_rank = grouped_by_rank(unpaired)
    return Sifted(tuple(t.without(by_rank.get(t.rank, ())) for t in wanted), frozenset(unpaired))


def grouped_by_step(places: Collection[RankStep]) -> dict[int, list[RankStep]]:
    """(rank, step) by step."""
    found: dict[int, list[RankStep]] = {}
    for place in places:
        found.setdefault(place[1], []).append(place)
    return found


def grouped_by_rank(places: Collection[RankStep]) -> dict[int, set[int]]:
    """The steps of each rank."""
    found: dict[int, set[int]] = {}
    for rank, step in places:
        found.setdefault(rank, set()).add(step)
    return found


def _sieved(
    connection: duckdb.DuckDBPyConnection,
    index: StepIndex,
    lower_bound: LowerBound,
    chosen: Selection,
) -> tuple[list[Tally], set[RankStep]]:
    # Here, as it loads what reads Parquet, which few need.
    from gradtrace_analyzer.diff.pairing.sieve import sieved

    pair = index.pair
    steps = grouped_by_rank(index.suspects)
    moved = grouped_by_rank(_moved_between(connection))
    by_hand = pair.in_journals.union(*index.unread.values())
    # Which module a row is of is looked at where it is opened.
    is_other = pair.are_arranged or pair.are_renamed or bool(chosen.modules)

    def of_rank(rank: int) -> SieveResult:
        if rank in by_hand or is_other:
            return SieveResult(rank, [], set(steps[rank]))
        parts = {
            table.table: (
                pair.parts("baseline", table.table, rank),
                pair.parts("candidate", table.table, rank),
            )
            for table in LINK_TABLES
        }
        return sieved(
            rank, parts, frozenset(steps[rank]), lower_bound, frozenset(moved.get(rank, ()))
        )

    tallies: list[Tally] = []
    unpaired: set[RankStep] = set()
    with (
        progress("comparing ranks", len(steps)) as count,
        ThreadPoolExecutor(min(len(steps), 8, usable_cores())) as pool,
    ):
        try:
            for found in pool.map(of_rank, sorted(steps)):
                tallies += found.tallies
                unpaired |= {(found.rank, step) for step in found.unpaired}
                count(1)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return tallies, unpaired


def _moved_between(connection: duckdb.DuckDBPyConnection) -> list[RankStep]:
    """The steps before which a parameter is not what the step before left, on either side.

    The same digest before a step as after the last proves that it is; where buffers come between the parameters,
    or there is no step before, rows are looked at.
    """
    found: list[RankStep] = []
    for side in SIDES:
        places = connection.execute(
            f"SELECT rank, step FROM common ANTI JOIN (SELECT b.rank, b.step FROM {side}.steps b "
            f"JOIN {side}.steps a ON a.rank = b.rank AND a.step = b.step - 1 "
            "WHERE a.digest_optimizer = b.digest_parameters) same USING (rank, step)"
        ).fetchall()
        before = [(rank, step - 1) for rank, step in places]
        found += connection.execute(
            f"SELECT DISTINCT b.rank, b.step FROM {side}.parameters b LEFT JOIN (FROM {side}.parameters a "
            f"WHERE a.point = 'after' AND {within(before, 'a')}) a ON a.rank = b.rank AND a.root = b.root "
            "AND a.parameter_fqn = b.parameter_fqn AND a.step = b.step - 1 WHERE b.point = 'before' "
            f"AND b.kind = 'parameter' AND {within(places, 'b')} AND b.fingerprint IS DISTINCT FROM a.fingerprint"
        ).fetchall()
    return found


def _values_apart(
    connection: duckdb.DuckDBPyConnection,
    index: StepIndex,
    places: Collection[RankStep],
    lower_bound: LowerBound,
) -> list[Tally]:
    """Of the tables without summaries, which have few rows a step, the tallies of all steps."""
    found: list[Tally] = []
    tables = [table for table in LINK_TABLES if not table.sides]
    apart = {t.table: set(connection.execute(other_values(t)).fetchall()) for t in tables}
    is_alike = recorded_alike(index.pair.runs)
    for portion in portions(
        sorted(set(places).intersection(set().union(*apart.values()))), _STEPS_AT_ONCE
    ):
        name_places(connection, "opened", portion)
        connection.execute(
            "CREATE OR REPLACE TEMP TABLE step_start AS "
            "SELECT side, rank, step, 0::BIGINT AS first FROM seen SEMI JOIN opened USING (rank, step)"
        )
        for table in tables:
            own = [place for place in portion if place in apart[table.table]]
            make = pairing_of(table, index.unread_sql(table.table), own, is_alike=is_alike)
            connection.execute(make)
        # A loss is judged where its step is open: here by what it is allowed at least.
        least = f"{lower_bound.forward(lower_bound.unit)!r}::DOUBLE"
        apart_by = {"backward_passes": f"losses_apart(value_b_loss, value_c_loss, {least})"}
        counted = tallied(connection, tables, unjudged=apart_by)
        found += [replace(t, is_judged=False) for t in counted]
    return found
