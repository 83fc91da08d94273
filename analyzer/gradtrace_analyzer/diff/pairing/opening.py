"""Which steps of which ranks a comparison opens, so that what it reads and holds does not grow with the run.

Digests come first: steps that they prove equal are never opened. Where more is left than fits, the sieve reads it
through and proposes the steps that matter: the first that differs, the first beyond tolerance, the first with a
value that is not finite. Only these are opened as tables that lie in memory; what the others hold is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import duckdb
import pyarrow as pa

from gradtrace_analyzer.diff.links import LINK_TABLES, LinkTable, link_of
from gradtrace_analyzer.diff.pairing.occurrences import forget_numbers, realign
from gradtrace_analyzer.diff.pairing.pairs import (
    differing,
    opened,
    other_values,
    place_among,
    seen,
    within,
)
from gradtrace_analyzer.diff.pairing.rows_of_part import RowsOfPart
from gradtrace_analyzer.diff.pairing.suspect_steps import PROVEN, RankStep, suspect_steps
from gradtrace_analyzer.diff.pairing.tally import SieveResult, Tally, first_step, steps_of, tallied
from gradtrace_analyzer.diff.scope.configuration import recorded_alike
from gradtrace_analyzer.diff.scope.selection import Selection
from gradtrace_analyzer.numerics.tolerance import LowerBound
from gradtrace_analyzer.progress import progress
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.sql.footers import Counts
from gradtrace_analyzer.sql.views import usable_cores
from gradtrace_analyzer.words.nouns import SIDES

# Rows of both sides that are opened at once without looking first: they take about 100 MB.
MOST_ROWS = 250_000


@dataclass(frozen=True)
class RunPair:
    """The two runs as they are read: `counts` are the rows of each side by table and rank.

    Where rows `are_arranged`, they are no longer those of the parts: these prove and hold nothing of a rank. Where they
    `are_renamed`, they are those of the parts with other names. With `has_same_names` no module or parameter has a name
    on one side alone, as far as was looked: fingerprints that agree are then of rows that pair.
    """

    runs: Mapping[str, Run]
    counts: Mapping[str, Counts]
    are_arranged: bool = False
    are_renamed: bool = False
    has_same_names: bool = False

    def closed(self, side: str, ranks: Iterable[int]) -> list[int]:
        """The ranks whose steps are all named by `steps`: they ended by themselves and lost nothing."""
        if self.are_arranged:
            return []
        run, counts = self.runs[side], self.counts[side]
        if run.history:
            return []  # an attempt before the newest was cut off, as a rule
        damaged = {d.part.rank for d in run.damaged}
        return [
            rank
            for rank in ranks
            if run.ranks[rank].is_complete
            and rank not in damaged
            and rank not in run.journals
            and not any((run.ranks[rank].facts.get("dropped") or {}).values())
            and counts.of("steps", rank) > 0
            and counts.of("steps", rank)
            == (run.ranks[rank].facts.get("recorded") or {}).get("steps")
        ]

    def parts(self, side: str, table: str, rank: int) -> list[RowsOfPart]:
        """The Parquet parts that hold a rank's rows of a table, in the order in which they were written."""
        return [
            RowsOfPart(part.path, of.run.step_shift, of.end)
            for of in self.runs[side].stretches
            for part in of.run.parts[table].get(rank, ())
        ]


