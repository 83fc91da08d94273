"""Whether backward passes reduce what they should, and are the same number on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gradtrace_analyzer.check.evidence import Evidence
from gradtrace_analyzer.check.law import Findings, Violation, law, not_judged, outcome
from gradtrace_analyzer.failures.failed_passes import FailedPass, failed_passes, with_reach
from gradtrace_analyzer.words.nouns import listed
from gradtrace_analyzer.words.numbers import counted, ranks_phrase, verb

_NO_PASS = "no backward pass of a DDP model was recorded"

_TOP = "kind = 'backward' AND parent_backward_index IS NULL"


@law(
    "passes_complete",
    "error",
    unit="backward pass",
    doc="No backward pass ends with an exception. One after which the rank completes others (it was caught) is a "
    "warning; one that ended while it waited for a reduction breaks the laws below.",
    after=["replays_equal"],
)
def passes_complete(evidence: Evidence) -> Findings:
    """Report the first passes that ended with an exception, unless they waited for a bucket."""
    [(compared,)] = evidence.rows(
        "SELECT count(*) FROM backward_passes WHERE parent_backward_index IS NULL"
    )
    waiting = set(
        evidence.rows(
            "SELECT rank, step, backward_index FROM buckets WHERE done_ns IS NULL "
            "AND coalesce(kind, 'all_reduce') <> 'shadow'"
        )
    )
    last_whole: dict[int, int] = dict(
        evidence.rows("SELECT rank, max(step) FROM backward_passes WHERE error IS NULL GROUP BY 1")
    )
    alike: dict[tuple[Any, ...], list[FailedPass]] = {}
    for failed in failed_passes(evidence.connection):
        row, place = failed.row, (failed.rank, failed.step, failed.backward_index)
        if row["node_name"] is None and place in waiting:
            continue
        was_caught = last_whole.get(failed.rank, -1) > failed.step
        same = (
            was_caught,
            row["exception_type"],
            row["node_name"],
            row["root"],
            row["module_fqn"],
            row["parameter_fqn"],
        )
        alike.setdefault(same, []).append(failed)
    violations = [
        _failed_alike(evidence, passes, was_caught=key[0]) for key, passes in alike.items()
    ]
    return outcome(violations, compared, "no backward pass was recorded")


def _failed_alike(evidence: Evidence, passes: list[FailedPass], *, was_caught: bool) -> Violation:
    """What ended passes in the same Node with the same exception, at its first step."""
    first = with_reach(evidence.connection, min(passes, key=lambda f: (f.step, f.rank)))
    ranks = tuple(sorted({f.rank for f in passes if f.step == first.step}))
    after = " The exception was caught: later passes were completed." if was_caught else ""
    more = f" So in {counted(len(passes), 'backward pass')}." if len(passes) > len(ranks) else ""
    return passes_complete.violation(
        first.step,
        f"Step {first.step}, {ranks_phrase(ranks)}: backward pass {first.backward_index} failed "
        f"{first.told}{after}{more}",
        severity="warning" if was_caught else "error",
        rank=ranks[0] if len(ranks) == 1 else None,
        ranks=ranks,
        microbatch=first.row["microbatch"],
        backward_index=first.backward_index,
        root=first.row["root"],
        module_fqn=first.row["module_fqn"],
        node_name=first.row["node_name"],
        parameter_fqn=first.row["parameter_fqn"],
        event_index=first.row["event_index"],
        count=len(passes),
    )


@law(
    "wrapper_called",
    "warning",
    unit="backward pass",
    doc="A model that DDP wraps is called through its wrapper: called past it, its gradients are not reduced.",
    after=["microbatches_add_up"],
    as_cause="gradients were not reduced",
)
def wrapper_called(evidence: Evidence) -> Findings:
    """Report the first pass of a model that was called past its DDP wrapper."""
    [(compared,)] = evidence.rows(
        f"SELECT count(*) FROM backward_passes WHERE {_TOP} AND ddp_sync IS NOT NULL"
    )
    found = evidence.rows(
        "SELECT step, backward_index, min(microbatch), list(DISTINCT rank ORDER BY rank), "
        "count(*) OVER () FROM backward_passes "
        f"WHERE {_TOP} AND ddp_sync = 'bypassed' GROUP BY 1, 2 ORDER BY 1, 2 LIMIT 1"
    )
    violations = [
        wrapper_called.violation(
            step,
            f"Step {step}, {ranks_phrase(ranks)}: backward pass {backward} reduced no gradients, because the model "
            f"was called past its DDP wrapper (`ddp.module(...)`). So in {counted(count, 'backward pass')}.",
            rank=ranks[0] if len(ranks) == 1 else None,
            ranks=tuple(ranks),
            backward_index=backward,
            microbatch=microbatch,
            count=count,
        )
        for step, backward, microbatch, ranks, count in found
    ]
    return outcome(violations, compared, _NO_PASS)


_LAST_PASSES = f"""
WITH passes AS (
    SELECT rank, step, arg_max(ddp_sync, backward_index) AS last, bool_or(ddp_sync = 'sync') AS any_sync,
        max(backward_index) AS backward_index, max(microbatch) AS microbatch, count(*) AS pass_count
    FROM backward_passes WHERE {_TOP} AND ddp_sync IN ('sync', 'no_sync') GROUP BY 1, 2),
