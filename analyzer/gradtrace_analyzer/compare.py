"""Compares two opened runs: what can be compared, what differs, and what that means."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import duckdb

from gradtrace_analyzer.align import Alignment
from gradtrace_analyzer.by_stage import Stages, arrange, scheduled_otherwise
from gradtrace_analyzer.configuration import apart_in_configuration, changes_numbers
from gradtrace_analyzer.cover import (
    Cover,
    all_steps,
    asked_differently,
    cover_of,
    held,
    lacking_words,
    lost_rows,
    problems_of,
    setting,
    torn_ends,
)
from gradtrace_analyzer.database import connect_pair
from gradtrace_analyzer.diff import (
    Answer,
    Origin,
    Verdict,
    firsts,
    split_by_inheritance,
)
from gradtrace_analyzer.differences import Change, Difference
from gradtrace_analyzer.endings import endings
from gradtrace_analyzer.factors import likely_causes
from gradtrace_analyzer.failures import Failure
from gradtrace_analyzer.following import Split, origin_of_code, split
from gradtrace_analyzer.footers import row_counts, table_counts
from gradtrace_analyzer.likely_renames import Naming, settle_names
from gradtrace_analyzer.links import LINKS, LOCAL_LINKS
from gradtrace_analyzer.opening import Reading
from gradtrace_analyzer.pipelines import Place
from gradtrace_analyzer.progress import progress
from gradtrace_analyzer.renames import Rename
from gradtrace_analyzer.repeated import repeated
from gradtrace_analyzer.replayed import replayed
from gradtrace_analyzer.reports.failures import died_phrase
from gradtrace_analyzer.run import Run, ranks_phrase
from gradtrace_analyzer.skipped import skipped_batches
from gradtrace_analyzer.structure import Lone, Structure

_Place = TypeVar("_Place", Origin, Origin | None)

# Equal rows of the same kind in front of the first difference that prove a job reproducible on their own.
WITNESS_ROWS = 8

# What cannot differ by rounding: it is given to the step, not computed in it.
_GIVEN = frozenset({"parameters", "rng", "inputs", "structure"})


def compare(
    baseline: Run, candidate: Run, *, exact: bool = False, renames: Sequence[Rename] = ()
) -> Answer:
    """The answer of `analyzer diff`. With `exact` any changed bit is a difference.

    `renames` take names of the baseline to those of the candidate. Raises BadRename for one that does not fit.
    """
    runs = {"baseline": baseline, "candidate": candidate}
    ranks = sorted(set(baseline.ranks) & set(candidate.ranks))
    connection = connect_pair(baseline, candidate)
    try:
        naming = Naming()
        if ranks:
            may_guess = not asked_differently(runs)
            naming = settle_names(connection, ranks, renames, may_guess=may_guess)
        return _compared(connection, runs, ranks, exact, naming)
    finally:
        connection.close()


def _compared(
    connection: duckdb.DuckDBPyConnection,
    runs: Mapping[str, Run],
    ranks: Sequence[int],
    exact: bool,
    naming: Naming,
) -> Answer:
    with progress("reading how many rows there are"):
        counts = {side: row_counts(connection, run) for side, run in runs.items()}
    unread = {side: lost_rows(run, counts[side]) for side, run in runs.items()}
    torn = {side: torn_ends(connection, side, run) for side, run in runs.items()}
    stages: Stages | None = None
    lost = [place for places in unread.values() for place in places]
    if scheduled_otherwise(connection):
        stages = arrange(connection)
        counts = {side: table_counts(connection, side) for side in runs}
        ranks = stages.common
        lost = [
            (table, stage)
            for side, places in unread.items()
            for table, rank in places
            for stage in stages.of_rank(side, rank)
        ]
        torn = {
            side: {s: step for rank, step in ends.items() for s in stages.of_rank(side, rank)}
            for side, ends in torn.items()
        }
    alignment = Alignment(
        connection,
        Reading(runs, counts, are_arranged=stages is not None, are_renamed=bool(naming.renames)),
        ranks,
        lost,
        unmatched=not asked_differently(runs) and not any(map(problems_of, runs.values())),
        tells_structure=not asked_differently(runs),
        torn_ends=torn,
    )
    steps = alignment.steps()
    cover = cover_of(runs, ranks, steps, alignment.compared(), unread, stages)
    common = sorted({step for of_rank in steps["both"].values() for step in of_rank})
    configuration = apart_in_configuration(runs)
    failures = alignment.failures()
    structure = alignment.structure
    lone = [*_lone_ranks(cover), *structure.lone]

    def answer(
        verdict: Verdict,
        reason: str = "",
        *,
        origins: Sequence[Origin] = (),
        inherited: Sequence[Origin] = (),
        notes: Sequence[str] = (),
        first_bits: Origin | None = None,
    ) -> Answer:
        return Answer(
            verdict=verdict,
            reason=reason,
            origins=tuple(_on_ranks(_with_replays(connection, o), stages) for o in origins),
            inherited=tuple(_on_ranks(o, stages) for o in inherited),
            cover=cover,
            configuration=tuple(configuration),
            structure=tuple(lone),
            renames=naming.renames,
            likely_renames=naming.likely,
            causes=tuple(likely_causes(connection, runs, origins[0])) if origins else (),
            spread=tuple(
                alignment.spread() if stages is None else stages.spread(alignment.spread())
            ),
            notes=(
                *_itself(runs),
                *notes,
                *_counted(structure, alignment.counted_steps),
                *([] if stages is None else [stages.note()]),
                *_abandoned(alignment, origins),
                *_deaths(runs, origins),
                *(skipped_batches(connection) if origins and stages is None else ()),
            ),
            unseen=tuple(_unseen(runs, cover, origins[0], common) if origins else ()),
            first_bits=first_bits,
            failures=tuple(failures),
            repeated=tuple(repeated(connection, origins[0].step)) if origins else (),
            first_nonfinite=_on_ranks(_first_nonfinite(alignment, origins), stages),
        )

    nothing = _nothing_to_compare(runs, ranks, steps, alignment) or naming.unrelated
    if nothing is not None:
        return answer("incomparable", nothing)
    step = alignment.first_step(exceeding=False)
    failed = min((f.step for f in failures), default=None)
    if failed is not None and (step is None or failed < step):
        step = failed
    if step is None:
        if not cover.is_whole:
            return answer("incomparable", lacking_words(cover))
        notes = _rng_notes(alignment, common) if cover.has_fingerprints else []
        if structure.has_parameters:
            return answer("different", notes=notes)
        return answer("within_tolerance" if structure.lone else "identical", notes=notes)

    def places(step: int, *, exceeding: bool) -> tuple[list[Origin], list[Origin]]:
        return _places(alignment, step, failures, structure, common, exceeding=exceeding)

    origins, inherited = places(step, exceeding=False)
    reproducible = (
        not changes_numbers(configuration)
        and not structure.code
        and _is_reproducible(alignment, common, step, origins)
    )
    given = any(o.link in _GIVEN or o.difference.exceeds for o in origins if not o.code)
    if exact or reproducible or given or structure.has_parameters:
        return answer("different", origins=origins, inherited=inherited)
    step = alignment.first_step(exceeding=True)
    if step is None:
        return answer("within_tolerance", origins=origins, inherited=inherited)
    first_bits = origins[0]
    origins, inherited = places(step, exceeding=True)
    return answer("different", origins=origins, inherited=inherited, first_bits=first_bits)


def _on_ranks(origin: _Place, stages: Stages | None) -> _Place:
    """An origin with the candidate's ranks in place of the stages that were compared as such."""
    if stages is None or origin is None:
        return origin
    held = stages.ranks["candidate"]
    source = origin.source
    # Passes have been numbered by microbatch.
    key = {**origin.difference.key, "backward_index": None}
    return replace(
        origin,
        difference=replace(origin.difference, key=key),
        ranks=tuple(held[stage] for stage in origin.ranks),
        place=origin.place or Place(origin.ranks[0] % stages.count),
        source=None if source is None else (held[source[0]], source[1]),
    )


