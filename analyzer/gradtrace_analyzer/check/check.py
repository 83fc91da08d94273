"""Judges one opened run by the laws: gathers the evidence, runs each law, and says what was judged and what was not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gradtrace_analyzer.check.evidence import Evidence, gathered
from gradtrace_analyzer.check.law import Compression, Findings, Law, Violation
from gradtrace_analyzer.check.registry import all_laws, causes_of
from gradtrace_analyzer.failures.crashes import Crash, crashes
from gradtrace_analyzer.runs.last_seen import last_seen
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.sql.views import clock_shifts, connect
from gradtrace_analyzer.words.numbers import ranks_phrase

CheckVerdict = Literal["clean", "violated", "incomparable"]


@dataclass(frozen=True)
class CheckCover:
    """What was recorded, and what was not: an answer speaks of the former only.

    `steps` are by rank. `groups` has an object for each module that a data-parallel group holds copies of. `dropped`
    (rows by table), `unsummarised` (tensors by reason) and `replay_skipped` (Nodes by reason) are summed over ranks.
    `crashes` are the ranks that were stopped before their end. `flight_steps` is how many steps a flight recording
    keeps, None for one that keeps all.
    """

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
    crashes: tuple[Crash, ...] = ()


@dataclass(frozen=True)
class CheckAnswer:
    """What a check has found, violations in causal order.

    `judged` says how much each law compared, in its unit; `not_judged` why others compared nothing, both in the
    order of the chain. A law that has nothing to say of such a run (of stages, where there are none) is in neither.
    `clean_counts` are the parameters and steps that the sentence of a clean run speaks of, and how often they were
    compared `before` and `after` a step.
    """

    verdict: CheckVerdict
    violations: tuple[Violation, ...]
    judged: Mapping[Law, int]
    not_judged: Mapping[Law, str]
    compression: tuple[Compression, ...]
    notes: tuple[str, ...]
    cover: CheckCover
    clean_counts: Mapping[str, int]


def check(run: Run, *, compressing: Sequence[str] = ()) -> CheckAnswer:
    """The answer of `analyzer check`. `compressing` are globs on the names of the job's own hooks that lose precision
    on purpose."""
    with opened_evidence(run, compressing) as evidence:
        found = {law: law(evidence) for law in all_laws()}
        cover = _cover(run, evidence)
        counts = _counts(evidence)
    violations = _in_causal_order(found)
    judged = {law: findings.compared for law, findings in found.items() if findings.compared}
    return CheckAnswer(
        verdict=_verdict(violations, judged),
        violations=violations,
        judged=judged,
        not_judged={law: f.not_judged for law, f in found.items() if f.not_judged is not None},
        compression=tuple(c for findings in found.values() for c in findings.compression),
        notes=(*_joined(run), *(note for findings in found.values() for note in findings.notes)),
        cover=cover,
        clean_counts=counts,
    )


@contextlib.contextmanager
def opened_evidence(run: Run, compressing: Sequence[str] = ()) -> Iterator[Evidence]:
    """What the laws read of a run, while its connection is open."""
    losing = frozenset(r for r, info in run.ranks.items() if info.facts.get("dropped"))
    losing |= {d.part.rank for d in run.damaged}
    closed = frozenset(r for r, info in run.ranks.items() if info.is_complete) - run.torn_ranks
    with contextlib.closing(connect([run])) as connection:
        yield gathered(connection, closed, losing, compressing, _seen_until_ns(run))


def _seen_until_ns(run: Run) -> dict[int, int]:
    found: dict[int, int] = {}
    for rank in run.incomplete_ranks:
        seen = last_seen(run, rank)
        if seen is not None:
            # Of a history all times count from where its first attempt began.
            began = clock_shifts(run, run.newest).get(rank, 0) if run.history else 0
            found[rank] = began + max(seen.moved_ns, seen.heartbeat_ns - seen.wall_start_ns)
    return found


def _verdict(violations: Sequence[Violation], judged: Mapping[Law, int]) -> CheckVerdict:
    if any(v.severity == "error" for v in violations):
        return "violated"
    return "clean" if judged else "incomparable"


def _in_causal_order(found: Mapping[Law, Findings]) -> tuple[Violation, ...]:
    """By step, then along the chain; what is inherited says so, and takes the odd rank from its cause."""
    chain_order = {law: place for place, law in enumerate(found)}
    violations = [v for findings in found.values() for v in findings.violations]
    linked = [_linked(v, violations) for v in violations]

    def place(v: Violation) -> tuple[Any, ...]:
        in_front = v.at_start and v.inherits is None
        return (v.step, not in_front, chain_order[v.law], v.order, v.ranks)

    return tuple(sorted(linked, key=place))


def _linked(v: Violation, violations: Sequence[Violation]) -> Violation:
    """With what explains it in the same step and group, where another law is broken there that does."""
    if v.at_start:
        return v
    for law in causes_of(v.law):
        for cause in violations:
            if cause.law is law and cause.step == v.step and _same_group(cause, v):
                rank = v.rank if v.rank is not None else _blamed(v, violations)
                odd = f" (on rank {rank})" if rank is not None and v.rank is None else ""
                said = f"It follows from the above: {law.as_cause}{odd}."
                explanation = f"{v.explanation} {said}"
                return replace(v, inherits=law, rank=rank, explanation=explanation)
    return v


def _blamed(v: Violation, violations: Sequence[Violation]) -> int | None:
    """The rank that laws which name a culprit single out in the same step; None where they name several."""
    named = {
        w.rank
        for w in violations
        if w.law.names_culprit and w.step == v.step and _same_group(w, v) and w.rank is not None
    }
    return named.pop() if len(named) == 1 else None


def _same_group(a: Violation, b: Violation) -> bool:
    return a.group is None or b.group is None or a.group == b.group


def _counts(evidence: Evidence) -> dict[str, int]:
    """How many parameters and steps the sentence of a clean run speaks of, and how many comparisons before and after
    them."""
    names = ("parameters", "steps", "before", "after")
    tables = {row[0] for row in evidence.rows("SHOW TABLES")}
    if "parameter_groups" not in tables:
        return dict.fromkeys(names, 0)
    [counts] = evidence.rows(
        "SELECT count(DISTINCT (replica, parameter_fqn)), count(DISTINCT step), "
        "count(*) FILTER (point = 'before'), count(*) FILTER (point = 'after') FROM parameter_groups"
    )
    return dict(zip(names, counts, strict=True))


def _joined(run: Run) -> Iterator[str]:
    if run.as_joined is not None:
        yield f"Several attempts, judged as one: {run.as_joined}."


def _cover(run: Run, evidence: Evidence) -> CheckCover:
    tables = ("steps", "parameters", "backward_passes", "module_calls", "buckets", "gradients")
    union = " UNION ".join(f"SELECT rank, step FROM {table}" for table in tables)
    steps: dict[int, list[int]] = dict(
        evidence.rows(f"SELECT rank, list(step ORDER BY step) FROM ({union}) GROUP BY 1 ORDER BY 1")
    )
    settings: dict[str, Any] = {}
    for info in run.ranks.values():
        settings.update(info.facts.get("settings") or {})
    return CheckCover(
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
        crashes=crashes(run),
    )


def _summed(run: Run, name: str) -> dict[str, int]:
    total: dict[str, int] = {}
    for info in run.ranks.values():
        for reason, count in (info.facts.get(name) or {}).items():
            total[reason] = total.get(reason, 0) + count
    return total
