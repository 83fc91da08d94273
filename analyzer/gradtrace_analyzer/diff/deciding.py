"""The fourth stage: the facts of a comparison, the verdict that they allow, and the origins that go with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradtrace_analyzer.diff.comparison import Comparison
from gradtrace_analyzer.diff.covering import has_summaries
from gradtrace_analyzer.diff.divided.division import divisions
from gradtrace_analyzer.diff.divided.part_sums import PartSumComparison, PartSums
from gradtrace_analyzer.diff.explanations.registry import joins
from gradtrace_analyzer.diff.origin import CodeOrigin, Origin
from gradtrace_analyzer.diff.origins.first_differences import by_rank, first_origins
from gradtrace_analyzer.diff.origins.search import StepSearch
from gradtrace_analyzer.diff.scope.configuration import changes_numbers
from gradtrace_analyzer.diff.scope.cover import crash_words, lacking_words
from gradtrace_analyzer.diff.scope.limits import nothing_to_compare
from gradtrace_analyzer.diff.verdict import Decision, Facts, decision

# Equal rows of the same kind in front of the first difference that prove a job reproducible on their own.
WITNESS_ROWS = 8


@dataclass(frozen=True)
class Outcome:
    """The decision, and where the runs part: the origins, what ranks without one inherit, and the first difference of
    all, where the first origin is only the first beyond tolerance. `sums` were compared in place of rows."""

    decision: Decision
    origins: tuple[Origin, ...] = ()
    inherited: tuple[Origin, ...] = ()
    first_bits: Origin | None = None
    sums: PartSums | None = None


def outcome_of(c: Comparison) -> Outcome:
    """What a comparison comes to."""
    cannot = _cannot_compare(c)
    if cannot is not None:
        return Outcome(decision(Facts(cannot=cannot)))
    sums = _part_sums(c)
    if sums is not None:
        return _of_sums(c, sums)
    step = _first(c, exceeding=False)
    if step is None:
        return Outcome(decision(_facts_of_agreement(c)))
    search = _search(c, step, exceeding=False)
    beyond = _first(c, exceeding=True)
    by_bits = _is_decided_by_bits(c, step, search.first_origins, beyond)
    found = decision(
        Facts(
            differs=True,
            is_other_model=c.is_other_model,
            decided_by_bits=by_bits,
            is_beyond=beyond is not None,
        )
    )
    if found.verdict == "within_tolerance":
        return Outcome(found, tuple(search.first_origins))
    if found.place == "first" or beyond is None:
        origins, inherited = search.origins()
        return Outcome(found, tuple(origins), tuple(inherited))
    origins, inherited = _search(c, beyond, exceeding=True).origins()
    return Outcome(
        found,
        tuple(origins or search.first_origins),
        tuple(inherited),
        first_bits=search.first_origins[0],
    )


def _cannot_compare(c: Comparison) -> str | None:
    """Why nothing of the runs can be compared, where nothing can."""
    nothing = nothing_to_compare(
        c.scope.runs,
        c.scope.ranks,
        c.covered.steps,
        c.covered.cover,
        has_summaries=lambda: has_summaries(c.connection),
    )
    return nothing or c.scope.naming.unrelated


def _part_sums(c: Comparison) -> PartSums | None:
    """Sums over parts, where the work is divided otherwise and they are what can be compared; else None."""
    scope = c.scope
    # Stages that were arranged pair, and so do two models that are not the same one.
    if scope.stages is not None or c.is_other_model or scope.question.exact:
        return None
    if scope.chosen.modules or scope.chosen.links:
        return None
    # Where a step is the same on both sides, the work is divided in the same way.
    if len(scope.sizes) == 1 and c.judged.index.proves_any:
        return None
    parts = divisions(c.connection, scope.runs)
    if parts is None:
        return None
    return PartSumComparison(c.connection, parts, c.judged.rule, scope.question.scale).compared(
        c.covered.common
    )


def _of_sums(c: Comparison, sums: PartSums) -> Outcome:
    found = decision(Facts(sums_apart=sums.step is not None))
    if sums.step is None:
        return Outcome(found, sums=sums)
    modules = {0: c.rows.module_fqns(sums.step, min(c.scope.ranks), 0)}
    rows = by_rank(sums.differences, exceeding=True)
    origins = first_origins(rows, (), modules, exceeding=True)
    return Outcome(found, tuple(origins), sums=sums)


def _first(c: Comparison, *, exceeding: bool) -> int | None:
    """The first step with a difference, or with one beyond tolerance; a pass that failed on one side alone is both."""
    steps = [f.step for f in c.judged.failures]
    differing = c.rows.first_step(exceeding=exceeding)
    return min([*steps, *([] if differing is None else [differing])], default=None)


def _search(c: Comparison, step: int, *, exceeding: bool) -> StepSearch:
    return StepSearch(
        c.rows,
        c.reader(step),
        c.judged.failures,
        c.covered.common,
        joins=joins(),
        exceeding=exceeding,
    )


def _facts_of_agreement(c: Comparison) -> Facts:
    """The facts where no row differs."""
    cover = c.covered.cover
    unseen = None
    if not cover.is_whole:
        unseen = lacking_words(cover)
    elif len(raised := cover.raised) == 1:
        unseen = crash_words(cover, raised[0])
    return Facts(
        unseen=unseen,
        is_other_model=c.is_other_model,
        has_lone=bool(c.lone),
        has_aside=bool(c.judged.aside),
    )


def _is_decided_by_bits(
    c: Comparison, step: int, firsts: Sequence[Origin], beyond: int | None
) -> bool:
    """Whether the first step that differs is different whatever the tolerances: bits were asked for, the job proves to
    be reproducible, its repeats show no noise, or what it holds first is beyond tolerance at once."""
    judged = c.judged
    is_changed = (
        changes_numbers(c.scope.configuration)
        or bool(judged.structure.code)
        or any(a.kind == "optimizer kernel" for a in judged.aside)
        or bool(judged.scaled)
    )
    is_noisy = judged.noise is not None and not judged.noise.is_zero
    is_quiet = judged.noise is not None and judged.noise.is_zero
    return (
        c.scope.question.exact
        or (is_quiet and not is_changed)
        or (
            beyond == step
            and any(o.difference.exceeds for o in firsts if not isinstance(o, CodeOrigin))
        )
        or (not is_changed and not is_noisy and _is_reproducible(c, step, firsts))
    )


def _is_reproducible(c: Comparison, step: int, origins: Sequence[Origin]) -> bool:
    """The determinism witness: links gave bit-equal outputs from bit-equal inputs until here.

    A whole step before this one, on all ranks, is one; so are enough rows in this step.
    """
    if any(s < step for s in c.covered.common):
        return True
    return bool(origins) and all(c.rows.equal_before(o.difference) >= WITNESS_ROWS for o in origins)