class StepOpener:
    """Makes `seen`, `common` and, of the steps that matter, `opened`, `step_start` and the `paired_` tables.

    `clean` is called whenever these were made anew, before anything is counted in them; it is told whether all steps
    that may differ are open, and returns the first step of what it took out and tells all the same. `tallies` are
    those of the steps that differ and are not opened. With `realigns`, Nodes of a call that are not the same on both
    sides are numbered by what they are alike in. Of a run of which one step was `chosen`, that is opened, beside the
    first.
    """

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        reading: RunPair,
        ranks: Sequence[int],
        unread: Mapping[str, str],
        clean: Callable[[bool], int | None],
        *,
        realigns: bool = False,
        chosen: Selection | None = None,
        lower_bound: Callable[[], LowerBound] | None = None,
    ) -> None:
        self._connection, self._reading, self._unread, self._clean = (
            connection,
            reading,
            unread,
            clean,
        )
        self._is_alike = recorded_alike(reading.runs)
        self._chosen = chosen or Selection()
        self._lower_bound = lower_bound
        self._realigns = realigns
        self._unpaired: set[RankStep] = set()
        closed = {side: reading.closed(side, ranks) for side in SIDES}
        others = {side: [r for r in ranks if r not in set(closed[side])] for side in SIDES}
        with progress("reading which steps there are"):
            connection.execute(seen(closed, others))
            self._apart = self._suspects()
        self.tallies: list[Tally] = []
        places = set(self._apart)
        if self._rows(places) <= MOST_ROWS:
            self._open(places)
        else:
            self._open_what_matters(places)

    @property
    def proves_any(self) -> bool:
        """Whether digests prove some step of a rank equal."""
        row = self._connection.execute("SELECT count(*) FROM common").fetchone()
        return row is not None and row[0] > len(self._apart)

    def may_differ(self, table: str) -> bool:
        """Whether digests leave it open that a table differs in any step."""
        return any(table in tables for tables in self._apart.values())

    def reopen(self, places: Collection[RankStep]) -> None:
        """Open these steps and each rank's first, as far as both sides have them, in place of those that are open."""
        known = set(self._connection.execute("SELECT rank, step FROM common").fetchall())
        self._open(known & {*places, *self._firsts()})

    def _suspects(self) -> dict[RankStep, frozenset[str]]:
        """The steps that may differ, each with the tables in which it may."""
        found = suspect_steps(self._connection, self._reading.counts)
        if self._chosen.step is None:
            return found
        firsts = self._firsts()
        return {p: t for p, t in found.items() if p[1] == self._chosen.step or p in firsts}

    def _firsts(self) -> set[RankStep]:
        """Each rank's first step."""
        return set(
            self._connection.execute("SELECT rank, min(step) FROM common GROUP BY rank").fetchall()
        )

    def _rows(self, places: Collection[RankStep]) -> int:
        """About how many rows these steps have, on both sides together."""
        steps: dict[int, int] = {}
        for rank, _ in places:
            steps[rank] = steps.get(rank, 0) + 1
        return round(
            sum(
                counts.of(table.table, rank) * some / max(1, counts.of("steps", rank) or some)
                for counts in self._reading.counts.values()
                for table in LINK_TABLES
                for rank, some in steps.items()
            )
        )

    def _open(self, places: Collection[RankStep]) -> int | None:
        """Make the tables of these steps alone. Returns what `clean` does."""
        self._name_opened(places)
        self._name_unjudged(self._unpaired - set(places))
        if self._realigns:
            forget_numbers(self._connection)
        self._connection.execute(opened(places))
        for table in LINK_TABLES:
            make = differing(
                table,
                self._unread[table.table],
                self._apart_in(table, places),
                is_alike=self._is_alike,
            )
            self._connection.execute(make)
            # Where the code of a call was changed, its Nodes are not those of the same number.
            if table.table == "node_events" and self._realigns and realign(self._connection):
                self._connection.execute(make)
        place_among(self._connection)
        return self._clean(self._apart.keys() <= set(places))

    def _apart_in(self, table: LinkTable, places: Collection[RankStep]) -> Collection[RankStep]:
        """Those of these steps in which a table may differ."""
        if table.table not in PROVEN or not self._reading.has_same_names:
            return places
        return [p for p in places if table.table in self._apart.get(p, (table.table,))]

    def _name_opened(self, places: Collection[RankStep]) -> None:
        self._name("opened", places)

    def _name_unjudged(self, places: Collection[RankStep]) -> None:
        """Steps that are not open and may have rows that one side alone has: what changed code is must do without."""
        self._name("unjudged", places)

    def _name(self, table: str, places: Collection[RankStep]) -> None:
        columns = [[place[n] for place in places] for n in (0, 1)]
        self._connection.execute(
            f"CREATE OR REPLACE TEMP TABLE {table} AS "
            "SELECT unnest(?::INTEGER[]) AS rank, unnest(?::INTEGER[]) AS step",
            columns,
        )

    def _open_what_matters(self, suspects: set[RankStep]) -> None:
        by_step: dict[int, list[RankStep]] = {}
        for place in suspects:
            by_step.setdefault(place[1], []).append(place)
        tallies, unpaired = self._sieved(suspects)
        self._unpaired = unpaired
        anchors = self._anchors()
        told: set[int] = set()
        with progress("pairing the steps in which names or order differ", len(unpaired)) as count:
            for portion in self._loads(sorted(unpaired, key=lambda place: (place[1], place[0]))):
                ranks = {rank for rank, _ in portion}
                first_told = self._open({*portion, *(a for a in anchors if a[0] in ranks)})
                told |= set() if first_told is None else {first_told}
                tallies += [
                    t.where(t.among({step for rank, step in portion if rank == t.rank}))
                    for t in tallied(self._connection)
                ]
                count(len(portion))

        def open_steps(steps: Collection[int]) -> None:
            self._open({*anchors, *(place for step in steps for place in by_step.get(step, ()))})

        chosen = first_step(tallies) | first_step(tallies, "nonfinite")
        # Rows that were set aside leave no tally, and are told all the same.
        chosen |= {min(told)} if told else set()
        open_steps(chosen)
        # Whether a step is beyond tolerance is judged where it is opened: the tally only proposes it.
        proposed = sorted(steps_of(tallies, "exceeds") - chosen)
        if not self._any_exceeds():
            for step in proposed:
                open_steps([step])
                if self._any_exceeds():
                    chosen.add(step)
                    break
                tallies = [t.without({step}) for t in tallies]
                tallies += [t.where(t.among({step})) for t in tallied(self._connection)]
            if proposed:
                open_steps(chosen)
        self.tallies = [left for t in tallies if len((left := t.without(chosen)).steps)]

    def _anchors(self) -> set[RankStep]:
        """Each rank's first step, where it must be paired row by row: it is opened beside every other, since what
        one side alone has from the first step on is changed code, and what it has in a later one happened there."""
        return self._unpaired & self._firsts()

    def _any_exceeds(self) -> bool:
        return any(
            self._connection.execute(
                f"SELECT 1 FROM differing_{table.table} WHERE exceeds LIMIT 1"
            ).fetchall()
            for table in LINK_TABLES
        )

    def _sieved(self, suspects: set[RankStep]) -> tuple[list[Tally], set[RankStep]]:
        """(tallies of the steps that pair by place, the steps that must be paired row by row)."""
        # Here, as it loads what reads Parquet, which few need.
        from gradtrace_analyzer.diff.pairing.sieve import sieved

        steps: dict[int, set[int]] = {}
        for rank, step in suspects:
            steps.setdefault(rank, set()).add(step)
        moved: dict[int, set[int]] = {}
        for rank, step in self._moved_between():
            moved.setdefault(rank, set()).add(step)
        lower_bound = LowerBound() if self._lower_bound is None else self._lower_bound()
        by_hand = {
            rank
            for side in self._reading.runs.values()
            for of in side.stretches
            for rank in of.run.journals
        }
        by_hand |= {
            int(rank)
            for ranks in self._unread.values()
            for rank in ranks.split(",")
            if rank.strip()
        }

        def sift(rank: int) -> SieveResult:
            # Which module a row is of is looked at where it is opened.
            is_other = self._reading.are_arranged or self._reading.are_renamed
            if rank in by_hand or is_other or self._chosen.modules:
                return SieveResult(rank, [], set(steps[rank]))
            parts = {
                table.table: (
                    self._reading.parts("baseline", table.table, rank),
                    self._reading.parts("candidate", table.table, rank),
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
            ThreadPoolExecutor(min(len(steps), _threads())) as pool,
        ):
            try:
                for found in pool.map(sift, sorted(steps)):
                    tallies += found.tallies
                    unpaired |= {(found.rank, step) for step in found.unpaired}
                    count(1)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        pa.default_memory_pool().release_unused()
        with progress("comparing losses and optimizer settings"):
            tallies += self._values_apart(suspects - unpaired, lower_bound)
        chosen = self._chosen
        wanted = [t for t in tallies if chosen.wants_link(link_of(t.table, t.point))]
        if chosen.step is not None:
            wanted = [t.where(t.steps == chosen.step) for t in wanted]
        by_rank: dict[int, set[int]] = {}
        for rank, step in unpaired:
            by_rank.setdefault(rank, set()).add(step)
        return [t.without(by_rank.get(t.rank, ())) for t in wanted], unpaired

    def _moved_between(self) -> list[RankStep]:
        """The steps before which a parameter is not what the step before left, on either side.

        The same digest before a step as after the last proves that it is; where buffers come between the parameters,
        or there is no step before, rows are looked at.
        """
        found: list[RankStep] = []
        for side in SIDES:
            places = self._connection.execute(
                f"SELECT rank, step FROM common ANTI JOIN (SELECT b.rank, b.step FROM {side}.steps b "
                f"JOIN {side}.steps a ON a.rank = b.rank AND a.step = b.step - 1 "
                "WHERE a.digest_optimizer = b.digest_parameters) same USING (rank, step)"
            ).fetchall()
            before = [(rank, step - 1) for rank, step in places]
            found += self._connection.execute(
                f"SELECT DISTINCT b.rank, b.step FROM {side}.parameters b LEFT JOIN (FROM {side}.parameters a "
                f"WHERE a.point = 'after' AND {within(before, 'a')}) a ON a.rank = b.rank AND a.root = b.root "
                "AND a.parameter_fqn = b.parameter_fqn AND a.step = b.step - 1 WHERE b.point = 'before' "
                f"AND b.kind = 'parameter' AND {within(places, 'b')} AND b.fingerprint IS DISTINCT FROM a.fingerprint"
            ).fetchall()
        return found

    def _values_apart(self, places: set[RankStep], lower_bound: LowerBound) -> list[Tally]:
        """Of the tables without summaries, which have few rows a step, the tallies of all steps."""
        found: list[Tally] = []
        names = [table for table in LINK_TABLES if not table.sides]
        apart = {t.table: set(self._connection.execute(other_values(t)).fetchall()) for t in names}
        places = places & {place for own in apart.values() for place in own}
        for portion in _portions(sorted(places), 50_000):
            self._name_opened(portion)
            self._connection.execute(
                "CREATE OR REPLACE TEMP TABLE step_start AS "
                "SELECT side, rank, step, 0::BIGINT AS first FROM seen SEMI JOIN opened USING (rank, step)"
            )
            for table in names:
                own = [place for place in portion if place in apart[table.table]]
                make = differing(table, self._unread[table.table], own, is_alike=self._is_alike)
                self._connection.execute(make)
            # A loss is judged where its step is open: here by what it is allowed at least.
            least = f"{lower_bound.forward(lower_bound.unit)!r}::DOUBLE"
            apart_by = {"backward_passes": f"losses_apart(value_b_loss, value_c_loss, {least})"}
            found += [
                replace(t, is_judged=False)
                for t in tallied(self._connection, names, unjudged=apart_by)
            ]
        return found

    def _loads(self, places: Sequence[RankStep]) -> Iterator[list[RankStep]]:
        """The steps in portions that may be open at once."""
        each = max(1, self._rows(places) // max(1, len(places)))
        yield from _portions(places, max(1, MOST_ROWS // each))


def _portions(places: Sequence[RankStep], size: int) -> Iterator[list[RankStep]]:
    for start in range(0, len(places), size):
        yield list(places[start : start + size])


def _threads() -> int:
    return min(8, usable_cores())
