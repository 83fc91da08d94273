"""What of two runs can be compared, what was compared, and what of it is missing, lost or was never recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import duckdb

from gradtrace_analyzer.diff.links import TABLE_NAMES
from gradtrace_analyzer.diff.scope.recorded import Recorded
from gradtrace_analyzer.diff.scope.selection import Selection
from gradtrace_analyzer.diff.scope.stages import Stages
from gradtrace_analyzer.diff.scope.step_alignment import StepAlignment
from gradtrace_analyzer.failures.crashes import Crash, crashes_sentence
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.sql.footers import Counts, attempt_counts
from gradtrace_analyzer.words.nouns import other_side
from gradtrace_analyzer.words.numbers import (
    StepsWords,
    StepWords,
    noun,
    ranks_phrase,
    spans,
    step_phrase,
    steps_phrase,
)


@dataclass(frozen=True)
class Cover:
    """What was compared, and what was not. `flights` are the steps that each side which is a flight recording has.

    `crashes` are the ranks of each side that were stopped before their end, `without_values` the tables whose rows pair
    by name alone. `has_fingerprints`: what agrees does so bit for bit.

    Where there are `stages`, what are called ranks here are the stages of a pipeline, which the sides have on ranks of
    their own; it gives the candidate's.
    """

    ranks: tuple[int, ...]
    steps: Mapping[int, tuple[int, ...]]
    rows: Mapping[str, int]
    missing_ranks: Mapping[str, tuple[int, ...]]
    missing_steps: Mapping[str, Mapping[int, tuple[int, ...]]]
    incomplete_ranks: Mapping[str, tuple[int, ...]]
    dropped: Mapping[str, Mapping[str, int]]
    unsummarised: Mapping[str, Mapping[str, int]]
    filters: Mapping[str, Mapping[str, Any]]
    unread: Mapping[str, tuple[tuple[str, int], ...]]
    problems: Mapping[str, tuple[str, ...]]
    has_fingerprints: bool = True
    flights: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    stages: Mapping[int, int] = field(default_factory=dict)
    world_size: int = 1
    selection: Selection = field(default_factory=Selection)
    alignment: StepAlignment | None = None
    crashes: Mapping[str, tuple[Crash, ...]] = field(default_factory=dict)
    without_values: tuple[str, ...] = ()

    @property
    def step_offset(self) -> int:
        """How much higher the candidate's steps are numbered here than by itself."""
        return 0 if self.alignment is None else self.alignment.offset

    @property
    def crashed(self) -> tuple[str, ...]:
        """The sides of which ranks were stopped before their end."""
        return tuple(side for side, found in self.crashes.items() if found)

    @property
    def raised(self) -> tuple[str, ...]:
        """Those of them where it is told what stopped a rank: an exception, or an exit."""
        return tuple(s for s in self.crashed if any(c.is_told for c in self.crashes[s]))

    @property
    def crashed_alike(self) -> bool:
        """Whether the same ranks of both sides were stopped by the same in the same step."""
        # Where a rank was holds times too, which are never alike.
        told = [
            [(crash.rank, crash.step, crash.ended) for crash in of_side]
            for of_side in self.crashes.values()
        ]
        return len(self.crashed) == 2 and told[0] == told[1]

    @property
    def by_stage(self) -> bool:
        """Whether stages were compared in place of ranks."""
        return bool(self.stages)

    @property
    def sees_all_ranks(self) -> bool:
        """Whether every rank of the job was compared, or every stage."""
        everyone = set(self.stages) if self.by_stage else set(range(self.world_size))
        return set(self.ranks) >= everyone

    @property
    def is_filtered(self) -> bool:
        """Whether modules or links were left out, when recording or now."""
        filtered = any("modules" in of_side for of_side in self.filters.values())
        return bool(filtered or self.selection.modules or self.selection.links)

    @property
    def is_whole(self) -> bool:
        """Whether both sides recorded the same ranks, nothing of it is lost, and no rank stopped before others
        or was cut off. (A run that was asked to make fewer steps is whole.)"""
        uneven = len({self.steps.get(rank, ()) for rank in self.ranks}) > 1
        cut_short = uneven or any(self.incomplete_ranks.values()) or bool(self.crashed)
        return not (
            any(self.missing_ranks.values())
            or any(self.unread.values())
            or any(self.problems.values())
            or (cut_short and any(self.missing_steps.values()))
        )


