"""Compares two opened runs: what can be compared, what differs, and what that means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import duckdb

from gradtrace_analyzer.align import Alignment
from gradtrace_analyzer.configuration import apart_in_configuration
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
from gradtrace_analyzer.failures import Failure
from gradtrace_analyzer.judgement import Judgement
from gradtrace_analyzer.links import LINKS, LOCAL_LINKS
from gradtrace_analyzer.repartitioned import Repartitioned, Sums, divisions
from gradtrace_analyzer.repeated import repeated
from gradtrace_analyzer.replayed import replayed
from gradtrace_analyzer.reports.failures import died_phrase
from gradtrace_analyzer.rewritten import aside_sentence, scaled_sentence
from gradtrace_analyzer.run import Run, ranks_phrase

# Equal rows of the same kind in front of the first difference that prove a job reproducible on their own.
WITNESS_ROWS = 8


def compare(
    baseline: Run,
    candidate: Run,
    *,
    exact: bool = False,
    precision: str | None = None,
    repeats: Sequence[Run] = (),
    scale: float = 1.0,
) -> Answer:
    """The answer of `analyzer diff`. With `exact` any changed bit is a difference.

    `repeats` are further runs of the baseline, from which noise is measured. `precision` is that of matrix products
    on one side where no record tells it; `scale` multiplies the tolerances.
    """
    runs = {"baseline": baseline, "candidate": candidate}
    ranks = sorted(set(baseline.ranks) & set(candidate.ranks))
    connection = connect_pair(baseline, candidate)
    try:
        return _compared(connection, runs, ranks, exact, precision, repeats, scale)
    finally:
        connection.close()


def _compared(
    connection: duckdb.DuckDBPyConnection,
    runs: Mapping[str, Run],
    ranks: Sequence[int],
    exact: bool,
    precision: str | None,
    repeats: Sequence[Run],
    scale: float,
) -> Answer:
    unread = {side: lost_rows(connection, side, run) for side, run in runs.items()}
    alignment = Alignment(
        connection,
        ranks,
        [place for places in unread.values() for place in places],
        unmatched=not asked_differently(runs) and not any(map(problems_of, runs.values())),
        torn_ends={side: torn_ends(connection, side, run) for side, run in runs.items()},
    )
    judgement = Judgement(
        connection, runs, precision=precision, repeats=repeats, exact=exact, scale=scale
    )
    judgement.write()
    steps = alignment.steps()
    cover = cover_of(runs, ranks, steps, alignment.compared(), unread)
    common = sorted({step for of_rank in steps["both"].values() for step in of_rank})
    configuration = apart_in_configuration(runs)
    failures = alignment.failures()
    lone = [*_lone_ranks(cover)]
    if not asked_differently(runs):
        lone += alignment.lone_names()

    def answer(
        verdict: Verdict,
        reason: str = "",
        *,
        origins: Sequence[Origin] = (),
        inherited: Sequence[Origin] = (),
        notes: Sequence[str] = (),
        first_bits: Origin | None = None,
        sums: Repartitioned | None = None,
    ) -> Answer:
        return Answer(
            verdict=verdict,
            reason=reason,
            origins=tuple(_with_replays(connection, o) for o in origins),
            inherited=tuple(inherited),
            cover=cover,
            configuration=tuple(configuration),
            structure=tuple(lone),
            # Rows that do not pair one to one spread over everything.
            spread=tuple(alignment.spread()) if sums is None else (),
            rule=judgement.rule,
            noise=judgement.noise,
            sums=sums,
            aside=tuple(judgement.aside),
            scaled=tuple(judgement.scaled),
            notes=(*notes, *_abandoned(alignment, origins), *_deaths(runs, origins)),
            unseen=tuple(_unseen(runs, cover, origins[0], common) if origins else ()),
            first_bits=first_bits,
            failures=tuple(failures),
            repeated=tuple(repeated(connection, origins[0].step)) if origins else (),
            first_nonfinite=_first_nonfinite(alignment, origins),
        )

    nothing = _nothing_to_compare(runs, ranks, steps, alignment)
    if nothing is not None:
        return answer("incomparable", nothing)
    notes = [scaled_sentence(judgement.scaled)] if judgement.scaled else []
    notes += [aside_sentence(judgement.aside)] if judgement.aside else []
    parts = divisions(connection, runs)
    if parts is not None and not exact:
        sums = Sums(connection, parts, judgement.rule, scale).compared(common)
        if sums.step is None:
            return answer("within_tolerance", notes=notes, sums=sums)
        own = list(sums.differences)
        modules = {0: alignment.module_fqns(sums.step, min(ranks), 0)}
        found = firsts(own, (), modules, exceeding=True)
        return answer("different", origins=found, notes=notes, sums=sums)
    step = alignment.first_step(exceeding=False)
    failed = min((f.step for f in failures), default=None)
    if failed is not None and (step is None or failed < step):
        step = failed
    if step is None:
        if not cover.is_whole:
            return answer("incomparable", lacking_words(cover))
        notes += _rng_notes(alignment, common) if cover.has_fingerprints else []
        if judgement.aside:
            return answer("within_tolerance", notes=notes)
        if any(entry["kind"] in ("module", "parameter") for entry in lone):
            return answer("different", notes=notes)
        return answer("identical", notes=notes)

    origins, inherited = _places(alignment, step, failures, exceeding=False)
    other_kernel = any(a.kind == "optimizer kernel" for a in judgement.aside)
    noisy = judgement.noise is not None and not judgement.noise.is_zero
    changed = configuration or other_kernel or judgement.scaled or noisy
    reproducible = not changed and _is_reproducible(alignment, common, step, origins)
    beyond = alignment.first_step(exceeding=True)
    if failed is not None and (beyond is None or failed < beyond):
        beyond = failed
    quiet = judgement.noise is not None and judgement.noise.is_zero and not changed
    if (
        exact
        or reproducible
        or quiet
        or (beyond == step and any(o.difference.exceeds for o in origins))
    ):
        return answer("different", origins=origins, inherited=inherited, notes=notes)
    if beyond is None:
        return answer("within_tolerance", origins=origins, inherited=inherited, notes=notes)
    first_bits = origins[0]
    origins, inherited = _places(alignment, beyond, failures, exceeding=True)
    return answer(
        "different", origins=origins, inherited=inherited, first_bits=first_bits, notes=notes
    )


def _places(
    alignment: Alignment, step: int, failures: Sequence[Failure], *, exceeding: bool
) -> tuple[list[Origin], list[Origin]]:
    differences = alignment.differences_at(step)
    modules = {
        d.rank: alignment.module_fqns(step, d.rank, d.key["root"])
        for d in _module_calls(differences)
    }
    forwards = any(d.table in ("inputs", "module_calls") for d in differences)
    # Two passes of a step may fail, one after another: the first is the reason.
    failed = {f.rank: f for f in reversed(failures) if f.step == step}
    origins, inherited = split_by_inheritance(
        firsts(
            differences,
            alignment.rng_to_blame(step),
            modules,
            exceeding=exceeding,
            failures=failed,
            unused=alignment.unused_forwards(step) if forwards else {},
        )
    )
    return [_with_positions(alignment, o) for o in origins], inherited


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
        return (
            "no step was recorded on both sides: "
            f"{held(all_steps(steps['baseline']), 'step')} against "
            f"{held(all_steps(steps['candidate']), 'step')}"
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


def _lone_ranks(cover: Cover) -> list[dict[str, Any]]:
    other = {"baseline": "candidate", "candidate": "baseline"}
    return [
        {"kind": "rank", "name": str(rank), "only_in": other[side]}
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