def _places(
    alignment: Alignment,
    step: int,
    failures: Sequence[Failure],
    structure: Structure,
    steps: Sequence[int],
    *,
    exceeding: bool,
) -> tuple[list[Origin], list[Origin]]:
    """(origins, what inherits from them) of a step; where all follows from changed code, that is the origin."""
    differences = alignment.differences_at(step)
    apart = Split(differences, [])
    if structure.code:
        apart = split(
            differences,
            structure,
            alignment.rng_differs(step),
            exceeding=exceeding,
            is_proven=any(earlier < step for earlier in steps),
        )
    failed = {f.rank: f for f in reversed(failures) if f.step == step}
    if apart.following and not apart.others and not failed:
        changed = alignment.first_changed(step)
        return [origin_of_code(structure, apart.following, changed, exceeding=exceeding)], []
    differences = apart.others
    modules = {
        d.rank: alignment.module_fqns(step, d.rank, d.key["root"])
        for d in _module_calls(differences)
    }
    forwards = any(d.table in ("inputs", "module_calls") for d in differences)
    # Two passes of a step may fail, one after another: the first is the reason.
    candidates = firsts(
        differences,
        # Parameters that one side alone has took random numbers: that the generators differ is no news.
        () if structure.has_parameters else alignment.rng_to_blame(step),
        modules,
        exceeding=exceeding,
        failures=failed,
        unused=alignment.unused_forwards(step) if forwards else {},
    )
    edges = alignment.stage_edges(step)
    travelled: list[Origin] = []
    if edges is not None:
        candidates, travelled = edges.placed(candidates, differences)
    origins, inherited = split_by_inheritance(candidates)
    return [_with_positions(alignment, o) for o in origins], [*inherited, *travelled]