def lacking_words(cover: Cover, steps_words: StepsWords = steps_phrase) -> str:
    """What the cover lacks, as the reason of an answer that cannot be given; to be asked of one that is not whole.
    `steps_words` say steps."""
    lacking = [
        f"the {side} lacks {ranks_phrase(missing)}"
        for side, missing in cover.missing_ranks.items()
        if missing
    ] + [
        f"the {side} has lost rows of {table} of rank {rank}"
        for side, places in cover.unread.items()
        for table, rank in places
    ]
    lacking += [
        f"the recorder of the {side} gave up in part ({problems[0]})"
        for side, problems in cover.problems.items()
        if problems
    ]
    lacking += [
        f"the {side} lacks {steps_words(steps)} of rank {rank}"
        for side, by_rank in cover.missing_steps.items()
        for rank, steps in by_rank.items()
    ]
    return f"{' and '.join(lacking)}, of which nothing can be said"


def crash_words(cover: Cover, side: str, step_words: StepWords = step_phrase) -> str:
    """That one side alone crashed, as the reason of an answer that cannot be given. `step_words` say a step."""
    return (
        f"the {side} crashed ({crashes_sentence(cover.crashes[side], step_words)}) and the {other_side(side)} did not, "
        "so what would have come after cannot be compared"
    )


def cover_of(
    runs: Mapping[str, Run],
    ranks: Sequence[int],
    steps: Mapping[str, Mapping[int, Sequence[int]]],
    rows: Mapping[str, int],
    unread: Mapping[str, Sequence[tuple[str, int]]],
    stages: Stages | None = None,
    chosen: Selection | None = None,
    alignment: StepAlignment | None = None,
    crashed: Mapping[str, tuple[Crash, ...]] | None = None,
    recorded: Recorded | None = None,
) -> Cover:
    """The cover of a comparison of these ranks.

    `steps` are those of each rank by where they were seen (`both`, `baseline`, `candidate` alone), `rows` how many rows
    of each table were held against each other, `unread` the (table, rank) of each side of which rows were lost.
    """
    wanted = chosen or Selection()
    return Cover(
        ranks=tuple(ranks),
        steps={rank: tuple(of_rank) for rank, of_rank in steps["both"].items()},
        rows=rows,
        missing_ranks=_missing_ranks(runs, wanted, stages),
        missing_steps={
            side: {rank: tuple(own) for rank, own in steps[other_side(side)].items()}
            for side in runs
        },
        incomplete_ranks={
            side: tuple(filter(wanted.wants_rank, run.incomplete_ranks))
            for side, run in runs.items()
        },
        dropped={side: _counts(run, "dropped") for side, run in runs.items()},
        unsummarised={side: _counts(run, "unsummarised") for side, run in runs.items()},
        filters={side: _filters(run) for side, run in runs.items()},
        unread={
            side: tuple(place for place in places if wanted.wants_rank(place[1]))
            for side, places in unread.items()
        },
        problems={side: tuple(problems_of(run, wanted)) for side, run in runs.items()},
        flights={
            side: tuple(sorted({*all_steps(steps["both"]), *all_steps(steps[side])}))
            for side, run in runs.items()
            if run.flight_steps is not None
        },
        stages={} if stages is None else stages.ranks["candidate"],
        world_size=max((run.world_size or 1 for run in runs.values()), default=1),
        selection=wanted,
        alignment=alignment,
        has_fingerprints=_have_fingerprints(runs, recorded),
        crashes={
            side: tuple(one for one in of_side if wanted.wants_rank(one.rank))
            for side, of_side in (crashed or {}).items()
        },
        without_values=()
        if recorded is None
        else tuple(filter(rows.get, recorded.without_values())),
    )


def _missing_ranks(
    runs: Mapping[str, Run], wanted: Selection, stages: Stages | None
) -> dict[str, tuple[int, ...]]:
    """The ranks that were asked for and that each side lacks."""
    if stages is not None:
        # Only what its own side lacks: the other may have more ranks for the same stages.
        return {side: run.missing_ranks for side, run in runs.items()}
    everywhere = {rank for run in runs.values() for rank in run.ranks}
    if not _common_rank_filter(runs):
        everywhere |= {rank for run in runs.values() for rank in run.missing_ranks}
    asked = set(filter(wanted.wants_rank, everywhere))
    return {side: tuple(sorted(asked - set(run.ranks))) for side, run in runs.items()}


