"""The second and third stage: the steps that matter are opened, and what differs in them is judged.

Where all that may differ fits, it is opened at once. Else the sieve proposes the first step that differs, the first
beyond tolerance and the first with a value that is not finite, and these alone are; what the others hold is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import duckdb

from gradtrace_analyzer.diff.code.legal_changes import LossScale, SetAside
from gradtrace_analyzer.diff.code.structure import ModelNames, Structure, structure_of
from gradtrace_analyzer.diff.links import LINK_TABLES
from gradtrace_analyzer.diff.pairing.ignored_rows import ignore_rows
from gradtrace_analyzer.diff.pairing.opening import Opened, any_exceeds, open_steps
from gradtrace_analyzer.diff.pairing.pairs import leave_out
from gradtrace_analyzer.diff.pairing.sifting import grouped_by_step, sift
from gradtrace_analyzer.diff.pairing.step_index import StepIndex, step_index
from gradtrace_analyzer.diff.pairing.suspect_steps import RankStep
from gradtrace_analyzer.diff.pairing.tally import Tally, first_step, steps_of, tallied
from gradtrace_analyzer.diff.scope.selection import Selection
from gradtrace_analyzer.diff.scoping import Scope
from gradtrace_analyzer.diff.tolerances.judgement import Judgement
from gradtrace_analyzer.diff.tolerances.noise import Noise
from gradtrace_analyzer.failures.failed_passes import OneSidedFailure, one_sided_failures
from gradtrace_analyzer.numerics.tolerance import Rule
from gradtrace_analyzer.progress import progress

LoneRows = Mapping[tuple[str, int, int], int]


@dataclass(frozen=True)
class Judged:
    """What was judged, in the steps that are open: the tables `differing_<table>` hold their rows.

    `tallies` are of the steps that differ and are not open; `lone_rows` how many rows the baseline alone has, by table,
    rank and step, of all steps that were open at any time; `failures` exceptions that left a backward pass on one side
    alone.
    """

    index: StepIndex
    chosen: Selection
    rule: Rule
    structure: Structure = field(default_factory=Structure)
    aside: tuple[SetAside, ...] = ()
    scaled: tuple[LossScale, ...] = ()
    noise: Noise | None = None
    failures: tuple[OneSidedFailure, ...] = ()
    lone_rows: LoneRows = field(default_factory=dict)
    tallies: tuple[Tally, ...] = ()

    @property
    def counted_steps(self) -> int:
        """How many of the steps that differ are not opened, but only counted."""
        return len(steps_of(self.tallies))


@dataclass(frozen=True)
class _OfOpened:
    """What the judgement of opened steps alone has found; `first_told` is the first step of what is told although no
    row of it may be left."""

    structure: Structure
    lone_rows: LoneRows
    first_told: int | None


def judged(connection: duckdb.DuckDBPyConnection, scope: Scope, judgement: Judgement) -> Judged:
    """Open and judge the steps of a scope that matter."""
    chosen = scope.chosen
    index = step_index(
        connection,
        scope.pair,
        scope.ranks,
        unread=scope.unread,
        chosen=chosen,
        realigns=scope.counts_unmatched,
    )
    names, failures = ModelNames(connection), one_sided_failures(connection)

    def judge(opened: Opened) -> _OfOpened:
        return _judged(connection, scope, judgement, names, failures, opened)

    tallies: list[Tally] = []
    if index.fits:
        of_opened = judge(open_steps(connection, index, index.suspects))
        lone_rows = of_opened.lone_rows
    else:
        of_opened, lone_rows, tallies = _what_matters(connection, index, chosen, judgement, judge)
    return Judged(
        index,
        chosen,
        judgement.rule,
        of_opened.structure,
        tuple(judgement.aside),
        tuple(judgement.scaled),
        judgement.noise,
        tuple(_asked_for(failures, chosen)),
        lone_rows,
        tuple(tallies),
    )


def _judged(
    connection: duckdb.DuckDBPyConnection,
    scope: Scope,
    judgement: Judgement,
    names: ModelNames,
    failures: Collection[OneSidedFailure],
    opened: Opened,
) -> _OfOpened:
    chosen = scope.chosen
    lone_rows = {
        (table.table, rank, step): count
        for table in LINK_TABLES
        for rank, step, count in connection.execute(
            f"SELECT rank, step, count(*) FROM paired_{table.table} "
            f"WHERE only_in = 'baseline' AND {chosen.condition(table, 'key_')} GROUP BY rank, step"
        ).fetchall()
    }
    ignore_rows(connection, scope.torn_ends, unmatched=scope.counts_unmatched)
    judgement.write()
    # Casts and forwards that run again are no other code; what else changes nothing is told with the code.
    judgement.set_aside(known=True)
    structure = Structure()
    if scope.asks_alike:
        proves_names = opened.is_whole and scope.pair.has_same_names
        structure = structure_of(connection, names, failures, proves_names=proves_names)
    judgement.set_aside(known=False)
    # What changed code is can be told from all that differs alone: what was not asked for goes afterwards.
    for table in LINK_TABLES if not chosen.is_all else ():
        leave_out(
            connection, table.table, "not asked for", f"NOT ({chosen.condition(table, 'key_')})"
        )
    told = [*(a.first_step for a in judgement.aside), *(o.first_step for o in structure.one_sided)]
    return _OfOpened(structure, lone_rows, min((s for s in told if s is not None), default=None))


def _what_matters(
    connection: duckdb.DuckDBPyConnection,
    index: StepIndex,
    chosen: Selection,
    judgement: Judgement,
    judge: Callable[[Opened], _OfOpened],
) -> tuple[_OfOpened, LoneRows, list[Tally]]:
    """(what was found in the steps that were opened in the end, lone rows of all that were, tallies of the others)."""
    by_step = grouped_by_step(index.suspects)
    sifted = sift(connection, index, judgement.lower_bound(), chosen)
    tallies = list(sifted.tallies)
    # Each rank's first step, where it must be paired row by row, is opened beside every other: what one side alone has
    # from the first step on is changed code, and what it has in a later one happened there.
    anchors = sifted.unpaired & index.firsts
    lone_rows: dict[tuple[str, int, int], int] = {}

    def open_places(places: Collection[RankStep]) -> _OfOpened:
        found = judge(open_steps(connection, index, places, unjudged=sifted.unpaired))
        lone_rows.update(found.lone_rows)
        return found

    def open_all(steps: Collection[int]) -> _OfOpened:
        return open_places({*anchors, *(p for step in steps for p in by_step.get(step, ()))})

    told: set[int] = set()
    unpaired = len(sifted.unpaired)
    with progress("pairing the steps in which names or order differ", unpaired) as count:
        for portion in index.loads(sifted.unpaired):
            ranks = {rank for rank, _ in portion}
            found = open_places({*portion, *(a for a in anchors if a[0] in ranks)})
            told |= set() if found.first_told is None else {found.first_told}
            tallies += [
                t.where(t.among({step for rank, step in portion if rank == t.rank}))
                for t in tallied(connection)
            ]
            count(len(portion))
    matter = first_step(tallies) | first_step(tallies, "nonfinite")
    # Rows that were set aside leave no tally, and are told all the same.
    matter |= {min(told)} if told else set()
    found = open_all(matter)
    # Whether a step is beyond tolerance is judged where it is opened: the tally only proposes it.
    proposed = sorted(steps_of(tallies, "exceeds") - matter)
    if proposed and not any_exceeds(connection):
        for step in proposed:
            open_all([step])
            if any_exceeds(connection):
                matter.add(step)
                break
            tallies = [t.without({step}) for t in tallies]
            tallies += [t.where(t.among({step})) for t in tallied(connection)]
        found = open_all(matter)
    left = [t.without(matter) for t in tallies]
    return found, lone_rows, [t for t in left if len(t.steps)]


def _asked_for(
    failures: Collection[OneSidedFailure], chosen: Selection
) -> Collection[OneSidedFailure]:
    """Those of the ranks, steps and links that were asked for."""
    if chosen.modules or not chosen.wants_link("backward"):
        return ()
    return [f for f in failures if chosen.wants_rank(f.rank) and chosen.wants_step(f.step)]