def _with_replays(connection: duckdb.DuckDBPyConnection, origin: Origin) -> Origin:
    """The origin with what is known of running its Node again, where a Node gave another gradient."""
    if origin.link != "backward" or origin.between or origin.difference.table != "node_events":
        return origin
    return replace(origin, replays=replayed(connection, origin.difference, origin.ranks))


def _with_positions(alignment: Alignment, origin: Origin) -> Origin:
    """A Node's origin with those of its gradients that differ, where not all do; one alone gives the numbers."""
    d = origin.difference
    if d.table != "node_events" or None in d.event_indices:
        return origin
    direction = "grad_output" if origin.between else "grad_input"
    gradients, before, after = alignment.node_gradients(d, direction)
    if before != after:
        return replace(origin, gradient_counts=(before, after))
    apart = {n: g for n, g in enumerate(gradients) if g is not None and g.differs}
    if not apart or len(apart) == sum(g is not None for g in gradients):
        return origin
    change = next(iter(apart.values())) if len(apart) == 1 else origin.change
    count = sum(g is not None for g in gradients)
    return replace(origin, positions=tuple(apart), position_count=count, change=change)


def _first_nonfinite(alignment: Alignment, origins: Sequence[Origin]) -> Origin | None:
    """The first value that is not finite on one side alone, where the origins do not say so themselves."""
    d = alignment.first_nonfinite() if origins else None
    if d is None or any(o.difference.key == d.key and o.step == d.step for o in origins):
        return None
    reads = d.reads is not None and _finite_apart(d.reads)
    change = d.reads if reads else d.writes
    return Origin(d.link, d, (d.rank,), d.key.get("module_fqn"), change, between=reads)


def _finite_apart(change: Change) -> bool:
    sides = (change.baseline or {}, change.candidate or {})
    return any(
        bool(sides[0].get(count)) != bool(sides[1].get(count))
        for count in ("nan_count", "inf_count")
    )


def _itself(runs: Mapping[str, Run]) -> list[str]:
    a, b = runs["baseline"], runs["candidate"]
    if os.path.realpath(a.path) != os.path.realpath(b.path) or a.attempt != b.attempt:
        return []
    return ["Both sides are the same recording: it was compared with itself."]


def _abandoned(alignment: Alignment, origins: Sequence[Origin]) -> list[str]:
    """That one side gave up a forward where the other went on, for what it alone has."""
    for origin in origins:
        if origin.link != "structure":
            continue
        counts = alignment.abandoned_forwards(origin.step, origin.difference.rank)
        if counts is not None and counts[0] != counts[1]:
            before, after = (n or "none" for n in counts)
            return [
                f"In that step, rank {origin.difference.rank} made {before} "
                f"{'forward' if counts[0] == 1 else 'forwards'} in the baseline that no backward pass "
                f"followed, and {after} in the candidate."
            ]
    return []


def _counted(structure: Structure, count: int) -> list[str]:
    """That what one side alone has is not told of all steps, where it is told."""
    if not count or not structure.lone:
        return []
    which = "1 more step" if count == 1 else f"{count:,} more steps"
    return [
        f"What one side alone has was looked for in the steps that were opened; of {which} what differs was counted."
    ]