stepped AS (SELECT DISTINCT rank, step FROM optimizer_groups
    UNION SELECT DISTINCT rank, step FROM gradients WHERE point = 'final')
SELECT p.* FROM passes p JOIN stepped s ON s.rank = p.rank AND s.step = p.step
"""


@law(
    "last_pass_reduces",
    "warning",
    unit="optimizer step",
    doc="The last backward pass before the optimizer's step reduces the gradients: it is not under no_sync.",
    after=["wrapper_called"],
    as_cause="gradients were not reduced",
)
def last_pass_reduces(evidence: Evidence) -> Findings:
    """Report the first step whose optimizer ran on gradients that its last pass had not reduced."""
    [(compared,)] = evidence.rows(f"SELECT count(*) FROM ({_LAST_PASSES})")
    found = evidence.rows(
        "SELECT any_sync, min(step), arg_min(backward_index, step), arg_min(microbatch, step), "
        "arg_min(pass_count, step), list(DISTINCT rank ORDER BY rank), count(DISTINCT step) "
        f"FROM ({_LAST_PASSES}) WHERE last = 'no_sync' GROUP BY 1 ORDER BY 2"
    )
    violations = []
    for any_sync, step, backward, microbatch, passes, ranks, steps in found:
        why = (
            "though an earlier one was not: the gradients of the last were never reduced (no_sync on the wrong "
            "microbatch, off by one)"
            if any_sync
            else "as was every other: the gradients were never reduced"
        )
        if not any_sync and passes == 1:
            why = "and there was no other: the gradients were never reduced"
        violations.append(
            last_pass_reduces.violation(
                step,
                f"Step {step}, {ranks_phrase(ranks)}: the last backward pass before the optimizer was under no_sync, "
                f"{why}. So in {counted(steps, 'step')}.",
                rank=ranks[0] if len(ranks) == 1 else None,
                ranks=tuple(ranks),
                backward_index=backward,
                microbatch=microbatch,
                count=steps,
            )
        )
    return outcome(violations, compared, _NO_PASS)


# What ranks count in each step, and what one of it is.
_COUNTED = {
    "backward_count": ("backward pass", ""),
    "abandoned_forwards": ("forward", " that no backward pass followed"),
}
_COUNTS = """
SELECT m.team, s.step, min(s.{column}) AS fewest, max(s.{column}) AS most,
    list((s.rank, s.{column}) ORDER BY s.rank) AS counts
FROM steps s JOIN (SELECT DISTINCT team, rank FROM members) m ON m.rank = s.rank
WHERE s.{column} IS NOT NULL
    -- A rank that has joined makes fewer steps than the others, and counts its later ones otherwise.
    AND NOT EXISTS (SELECT 1 FROM reductions r WHERE r.team = m.team AND r.is_shadow AND r.step <= s.step)
