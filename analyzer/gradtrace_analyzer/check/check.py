"""Judges one opened run by the laws: gathers the evidence, runs each law, and says what was judged and what was not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gradtrace_analyzer.check.evidence import Evidence, gathered
from gradtrace_analyzer.check.law import Compression, Findings, Law, Violation
from gradtrace_analyzer.check.laws.accumulation import gradients_accumulate
from gradtrace_analyzer.check.laws.actions import actions_complete
from gradtrace_analyzer.check.laws.collectives import collectives_match
from gradtrace_analyzer.check.laws.equality import gradients_equal, parameters_equal
from gradtrace_analyzer.check.laws.finite import values_finite
from gradtrace_analyzer.check.laws.freshness import data_differ, forward_is_fresh
from gradtrace_analyzer.check.laws.handovers import handovers_equal
from gradtrace_analyzer.check.laws.microbatches import microbatches_add_up
from gradtrace_analyzer.check.laws.passes import (
    buckets_launched,
    last_pass_reduces,
    passes_complete,
    passes_match,
    wrapper_called,
)
from gradtrace_analyzer.check.laws.reductions import reduction_is_mean
from gradtrace_analyzer.check.laws.replays import replays_equal
from gradtrace_analyzer.runs.last_seen import last_seen
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.sql.views import connect
from gradtrace_analyzer.words.numbers import ranks_phrase

Verdict = Literal["clean", "violated", "incomparable"]

# What explains that ranks hold different buckets, gradients or parameters in the same step, the nearest cause first.
_CAUSES = {
    Law.GRADIENTS_EQUAL: (Law.COLLECTIVES_MATCH, Law.REDUCTION_IS_MEAN),
    Law.PARAMETERS_EQUAL: (
        Law.GRADIENTS_EQUAL,
        Law.REDUCTION_IS_MEAN,
        Law.COLLECTIVES_MATCH,
        Law.BUCKETS_LAUNCHED,
        Law.LAST_PASS_REDUCES,
        Law.WRAPPER_CALLED,
    ),
    Law.REDUCTION_IS_MEAN: (Law.COLLECTIVES_MATCH,),
}
_CAUSE_WORDS = {
    Law.GRADIENTS_EQUAL: "the gradients differ",
    Law.REDUCTION_IS_MEAN: "the reduction is not the mean",
    Law.COLLECTIVES_MATCH: "the reductions do not match",
    Law.BUCKETS_LAUNCHED: "not every bucket was launched",
    Law.LAST_PASS_REDUCES: "gradients were not reduced",
    Law.WRAPPER_CALLED: "gradients were not reduced",
}


@dataclass(frozen=True)
class Cover:
    """What was recorded, and what was not: an answer speaks of the former only."""

    ranks: tuple[int, ...]
    steps: Mapping[int, tuple[int, ...]]
    groups: tuple[Mapping[str, Any], ...]
    missing_ranks: tuple[int, ...]
    incomplete_ranks: tuple[int, ...]
    dropped: Mapping[str, int]
    unsummarised: Mapping[str, int]
    replay_skipped: Mapping[str, int]
    flight_steps: int | None
    settings: Mapping[str, Any]
    problems: tuple[str, ...]
    damaged: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """What a check has found, violations in causal order."""

    verdict: Verdict
    violations: tuple[Violation, ...]
    judged: Mapping[Law, int]
    not_judged: Mapping[Law, str]
    compression: tuple[Compression, ...]
    notes: tuple[str, ...]
    cover: Cover
    clean_counts: Mapping[str, int]


def check(run: Run, *, compressing: Sequence[str] = ()) -> Answer:
    """The answer of `analyzer check`. `compressing` are globs on the names of the job's own hooks that lose precision
    on purpose."""
    losing = frozenset(r for r, info in run.ranks.items() if info.facts.get("dropped"))
    losing |= {d.part.rank for d in run.damaged}
    closed = frozenset(r for r, info in run.ranks.items() if info.is_complete)
    connection = connect([run])
    try:
        evidence = gathered(connection, closed, losing, compressing, _seen_until_ns(run))
        findings = _judged(evidence)
        cover = _cover(run, evidence)
        counts = _counts(evidence)
    finally:
        connection.close()
    violations = _in_causal_order(v for f in findings for v in f.violations)
    judged = {law: n for f in findings for law, n in f.judged.items()}
    return Answer(
        verdict=_verdict(violations, judged),
        violations=violations,
        judged={law: judged[law] for law in Law if law in judged},
        not_judged={law: why for f in findings for law, why in f.not_judged.items()},
        compression=tuple(c for f in findings for c in f.compression),
        notes=tuple(note for f in findings for note in f.notes),
        cover=cover,
        clean_counts=counts,
    )


def _seen_until_ns(run: Run) -> dict[int, int]:
    found: dict[int, int] = {}
    for rank in run.incomplete_ranks:
        seen = last_seen(run, rank)
        if seen is not None:
            found[rank] = max(seen.moved_ns, seen.heartbeat_ns - seen.wall_start_ns)
    return found


def _judged(evidence: Evidence) -> list[Findings]:
    reductions = reduction_is_mean(evidence)
    return [
        data_differ(evidence),
        values_finite(evidence),
        forward_is_fresh(evidence),
        replays_equal(evidence),
        passes_complete(evidence),
        handovers_equal(evidence),
        actions_complete(evidence),
        gradients_accumulate(evidence),
        microbatches_add_up(evidence),
        wrapper_called(evidence),
        last_pass_reduces(evidence),
        passes_match(evidence),
        buckets_launched(evidence),
        collectives_match(evidence),
        reductions.findings,
        gradients_equal(evidence, reductions.deviating),
        parameters_equal(evidence),
    ]


def _verdict(violations: Sequence[Violation], judged: Mapping[Law, int]) -> Verdict:
    if any(v.severity == "error" for v in violations):
        return "violated"
    return "clean" if judged else "incomparable"


def _in_causal_order(found: Iterable[Violation]) -> tuple[Violation, ...]:
    """By step, then along the chain; what is inherited says so, and takes the odd rank from its cause."""
    violations = list(found)
    linked = [_linked(v, violations) for v in violations]

    def place(v: Violation) -> tuple[Any, ...]:
        in_front = v.at_start and v.inherits is None
        return (v.step, not in_front, v.law.chain_order, v.order, v.ranks)

    return tuple(sorted(linked, key=place))


def _linked(v: Violation, violations: Sequence[Violation]) -> Violation:
    if v.at_start:
        return v
    for law in _CAUSES.get(v.law, ()):
        for cause in violations:
            if cause.law is law and cause.step == v.step and _same_group(cause, v):
                rank = v.rank if v.rank is not None else _blamed(v, violations)
                odd = f" (on rank {rank})" if rank is not None and v.rank is None else ""
                said = f"It follows from the above: {_CAUSE_WORDS[law]}{odd}."
                return replace(v, inherits=law, rank=rank, explanation=f"{v.explanation} {said}")
    return v


def _blamed(v: Violation, violations: Sequence[Violation]) -> int | None:
    """The rank that other laws single out in the same step."""
    named = {
        w.rank
        for w in violations
        if w.law in (Law.COLLECTIVES_MATCH, Law.REDUCTION_IS_MEAN, Law.GRADIENTS_EQUAL)
        and w.step == v.step
        and _same_group(w, v)
        and w.rank is not None
    }
    return named.pop() if len(named) == 1 else None


def _same_group(a: Violation, b: Violation) -> bool:
    return a.group is None or b.group is None or a.group == b.group


def _counts(evidence: Evidence) -> dict[str, int]:
    """How many parameters and steps the sentence of a clean run speaks of."""
    tables = {row[0] for row in evidence.rows("SHOW TABLES")}
    if "parameter_groups" not in tables:
        return {"parameters": 0, "steps": 0}
    [(parameters, steps)] = evidence.rows(
        "SELECT count(DISTINCT (replica, parameter_fqn)), count(DISTINCT step) FROM parameter_groups"
    )
    return {"parameters": parameters, "steps": steps}


def _cover(run: Run, evidence: Evidence) -> Cover:
    tables = ("steps", "parameters", "backward_passes", "module_calls", "buckets", "gradients")
    union = " UNION ".join(f"SELECT rank, step FROM {table}" for table in tables)
    steps: dict[int, list[int]] = dict(
        evidence.rows(f"SELECT rank, list(step ORDER BY step) FROM ({union}) GROUP BY 1 ORDER BY 1")
    )
    settings: dict[str, Any] = {}
    for info in run.ranks.values():
        settings.update(info.facts.get("settings") or {})
    return Cover(
        ranks=tuple(sorted(run.ranks)),
        steps={rank: tuple(own) for rank, own in steps.items()},
        groups=tuple(
            {
                "group": r.group,
                "ranks": list(r.ranks),
                "recorded": list(r.recorded),
                "root": r.root,
                "module_fqn": r.module_fqn,
                "unobserved": r.unobserved,
            }
            for r in evidence.replicas
        ),
        missing_ranks=run.missing_ranks,
        incomplete_ranks=run.incomplete_ranks,
        dropped=_summed(run, "dropped"),
        unsummarised=_summed(run, "unsummarised"),
        replay_skipped=_summed(run, "replay_skipped"),
        flight_steps=run.flight_steps,
        settings={
            name: value
            for name, value in settings.items()
            if name in ("detail", "summary", "steps", "ranks", "modules") and value
        },
        problems=tuple(
            f"rank {rank}: {text}"
            for rank, info in run.ranks.items()
            for text in info.facts.get("problems") or ()
        ),
        damaged=tuple(f"{d.part.table} of {ranks_phrase([d.part.rank])}" for d in run.damaged),
    )


def _summed(run: Run, name: str) -> dict[str, int]:
    total: dict[str, int] = {}
    for info in run.ranks.values():
        for reason, count in (info.facts.get(name) or {}).items():
            total[reason] = total.get(reason, 0) + count
    return total
