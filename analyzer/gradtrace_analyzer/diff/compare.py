"""Compares two opened runs: what can be compared, what differs, and what that means."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache

import duckdb

from gradtrace_analyzer.diff.align import Alignment
from gradtrace_analyzer.diff.answer import Answer, Verdict
from gradtrace_analyzer.diff.code.legal_changes import aside_sentence, scaled_sentence
from gradtrace_analyzer.diff.code.structure import OneSided, wants_one_sided
from gradtrace_analyzer.diff.difference import Change
from gradtrace_analyzer.diff.divided.by_stage import arrange, scheduled_otherwise
from gradtrace_analyzer.diff.divided.division import divisions, held_nowhere_else
from gradtrace_analyzer.diff.divided.part_sums import PartSumComparison, PartSums
from gradtrace_analyzer.diff.findings.annotations import equal_in_step, with_later_ranks, with_root
from gradtrace_analyzer.diff.findings.factor_causes import likely_causes
from gradtrace_analyzer.diff.findings.grounds import with_grounds
from gradtrace_analyzer.diff.findings.replays import replayed
from gradtrace_analyzer.diff.findings.rerun_nodes import repeated
from gradtrace_analyzer.diff.findings.skipped_batches import skipped_batches
from gradtrace_analyzer.diff.findings.unseen import unseen_before
from gradtrace_analyzer.diff.links import TABLE_NAMES
from gradtrace_analyzer.diff.names.likely_renames import Naming, settle_names
from gradtrace_analyzer.diff.names.renames import Rename, new_names
from gradtrace_analyzer.diff.notes import (
    abandoned,
    compared_with_itself,
    counted_only,
    deaths_of,
    joined_attempts,
    other_steps,
    partly_followed,
    rng_notes,
)
from gradtrace_analyzer.diff.origin import Origin
from gradtrace_analyzer.diff.origins.first_differences import by_rank
from gradtrace_analyzer.diff.origins.first_differences import first_origins as firsts_of
from gradtrace_analyzer.diff.origins.search import StepSearch
from gradtrace_analyzer.diff.origins.stage_edges import on_ranks
from gradtrace_analyzer.diff.origins.step_reader import StepReader
from gradtrace_analyzer.diff.pairing.opening import RunPair
from gradtrace_analyzer.diff.scope.configuration import apart_in_configuration, changes_numbers
from gradtrace_analyzer.diff.scope.cover import (
    Cover,
    asked_differently,
    cover_of,
    crash_words,
    lacking_words,
    lost_in,
    problems_of,
    torn_ends,
)
from gradtrace_analyzer.diff.scope.limits import nothing_to_compare
from gradtrace_analyzer.diff.scope.recorded import Recorded
from gradtrace_analyzer.diff.scope.selection import Selection
from gradtrace_analyzer.diff.scope.stages import Stages
from gradtrace_analyzer.diff.scope.step_alignment import StepAlignment, alignment_hint
from gradtrace_analyzer.diff.tolerances.judgement import Judgement
from gradtrace_analyzer.failures.crashes import crashes
from gradtrace_analyzer.progress import progress
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.sql.footers import row_counts, table_counts
from gradtrace_analyzer.sql.views import connect_pair
from gradtrace_analyzer.words.nouns import other_side

# Equal rows of the same kind in front of the first difference that prove a job reproducible on their own.
WITNESS_ROWS = 8


def compare(
    baseline: Run,
    candidate: Run,
    *,
    exact: bool = False,
    renames: Sequence[Rename] = (),
    chosen: Selection | None = None,
    with_chain: bool = False,
    precision: str | None = None,
    repeats: Sequence[Run] = (),
    scale: float = 1.0,
    aligned: StepAlignment | None = None,
    without: Collection[str] = (),
) -> Answer:
    """The answer of `analyzer diff`. With `exact` any changed bit is a difference.

    `renames` take names of the baseline to those of the candidate. Raises BadRename for one that does not fit.
    Only what is `chosen` is compared. `with_chain`, the answer holds the rows around the first origin. `repeats` are
    further runs of the baseline, from which noise is measured. `precision` is that of matrix products on one side
    where no record tells it; `scale` multiplies the tolerances, and it does `without` these allowances (`Judgement`).
    `aligned`, the candidate's steps are numbered as that says.
    """
    if aligned is not None:
        candidate = candidate.shifted(aligned.offset)
    wanted = chosen or Selection()
    runs = {"baseline": baseline, "candidate": candidate}
    ranks = sorted(filter(wanted.wants_rank, set(baseline.ranks) & set(candidate.ranks)))
    connection = connect_pair(baseline, candidate)
    try:
        naming = Naming()
        if ranks:
            may_guess = not asked_differently(runs)
            naming = settle_names(connection, ranks, renames, may_guess=may_guess)
        judgement = Judgement(
            connection,
            runs,
            precision=precision,
            repeats=repeats,
            exact=exact,
            scale=scale,
            is_step_alone=wanted.step is not None,
            without=without,
        )
        try:
            return _compared(
                connection, runs, ranks, exact, naming, wanted, with_chain, judgement, aligned
            )
        finally:
            judgement.close()
    finally:
        connection.close()


def _compared(
    connection: duckdb.DuckDBPyConnection,
    runs: Mapping[str, Run],
    ranks: Sequence[int],
    exact: bool,
    naming: Naming,
    chosen: Selection,
    with_chain: bool,
    judgement: Judgement,
    aligned: StepAlignment | None,
) -> Answer:
    with progress("reading how many rows there are"):
        counts = {side: row_counts(connection, run) for side, run in runs.items()}
    unread = {side: lost_in(connection, run) for side, run in runs.items()}
    torn = {side: torn_ends(connection, side, run) for side, run in runs.items()}
    stages: Stages | None = None
    lost = [place for places in unread.values() for place in places]
    sizes = {run.world_size for run in runs.values()}
    if scheduled_otherwise(connection, of_one_size=len(sizes) == 1 and None not in sizes):
        stages = arrange(connection)
        counts = {side: table_counts(connection, side, TABLE_NAMES) for side in runs}
        holders = stages.ranks["candidate"]
        ranks = [stage for stage in stages.common if chosen.wants_rank(holders[stage])]
        lost = [
            (table, stage)
            for side, places in unread.items()
            for table, rank in places
            for stage in stages.of_rank(side, rank)
        ]
        torn = {
            side: {s: of_rank for rank, of_rank in ends.items() for s in stages.of_rank(side, rank)}
            for side, ends in torn.items()
        }
    judgement.pair_repeats(
        is_arranged=stages is not None,
        new_names=new_names(connection) if naming.renames else {},
    )
    alignment = Alignment(
        connection,
        RunPair(
            runs,
            counts,
            are_arranged=stages is not None,
            are_renamed=bool(naming.renames),
            has_same_names=naming.is_same and stages is None,
        ),
        ranks,
        lost,
        unmatched=not asked_differently(runs) and not any(map(problems_of, runs.values())),
        tells_structure=not asked_differently(runs),
        torn_ends=torn,
        # Stages have been put in the place of ranks: those that were asked for are known.
        chosen=chosen if stages is None else replace(chosen, ranks=None),
        judgement=judgement,
    )
    recorded = Recorded(connection)
    steps = alignment.steps()
    cover = cover_of(
        runs,
        ranks,
        steps,
        alignment.compared(),
        unread,
        stages,
        chosen,
        aligned,
        {side: crashes(run) for side, run in runs.items()},
        recorded,
    )
    common = sorted({step for of_rank in steps["both"].values() for step in of_rank})
    configuration = apart_in_configuration(runs)
    failures = alignment.failures()
    structure = alignment.structure
    wanted = [entry for entry in structure.one_sided if wants_one_sided(chosen, entry)]
    lone = held_nowhere_else(connection, runs, wanted)
    is_other_model = any(entry.has_parameters for entry in lone)

    @cache
    def around(step: int) -> StepReader:
        return StepReader(connection, cover, step)

    def answer(
        verdict: Verdict,
        reason: str = "",
        *,
        origins: Sequence[Origin] = (),
        inherited: Sequence[Origin] = (),
        notes: Sequence[str] = (),
        first_bits: Origin | None = None,
        sums: PartSums | None = None,
    ) -> Answer:
        spread = alignment.spread()
        step = origins[0].step if origins else None
        differences = [] if step is None else alignment.differences_at(step)
        here = None if step is None else around(step)
        roots = {} if here is None else here.roots()
        are_sums = sums is not None
        origins = [
            _with_replays(
                connection, with_grounds(recorded, with_root(o, roots), are_sums=are_sums)
            )
            for o in (with_later_ranks(origins, spread) if origins and sums is None else origins)
        ]
        died = deaths_of(runs, cover, failures) if origins else []
        is_undone = bool(origins) and _is_undone(origins[0])
        chain = (
            here.chain_rows(origins[0].difference, differences)
            if here and with_chain and sums is None
            else ()
        )
        return Answer(
            verdict=verdict,
            reason=reason,
            origins=tuple(on_ranks(o, stages) for o in origins),
            inherited=tuple(on_ranks(with_root(o, roots), stages) for o in inherited),
            cover=cover,
            configuration=tuple(configuration),
            structure=(*_lone_ranks(cover), *lone),
            renames=naming.renames,
            likely_renames=naming.likely,
            causes=tuple(likely_causes(connection, runs, origins[0])) if origins else (),
            deaths=tuple(died if is_undone else ()),
            # Rows that do not pair one to one spread over everything.
            spread=()
            if sums is not None
            else tuple(spread if stages is None else stages.spread(spread)),
            rule=judgement.rule,
            noise=judgement.noise,
            sums=sums,
            aside=tuple(judgement.aside),
            scaled=tuple(judgement.scaled),
            notes=(
                *compared_with_itself(runs),
                *joined_attempts(runs, origins),
                *(other_steps(runs, cover, origins) if aligned is None else ()),
                *notes,
                *counted_only(structure, judgement.aside, alignment.counted_steps),
                *([] if stages is None else [stages.note()]),
                *(partly_followed(alignment, origins) if sums is None else ()),
                *abandoned(alignment, origins),
                *(() if is_undone else died),
                *(
                    skipped_batches(connection, inputs=alignment.may_differ("inputs"))
                    if origins and stages is None and sums is None
                    else ()
                ),
            ),
            unseen=tuple(
                unseen_before(runs, cover, origins[0], common, recorded.links(origins[0].step))
                if origins
                else ()
            ),
            first_bits=first_bits,
            failures=tuple(failures),
            repeated=tuple(repeated(connection, origins[0].step)) if origins else (),
            first_nonfinite=on_ranks(_first_nonfinite(alignment, origins, roots), stages),
            equal=(
                equal_in_step(differences, cover, here.modules(), roots, recorded.links(here.step))
                if here is not None and verdict == "different" and sums is None
                else {}
            ),
            chain=tuple(chain),
        )

    nothing = (
        nothing_to_compare(runs, ranks, steps, cover, has_summaries=alignment.summarised)
        or naming.unrelated
    )
    if nothing is not None:
        hint = None if aligned is not None or steps["both"] else alignment_hint(runs)
        return answer("incomparable", nothing, notes=[] if hint is None else [hint])
    notes = [scaled_sentence(judgement.scaled)] if judgement.scaled else []
    if judgement.aside:
        saw = recorded.both_in_any_step("gradients", "point = 'final'", "")
        notes += [aside_sentence(judgement.aside, sees_optimizer=saw)]
    # Stages that were arranged pair, and so do two models that are not the same one.
    is_divided = stages is None and not is_other_model and not (chosen.modules or chosen.links)
    if len(sizes) == 1 and alignment.proves_any:
        is_divided = (
            False  # where a step is the same on both sides, the work is divided in the same way
        )
    parts = divisions(connection, runs) if is_divided and not exact else None
    if parts is not None:
        sums = PartSumComparison(connection, parts, judgement.rule, judgement.scale).compared(
            common
        )
        if sums.step is None:
            return answer("within_tolerance", notes=notes, sums=sums)
        modules = {0: alignment.module_fqns(sums.step, min(ranks), 0)}
        found = firsts_of(by_rank(sums.differences, exceeding=True), (), modules, exceeding=True)
        return answer("different", origins=found, notes=notes, sums=sums)
    step = alignment.first_step(exceeding=False)
    failed = min((f.step for f in failures), default=None)
    if failed is not None and (step is None or failed < step):
        step = failed
    if step is None:
        if not cover.is_whole:
            return answer("incomparable", lacking_words(cover))
        if len(raised := cover.raised) == 1:
            return answer("incomparable", crash_words(cover, raised[0]))
        notes += rng_notes(alignment, common) if cover.has_fingerprints else []
        if is_other_model:
            return answer("different", notes=notes)
        if judgement.aside:
            return answer("within_tolerance", notes=notes)
        return answer("within_tolerance" if lone else "identical", notes=notes)

    def search(step: int, *, exceeding: bool) -> StepSearch:
        return StepSearch(alignment, around(step), failures, common, exceeding=exceeding)

    search_first = search(step, exceeding=False)
    first_origins = search_first.first_origins
    other_kernel = any(a.kind == "optimizer kernel" for a in judgement.aside)
    noisy = judgement.noise is not None and not judgement.noise.is_zero
    changed = (
        changes_numbers(configuration)
        or bool(structure.code)
        or other_kernel
        or bool(judgement.scaled)
        or noisy
    )
    reproducible = not changed and _is_reproducible(alignment, common, step, first_origins)
    beyond = alignment.first_step(exceeding=True)
    if failed is not None and (beyond is None or failed < beyond):
        beyond = failed
    quiet = judgement.noise is not None and judgement.noise.is_zero and not changed
    at_once = beyond == step and any(o.difference.exceeds for o in first_origins if not o.code)
    if exact or reproducible or quiet or at_once or is_other_model:
        origins, inherited = search_first.origins()
        return answer("different", origins=origins, inherited=inherited, notes=notes)
    if beyond is None:
        return answer("within_tolerance", origins=first_origins, notes=notes)
    origins, inherited = search(beyond, exceeding=True).origins()
    return answer(
        "different",
        origins=origins or first_origins,
        inherited=inherited,
        first_bits=first_origins[0],
        notes=notes,
    )


def _with_replays(connection: duckdb.DuckDBPyConnection, origin: Origin) -> Origin:
    """The origin with what is known of running its Node again, where a Node gave another gradient."""
    if origin.link != "backward" or origin.between or origin.difference.table != "node_events":
        return origin
    return replace(origin, replays=replayed(connection, origin.difference, origin.ranks))


def _first_nonfinite(
    alignment: Alignment, origins: Sequence[Origin], roots: Mapping[int, str]
) -> Origin | None:
    """The first value that is not finite on one side alone, where the origins do not say so themselves."""
    d = alignment.first_nonfinite() if origins else None
    if d is None or any(o.difference.key == d.key and o.step == d.step for o in origins):
        return None
    reads = d.reads is not None and _finite_apart(d.reads)
    change = d.reads if reads else d.writes
    if any(o.difference.table == "failures" for o in origins) and d.only_in is not None:
        return None  # what a failed pass left undone
    found = Origin(d.link, d, (d.rank,), d.key.get("module_fqn"), change, between=reads)
    return with_root(found, roots)


def _finite_apart(change: Change) -> bool:
    sides = (change.baseline or {}, change.candidate or {})
    return any(
        bool(sides[0].get(count)) != bool(sides[1].get(count))
        for count in ("nan_count", "inf_count")
    )


def _is_undone(origin: Origin) -> bool:
    """Whether it is something that one side did not come to do: a rank that died is then the cause."""
    waited = origin.failure is not None and origin.failure.row["node_name"] is None
    return waited or (origin.link == "structure" and not origin.code)


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


def _lone_ranks(cover: Cover) -> list[OneSided]:
    return [
        OneSided(kind="rank", name=str(rank), only_in=other_side(side), ranks=(rank,))
        for side, missing in cover.missing_ranks.items()
        for rank in missing
    ]