GROUP BY 1, 2 HAVING count(DISTINCT s.rank) > 1
"""


@law(
    "passes_match",
    "warning",
    unit="step",
    doc="The ranks of a data-parallel group make as many steps, as many backward passes in each, and as many forwards "
    "that no backward pass follows.",
    after=["last_pass_reduces"],
)
def passes_match(evidence: Evidence) -> Findings:
    """Report the first step in which ranks made different numbers of passes, or left different numbers of forwards
    without one, and ranks that stopped early."""
    if not any(len(r.recorded) > 1 for r in evidence.replicas):
        return not_judged(evidence.lacking)
    counts = _COUNTS.format(column="backward_count")
    [(compared,)] = evidence.rows(f"SELECT count(*) FROM ({counts})")
    violations = list(_uneven(evidence, "backward_count"))
    told = {(v.group, v.step) for v in violations}
    # A rank that made no backward pass left its forward without one: that is told once.
    violations += [
        v for v in _uneven(evidence, "abandoned_forwards") if (v.group, v.step) not in told
    ]
    violations += _stopped_early(evidence)
    return outcome(violations, compared, "no step was recorded on two ranks")


def _uneven(evidence: Evidence, column: str) -> Iterator[Violation]:
    """The first step in which the ranks of a group count differently."""
    what, tail = _COUNTED[column]
    found = evidence.rows(
        "SELECT team, min(step), arg_min(counts, step), count(*) "
        f"FROM ({_COUNTS.format(column=column)}) WHERE fewest < most GROUP BY 1 ORDER BY 1"
    )
    for team, step, counts, steps in found:
        by_count: dict[int, list[int]] = {}
        for rank, count in counts:
            by_count.setdefault(count, []).append(rank)
        ordered = sorted(by_count.items(), key=lambda entry: (len(entry[1]), -entry[0]))
        told = ", ".join(
            f"{ranks_phrase(ranks)} made {counted(count, what) if count else 'none'}"
            f"{tail if count == ordered[0][0] else ''}"
            for count, ranks in ordered
        )
        skipping = column == "abandoned_forwards"
        # Of two halves, the one that made such a forward is odd, if the other made none.
        is_odd = len(ordered[0][1]) < len(counts) / 2 or (skipping and ordered[1][0] == 0)
        odd = ordered[0][1] if is_odd else [rank for rank, _ in counts]
        why = ""
        if skipping:
            why = (
                f" A batch was left out on {ranks_phrase(odd)}: unless no reduction lies between, "
                f"{verb(odd, 'it reduces', 'they reduce')} another batch with the others' from here on."
            )
        yield passes_match.violation(
            step,
            f"Step {step}: {told}.{why} So in {counted(steps, 'step')}.",
            rank=odd[0] if len(odd) == 1 else None,
            ranks=tuple(odd),
            group=_group(evidence, team),
            count=steps,
        )


def _stopped_early(evidence: Evidence) -> Iterator[Violation]:
    """Ranks that ended their recording before others of their group, with no rows lost and no shadows."""
    rows = evidence.rows(
        "SELECT m.team, s.rank, max(s.step) FROM steps s "
        "JOIN (SELECT DISTINCT team, rank FROM members) m ON m.rank = s.rank "
        "WHERE m.team NOT IN (SELECT team FROM reductions WHERE is_shadow) GROUP BY 1, 2 ORDER BY 2"
    )
    for team in sorted({row[0] for row in rows}):
        mine = [(rank, last) for t, rank, last in rows if t == team]
        latest = max(last for _, last in mine)
        for rank, last in mine:
            excused = rank in evidence.losing_ranks or rank not in evidence.closed_ranks
            if last < latest and not excused:
                yield passes_match.violation(
                    last + 1,
                    f"Step {last + 1}: rank {rank} ended after step {last}, other ranks of its group went on to step "
                    f"{latest}.",
                    rank=rank,
                    ranks=(rank,),
                    group=_group(evidence, team),
                    count=latest - last,
                )


def _group(evidence: Evidence, team: int) -> str:
    return next(r.group for r in evidence.replicas if r.team == team)


# A pass has a row when all its buckets have theirs.
_UNLAUNCHED = f"""
WITH launched AS (
    SELECT DISTINCT replica, rank, step, backward_index, unnest(parameter_fqns) AS parameter_fqn FROM reductions
    WHERE NOT is_shadow),