def _deaths(runs: Mapping[str, Run], origins: Sequence[Origin]) -> list[str]:
    """Where ranks of a side died: what others then failed or stopped with follows from that."""
    found = []
    for side, run in runs.items() if origins else ():
        if run.incomplete_ranks:
            found += [
                f"The {side}'s {died_phrase(e)}." for e in endings(run).of("died", "silent")[:4]
            ]
    return found


def _module_calls(differences: Sequence[Difference]) -> list[Difference]:
    """The first differing module call of each rank."""
    first: dict[int, Difference] = {}
    for difference in differences:
        if difference.table == "module_calls":
            first.setdefault(difference.rank, difference)
    return list(first.values())


def _is_reproducible(
    alignment: Alignment, steps: Sequence[int], step: int, origins: Sequence[Origin]
) -> bool:
    """The determinism witness: links gave bit-equal outputs from bit-equal inputs until here.

    A whole step before this one, on all ranks, is one; so are enough rows in this step.
    """
    if any(s < step for s in steps):
        return True
    return bool(origins) and all(
        alignment.equal_before(o.difference) >= WITNESS_ROWS for o in origins
    )


def _nothing_to_compare(
    runs: Mapping[str, Run],
    ranks: Sequence[int],
    steps: Mapping[str, Mapping[int, Sequence[int]]],
    alignment: Alignment,
) -> str | None:
    a, b = runs["baseline"], runs["candidate"]
    if not ranks:
        return f"no rank was recorded on both sides: {held(a.ranks)} against {held(b.ranks)}"
    if not steps["both"]:
        own = {side: all_steps(steps[side]) for side in runs}
        empty = [side for side, of_side in own.items() if not of_side]
        if empty:
            return (
                f"the {' and the '.join(empty)} {'holds' if len(empty) == 1 else 'hold'} no step yet: nothing was "
                "recorded before the job ended, or it has only just begun"
            )
        return (
            f"no step was recorded on both sides: {held(own['baseline'], 'step')} against "
            f"{held(own['candidate'], 'step')} (GRADTRACE_STEP_OFFSET shifts a resumed job's; GRADTRACE_STEPS chooses)"
        )
    if not alignment.summarised():
        return (
            "one side recorded neither values nor norms (GRADTRACE_SUMMARY=off, or nothing that could be "
            "summarised); names and times cannot tell whether the runs agree"
        )
    return None


# The tables that hold each link, as far as they can be left out by a setting.
_HELD_IN = (
    ("parameters", "parameters", "parameters"),
    ("inputs", "inputs", "inputs"),
    ("forward", "module_calls", "module outputs"),
    ("backward", "node_events", "gradients at the Nodes"),
    ("local_gradient", "gradients", "local gradients"),
)


def _unseen(
    runs: Mapping[str, Run], cover: Cover, origin: Origin, common: Sequence[int]
) -> list[str]:
    """What lies before an origin and was not compared: no sentence may call it equal."""
    before = LINKS.index(origin.link) if origin.link != "structure" else len(LINKS)
    found = [
        what
        for link, table, what in _HELD_IN
        if LINKS.index(link) < before and not cover.rows.get(table)
    ]
    chosen = [setting(run, "modules") for run in runs.values()]
    if any(chosen):
        found.append("modules outside the filter")
    if origin.link not in LOCAL_LINKS:
        seen = set(cover.ranks)
        unseen = {r for run in runs.values() for r in range(run.world_size or 0)} - seen
        if unseen:
            found.append(ranks_phrase(unseen))
    earlier = [step for step in common if step < origin.step]
    if origin.link == "parameters" and origin.step > 0 and origin.step - 1 not in earlier:
        found.append(f"step {origin.step - 1}")
    return found


def _lone_ranks(cover: Cover) -> list[Lone]:
    other = {"baseline": "candidate", "candidate": "baseline"}
    return [
        Lone(kind="rank", name=str(rank), only_in=other[side], ranks=(rank,))
        for side, missing in cover.missing_ranks.items()
        for rank in missing
    ]


def _rng_notes(alignment: Alignment, steps: Sequence[int]) -> list[str]:
    for step in steps:
        ranks = alignment.rng_differs(step)
        if ranks:
            return [
                f"The random generators differ from step {step} on ({ranks_phrase(ranks)}), "
                "but nothing that was recorded depends on them."
            ]
    return []
