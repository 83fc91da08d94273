"""The first stage: what of two runs is compared, and as what, before any row is paired."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import duckdb

from gradtrace_analyzer.diff.divided.by_stage import arrange, scheduled_otherwise
from gradtrace_analyzer.diff.links import LINK_TABLES, TABLE_NAMES
from gradtrace_analyzer.diff.names.likely_renames import Naming, settle_names
from gradtrace_analyzer.diff.names.renames import Rename, new_names
from gradtrace_analyzer.diff.pairing.run_pair import RunPair
from gradtrace_analyzer.diff.scope.configuration import apart_in_configuration
from gradtrace_analyzer.diff.scope.cover import asked_differently, lost_in, problems_of, torn_ends
from gradtrace_analyzer.diff.scope.question import Question
from gradtrace_analyzer.diff.scope.selection import Selection
from gradtrace_analyzer.diff.scope.stages import Stages
from gradtrace_analyzer.progress import progress
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.sql.footers import row_counts, table_counts

TornEnds = Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class Scope:
    """What is compared: these `ranks`, or, where there are `stages`, the stages of a pipeline in their place.

    `lost` are, by side, the (table, rank) of which rows were lost, `unread` the ranks (or stages) that are left out for
    it, by table. `torn_ends` are, by side, the ranks (or stages) that did not end their recording, each with the last
    steps that it reached: what is missing there is no difference. `new_names` are the candidate's names for those of
    the baseline; `configuration` is what is set otherwise, the most telling first.
    """

    question: Question
    runs: Mapping[str, Run]
    pair: RunPair
    ranks: tuple[int, ...]
    naming: Naming
    lost: Mapping[str, Sequence[tuple[str, int]]]
    unread: Mapping[str, frozenset[int]]
    torn_ends: Mapping[str, TornEnds]
    new_names: Mapping[str, str]
    configuration: tuple[Mapping[str, Any], ...] = ()
    stages: Stages | None = None

    @property
    def asks_alike(self) -> bool:
        """Whether both sides were asked to record the same: only then does what one side alone has say anything."""
        return not asked_differently(self.runs)

    @property
    def counts_unmatched(self) -> bool:
        """Whether what one side alone has is a difference: both were asked for the same, and no recorder gave up."""
        return self.asks_alike and not any(map(problems_of, self.runs.values()))

    @property
    def chosen(self) -> Selection:
        """What of the ranks that are compared was asked for; of stages, those that were asked for are known."""
        chosen = self.question.chosen
        return chosen if self.stages is None else replace(chosen, ranks=None)

    @property
    def sizes(self) -> set[int | None]:
        """The world sizes of both sides."""
        return {run.world_size for run in self.runs.values()}


def scope_of(
    connection: duckdb.DuckDBPyConnection,
    runs: Mapping[str, Run],
    question: Question,
    renames: Sequence[Rename] = (),
) -> Scope:
    """What of the views of both sides is compared; these are left with the candidate's names, and arranged by stage
    where the runs are pipelines that were scheduled otherwise. Raises BadRename."""
    both = set(runs["baseline"].ranks) & set(runs["candidate"].ranks)
    ranks = sorted(filter(question.chosen.wants_rank, both))
    naming = Naming()
    if ranks:
        may_guess = not asked_differently(runs)
        naming = settle_names(connection, ranks, renames, may_guess=may_guess)
    with progress("reading how many rows there are"):
        counts = {side: row_counts(connection, run) for side, run in runs.items()}
    lost = {side: lost_in(connection, run) for side, run in runs.items()}
    by_rank = Scope(
        question,
        runs,
        RunPair(runs, counts, are_renamed=bool(naming.renames), has_same_names=naming.is_same),
        tuple(ranks),
        naming,
        lost,
        _by_table(place for places in lost.values() for place in places),
        {side: torn_ends(connection, side, run) for side, run in runs.items()},
        new_names(connection) if naming.renames else {},
        tuple(apart_in_configuration(runs)),
    )
    of_one_size = len(by_rank.sizes) == 1 and None not in by_rank.sizes
    if scheduled_otherwise(connection, of_one_size=of_one_size):
        return _by_stage(by_rank, arrange(connection), connection)
    return by_rank


def _by_stage(scope: Scope, stages: Stages, connection: duckdb.DuckDBPyConnection) -> Scope:
    """The same with the stages of a pipeline, as the views are arranged by now, in the place of ranks."""
    holders = stages.ranks["candidate"]
    counts = {side: table_counts(connection, side, TABLE_NAMES) for side in scope.runs}
    return replace(
        scope,
        stages=stages,
        ranks=tuple(s for s in stages.common if scope.question.chosen.wants_rank(holders[s])),
        pair=replace(scope.pair, counts=counts, are_arranged=True, has_same_names=False),
        unread=_by_table(
            (table, stage)
            for side, places in scope.lost.items()
            for table, rank in places
            for stage in stages.of_rank(side, rank)
        ),
        torn_ends={
            side: {s: steps for rank, steps in ends.items() for s in stages.of_rank(side, rank)}
            for side, ends in scope.torn_ends.items()
        },
    )


def _by_table(places: Iterable[tuple[str, int]]) -> dict[str, frozenset[int]]:
    """Of (table, rank) the ranks of each table that is compared."""
    found: dict[str, set[int]] = {table.table: set() for table in LINK_TABLES}
    for table, rank in places:
        found.setdefault(table, set()).add(rank)
    return {table: frozenset(ranks) for table, ranks in found.items()}