def _have_fingerprints(runs: Mapping[str, Run], recorded: Recorded | None) -> bool:
    """Whether what agrees does so bit for bit."""
    are_full = all(setting(run, "summary") in ("full", None) for run in runs.values())
    return are_full and (recorded is None or recorded.bit_for_bit())


def held(numbers: Sequence[int] | Mapping[int, Any], what: str = "rank") -> str:
    """`ranks 0-3`, `rank 1`, or `no rank`; `what` is the word for one of them."""
    return f"{noun(len(numbers), what)} {spans(numbers)}" if numbers else f"no {what}"


def all_steps(by_rank: Mapping[int, Sequence[int]]) -> list[int]:
    """The steps that any rank has, ascending, each once."""
    return sorted({step for of_rank in by_rank.values() for step in of_rank})


def setting(run: Run, name: str) -> Any:
    """A setting of the recorder, from the first rank that wrote its settings down; None where none did, or lacks it."""
    return _settings(run).get(name)


def _settings(run: Run) -> Mapping[str, Any]:
    return next((s for info in run.ranks.values() if (s := info.facts.get("settings"))), {})


def asked_differently(runs: Mapping[str, Run]) -> bool:
    """Whether the sides were told to record different things: then what one alone has says nothing."""
    return len({run.schema_version for run in runs.values()}) > 1 or any(
        len({str(setting(run, name)) for run in runs.values()}) > 1
        for name in ("detail", "summary", "modules")
    )


def problems_of(run: Run, chosen: Selection | None = None) -> list[str]:
    """What the recorder itself says went wrong, on any rank, or on those that were asked for."""
    wanted = chosen or Selection()
    return [
        f"rank {rank}: {text}"
        for rank, info in run.ranks.items()
        if wanted.wants_rank(rank)
        for text in info.facts.get("problems") or ()
    ]


def torn_ends(
    connection: duckdb.DuckDBPyConnection, side: str, run: Run
) -> dict[int, tuple[int, ...]]:
    """The last step that each rank reached which did not end its recording, in each attempt of which it is read."""
    found: dict[int, tuple[int, ...]] = {}
    tables = ("parameters", "module_calls", "node_events", "backward_passes")
    union = " UNION ALL ".join(
        f"SELECT step FROM {side}.{table} WHERE rank = $rank AND attempt = $attempt"
        for table in tables
    )
    for of in run.stretches:
        for rank in of.run.incomplete_ranks if of.reads_last else ():
            row = connection.execute(
                f"SELECT max(step) FROM ({union})", {"rank": rank, "attempt": of.run.attempt}
            ).fetchone()
            if row is not None and row[0] is not None:
                found[rank] = (*found.get(rank, ()), row[0])
    return found


def lost_in(connection: duckdb.DuckDBPyConnection, run: Run) -> list[tuple[str, int]]:
    """The `lost_rows` of all attempts that are read."""
    return sorted(
        {
            place
            for of in run.stretches
            for place in lost_rows(of.run, attempt_counts(connection, of.run))
        }
    )


def lost_rows(run: Run, counts: Counts) -> list[tuple[str, int]]:
    """(table, rank) of which rows that one attempt recorded are not there any more: lost or damaged parts."""
    found = {(d.part.table, d.part.rank) for d in run.damaged}
    for table in TABLE_NAMES:
        for rank, info in run.ranks.items():
            recorded = (info.facts.get("recorded") or {}).get(table, 0)
            if info.is_complete and counts.of(table, rank) < recorded:
                found.add((table, rank))
    return sorted(found)


def _common_rank_filter(runs: Mapping[str, Run]) -> bool:
    """Whether both sides were asked for the same ranks only: the others are missed by nobody. A rank that died before
    it wrote its settings down says nothing of them."""
    asked = [
        {
            str(settings.get("ranks"))
            for info in run.ranks.values()
            if (settings := info.facts.get("settings"))
        }
        for run in runs.values()
    ]
    return asked[0] == asked[1] and not asked[0] & {"[]", "None"} and bool(asked[0])


def _counts(run: Run, name: str) -> dict[str, int]:
    """Counts of all ranks' json, added up by reason."""
    total: dict[str, int] = {}
    for info in run.ranks.values():
        for reason, count in (info.facts.get(name) or {}).items():
            total[reason] = total.get(reason, 0) + count
    return total


def _filters(run: Run) -> dict[str, Any]:
    return {k: v for k, v in _settings(run).items() if k in ("steps", "ranks", "modules") and v}