lone AS (SELECT rank FROM members WHERE module_fqn IS NOT NULL GROUP BY rank HAVING count(*) = 1),
touched AS (
    SELECT DISTINCT replica, rank, step, backward_index FROM launched
    UNION SELECT DISTINCT m.replica, g.rank, g.step, g.backward_index FROM gradients g
        JOIN members m ON m.rank = g.rank AND m.root = g.root
        JOIN managed p ON p.replica = m.replica AND p.parameter_fqn = g.parameter_fqn WHERE g.point = 'local'),
elsewhere AS (  -- a model that was wrapped again is reduced by its new wrapper
    SELECT DISTINCT p.replica, l.rank, l.step, l.backward_index FROM launched l
    JOIN managed p ON p.parameter_fqn = l.parameter_fqn AND p.replica <> l.replica
    ANTI JOIN launched o ON o.replica = p.replica AND o.rank = l.rank AND o.step = l.step
        AND o.backward_index = l.backward_index),
judged AS (
    SELECT m.replica, b.rank, b.step, b.backward_index, b.microbatch FROM backward_passes b
    JOIN members m ON m.rank = b.rank AND m.module_fqn IS NOT NULL
    WHERE {_TOP} AND b.ddp_sync = 'sync' AND b.error IS NULL AND list_contains($observed, m.replica)
        AND NOT list_contains($losing, b.rank)
        AND (b.rank IN (SELECT rank FROM lone)
            OR (m.replica, b.rank, b.step, b.backward_index) IN (SELECT (t.replica, t.rank, t.step, t.backward_index)
                FROM touched t))
        AND NOT EXISTS (FROM elsewhere e WHERE e.replica = m.replica AND e.rank = b.rank AND e.step = b.step
            AND e.backward_index = b.backward_index))
SELECT j.*, list(p.parameter_fqn ORDER BY p.position)
    FILTER (WHERE l.parameter_fqn IS NULL) AS unlaunched
FROM judged j JOIN managed p ON p.replica = j.replica
LEFT JOIN launched l ON l.replica = j.replica AND l.rank = j.rank AND l.step = j.step
    AND l.backward_index = j.backward_index AND l.parameter_fqn = p.parameter_fqn
GROUP BY ALL
"""


@law(
    "buckets_launched",
    "warning",
    unit="backward pass",
    doc="A backward pass that reduces launches every bucket, and each launched bucket is done.",
    after=["passes_match"],
    as_cause="not every bucket was launched",
)
def buckets_launched(evidence: Evidence) -> Findings:
    """Report the first pass that left parameters out of every bucket, and buckets that never were done."""
    observed = [
        r.number
        for r in evidence.replicas
        if r.module_fqn is not None and not r.unobserved and not r.is_sharded
    ]
    if not observed:
        return not_judged(_unobserved(evidence))
    evidence.connection.execute(
        f"CREATE TEMP TABLE unlaunched AS {_UNLAUNCHED}",
        {
            "observed": observed,
            "losing": sorted(evidence.losing_ranks) or [-1],
        },
    )
    [(compared,)] = evidence.rows("SELECT count(*) FROM unlaunched")
    found = evidence.rows(
        "SELECT replica, step, backward_index, min(microbatch), list(DISTINCT rank ORDER BY rank), "
        "any_value(unlaunched), count(*) OVER (PARTITION BY replica) FROM unlaunched "
        "WHERE len(unlaunched) > 0 GROUP BY 1, 2, 3 "
        "QUALIFY row_number() OVER (PARTITION BY replica ORDER BY step, backward_index) = 1 "
        "ORDER BY replica"
    )
    violations = [_left_out(evidence, *row) for row in found]
    violations += _never_done(evidence)
    return outcome(violations, compared, _NO_PASS)


def _unobserved(evidence: Evidence) -> str:
    """Why no pass can be asked for its buckets."""
    known = [r for r in evidence.replicas if r.module_fqn is not None]
    reasons = dict.fromkeys(r.unobserved for r in known if r.unobserved)
    if reasons:
        return f"the reductions were not recorded: {'; '.join(reasons)}"
    if known:
        return "what reduces to shards has no buckets to launch"
    return evidence.lacking


def _left_out(
    evidence: Evidence,
    number: int,
    step: int,
    backward: int,
    microbatch: int,
    ranks: list[int],
    unlaunched: list[str],
    count: int,
) -> Violation:
    replica = evidence.replica(number)
    with_gradient = {
        fqn
        for (fqn,) in evidence.rows(
            "SELECT DISTINCT parameter_fqn FROM gradients WHERE point = 'local' AND step = ? "
            "AND root = ? AND list_contains(?, rank)",
            [step, replica.root, ranks],
        )
    }
    causes = [fqn for fqn in unlaunched if fqn not in with_gradient]
    stranded = [fqn for fqn in unlaunched if fqn in with_gradient]
    why = ""
    if stranded and causes:
        why = (
            f": {listed(causes, 3)} got no gradient, so {verb(causes, 'its', 'their')} buckets were never full, and "
            f"the gradients of {listed(stranded, 3)} stayed the rank's own"
        )
    elif causes and with_gradient:
        why = f": {listed(causes, 3)} got no gradient"
    return buckets_launched.violation(
        step,
        f"Step {step}, {ranks_phrase(ranks)}: backward pass {backward} launched no bucket of "
        f"{counted(len(unlaunched), 'parameter')}{why or f' ({listed(unlaunched, 3)})'}. "
        f"So in {counted(count, 'backward pass')}.",
        rank=ranks[0] if len(ranks) == 1 else None,
        ranks=tuple(ranks),
        microbatch=microbatch,
        backward_index=backward,
        **replica.fields,
        parameter_fqn=(causes or unlaunched)[0],
        count=count,
    )


def _never_done(evidence: Evidence) -> Iterator[Violation]:
    """Buckets that were launched in a pass which then raised while no Node ran, and of which no end was seen."""
    found = evidence.rows(
        "SELECT r.replica, r.step, r.backward_index, r.bucket_index, min(r.microbatch), "
        "list(DISTINCT r.rank ORDER BY r.rank), any_value(b.error), any_value(r.hook_name), "
        "count(*) OVER (PARTITION BY r.replica) FROM reductions r "
        "JOIN backward_passes b ON b.rank = r.rank AND b.step = r.step "
        "AND b.backward_index = r.backward_index "
        "WHERE r.done_ns IS NULL AND b.error IS NOT NULL AND NOT EXISTS (FROM failures f WHERE f.rank = r.rank "
        "AND f.step = r.step AND f.backward_index = r.backward_index AND f.node_name IS NOT NULL) GROUP BY 1, 2, 3, 4 "
        "QUALIFY row_number() OVER (PARTITION BY r.replica ORDER BY r.step, r.backward_index, r.bucket_index) = 1 "
        "ORDER BY r.replica"
    )
    for number, step, backward, bucket, microbatch, ranks, error, hook, count in found:
        replica = evidence.replica(number)
        yield buckets_launched.violation(
            step,
            f"Step {step}, {ranks_phrase(ranks)}: bucket {bucket} was launched and never done, until the backward "
            f"pass ended with {error.splitlines()[0] if error else 'an error'}.",
            rank=ranks[0] if len(ranks) == 1 else None,
            ranks=tuple(ranks),
            microbatch=microbatch,
            backward_index=backward,
            bucket_index=bucket,
            **replica.fields,
            hook_name=hook,
            count=count,
        )
