"""Whether what the ranks of a group reduce together belongs together, and who never came."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from gradtrace_analyzer.check.evidence import Evidence, Rows
from gradtrace_analyzer.check.law import Findings, Violation, law, not_judged, outcome
from gradtrace_analyzer.numerics.hook_promises import chains_collectives, hook_phrase
from gradtrace_analyzer.words.nouns import bucket_phrase, listed
from gradtrace_analyzer.words.numbers import counted, ranks_phrase, verb

# Aspects in which the rows of one reduction must agree, the most telling first.
_ASPECTS = {
    "step": "step",
    "module": "replica",
    "parameters": "parameter_fqns",
    "hook": "coalesce(hook_name, '')",
}

_ROW = "rank, step, bucket_index, backward_index, microbatch, hook_name, parameter_fqns, replica"


@law(
    "collectives_match",
    "error",
    unit="reduction",
    doc="What the ranks of a group reduce together is the same bucket of the same step by the same hook, and all "
    "ranks take part.",
    after=["buckets_launched"],
    as_cause="the reductions do not match",
    names_culprit=True,
)
def collectives_match(evidence: Evidence) -> Findings:
    """Report the first reduction of each group whose rows do not belong together, or lack a rank."""
    if not evidence.modules:
        return not_judged(evidence.lacking)
    [(compared,)] = evidence.rows(
        "SELECT count(*) FROM (SELECT pair FROM reductions GROUP BY pair "
        "HAVING count(DISTINCT rank) > 1 OR max(team_size) > 1)"
    )
    violations = [*_idlers(evidence), *_mismatches(evidence), *_absences(evidence)]
    return outcome(violations, compared, "no bucket was recorded")


_IDLE = """
SELECT team, arg_min(pair, (step, pair)), count(*) FROM (
    SELECT team, pair, min(step) AS step FROM reductions
    WHERE NOT list_contains($losing, rank) AND collective_seq IS NOT NULL
    GROUP BY team, pair HAVING count(DISTINCT is_idle) > 1 AND NOT bool_or(is_shadow)
        AND NOT bool_or(list_contains($chaining, coalesce(hook_name, ''))))
GROUP BY 1 ORDER BY 1
"""


def _idlers(evidence: Evidence) -> Iterator[Violation]:
    """Ranks whose hook launched nothing where those of others did: later collectives meet the wrong ones."""
    hooks = [name for (name,) in evidence.rows("SELECT DISTINCT hook_name FROM reductions")]
    found = evidence.rows(
        _IDLE,
        {
            "losing": sorted(evidence.losing_ranks) or [-1],
            "chaining": [name for name in hooks if chains_collectives(name)] or ["-"],
        },
    )
    for _, pair, count in found:
        rows = evidence.rows(
            f"SELECT {_ROW}, is_idle FROM reductions WHERE pair = ? ORDER BY rank", [pair]
        )
        idle, busy = ([row for row in rows if row[-1] is asked] for asked in (True, False))
        rank, step, bucket, backward, microbatch, hook, fqns, number, _ = idle[0]
        ranks, others = tuple(row[0] for row in idle), [row[0] for row in busy]
        replica = evidence.replica(number)
        more = f" So in {counted(count, 'bucket')}." if count > 1 else ""
        yield collectives_match.violation(
            step,
            f"{bucket_phrase(step, bucket, fqns)}: {ranks_phrase(ranks)} launched no collective of the group in "
            f"{hook_phrase(hook)}, {ranks_phrase(others)} did: from there on what {ranks_phrase(others)} "
            f"{verb(others, 'reduces', 'reduce')} meets something else of {ranks_phrase(ranks)}.{more}",
            rank=rank if len(ranks) == 1 else None,
            ranks=ranks,
            microbatch=microbatch,
            backward_index=backward,
            bucket_index=bucket,
            **replica.fields,
            hook_name=hook,
            count=count,
            order=float(pair),
        )


def _mismatches(evidence: Evidence) -> Iterator[Violation]:
    conditions = {name: f"count(DISTINCT {column}) > 1" for name, column in _ASPECTS.items()}
    chosen = " ".join(f"WHEN {condition} THEN '{name}'" for name, condition in conditions.items())
    found = evidence.rows(
        f"SELECT team, aspect, arg_min(pair, (step, pair)), count(*) FROM "
        f"(SELECT team, pair, min(step) AS step, CASE {chosen} END AS aspect FROM reductions "
        "WHERE NOT is_shadow GROUP BY team, pair) WHERE aspect IS NOT NULL "
        # A rank that joined made fewer steps than the others: its later ones have other numbers.
        "AND NOT (aspect = 'step' AND team IN (SELECT team FROM reductions WHERE is_shadow)) "
        "GROUP BY 1, 2 ORDER BY 1, 2"
    )
    for _, aspect, pair, count in found:
        rows = evidence.rows(
            f"SELECT {_ROW} FROM reductions WHERE pair = ? AND NOT is_shadow ORDER BY rank", [pair]
        )
        column = {"step": 1, "parameters": 6, "hook": 5, "module": 7}[aspect]
        odd = _odd(rows, column)
        first = next(row for row in rows if row[0] not in odd)
        other = next(row for row in rows if row[column] != first[column])
        yield _mismatch(evidence, aspect, first, other, odd, pair, count)


def _odd(rows: Rows, column: int) -> tuple[int, ...]:
    """The ranks in the minority; of two, none."""
    counts = Counter(str(row[column]) for row in rows)
    [(most, count), *_] = counts.most_common()
    if count <= len(rows) / 2:
        return ()
    return tuple(row[0] for row in rows if str(row[column]) != most)


def _mismatch(
    evidence: Evidence,
    aspect: str,
    first: tuple[Any, ...],
    other: tuple[Any, ...],
    odd: tuple[int, ...],
    pair: int,
    count: int,
) -> Violation:
    rank, step, bucket, backward, microbatch, hook, fqns, number = first
    replica = evidence.replica(number)
    start = f"Step {step}: rank {rank}'s bucket {bucket}"
    if aspect == "step":
        text = (
            f"{start} of step {step} was reduced with rank {other[0]}'s of step {other[1]}"
            f"{_skipped_pass(evidence, first, other)}"
        )
    elif aspect == "hook":
        ranks = odd or (other[0],)
        text = (
            f"{bucket_phrase(step, bucket, fqns)}: {ranks_phrase(ranks)} "
            f"{verb(ranks, 'reduces', 'reduce')} with {hook_phrase(other[5])}, "
            f"rank {rank} with {hook_phrase(hook)}"
        )
    else:
        text = (
            f"{start} ({listed(fqns)}) was reduced with rank {other[0]}'s bucket {other[2]} "
            f"({listed(other[6])}): their parameters are not the same, or not in the same order"
        )
    more = f" So in {counted(count, 'bucket')}." if count > 1 else ""
    return collectives_match.violation(
        min(step, other[1]),
        f"{text}.{more}",
        rank=odd[0] if len(odd) == 1 else None,
        ranks=odd or tuple(sorted((rank, other[0]))),
        microbatch=microbatch,
        backward_index=backward,
        bucket_index=bucket,
        **replica.fields,
        hook_name=other[5] if aspect == "hook" else hook,
        count=count,
        order=float(pair),
    )


def _skipped_pass(evidence: Evidence, first: tuple[Any, ...], other: tuple[Any, ...]) -> str:
    """`: rank 1 ran no backward pass in step 2`, where that is why."""
    early, late = sorted((first, other), key=lambda row: row[1])
    step = early[1]
    [(count,)] = evidence.rows(
        "SELECT count(*) FROM backward_passes "
        "WHERE rank = ? AND step = ? AND kind = 'backward' AND ddp_sync = 'sync'",
        [late[0], step],
    )
    return "" if count else f": rank {late[0]} ran no backward pass that reduces in step {step}"


# How long a rank that was cut off must have waited for another to be missed: a heartbeat comes once a second.
_LEAST_WAIT_NS = 10**9

_ABSENT = """
WITH present AS (SELECT r.team, r.pair, min(r.step) AS step, list(DISTINCT r.rank) AS ranks,
        -- A rank that was cut off a moment after its launch, while it lived, has not waited in vain.
        bool_or(r.done_ns IS NULL AND (u.rank IS NULL OR b.error IS NOT NULL OR r.launched_ns + $least_ns <= u.seen_ns))
            AS waits
    FROM reductions r LEFT JOIN seen_until u ON u.rank = r.rank
    LEFT JOIN backward_passes b ON b.rank = r.rank AND b.step = r.step AND b.backward_index = r.backward_index
    GROUP BY ALL),
    absent AS (SELECT p.*, m.rank AS absent_rank FROM present p
        JOIN (SELECT DISTINCT team, rank FROM members) m USING (team) WHERE NOT list_contains(p.ranks, m.rank))
SELECT team, absent_rank, arg_min(pair, (step, pair)), count(*) FROM absent
WHERE list_contains($losing, absent_rank) = false AND (list_contains($closed, absent_rank) OR waits)
GROUP BY 1, 2 ORDER BY 2
"""


def _absences(evidence: Evidence) -> Iterator[Violation]:
    """A rank that took no part. One whose recording was cut off is only held to it where others waited in vain."""
    found = evidence.rows(
        _ABSENT,
        {
            "losing": sorted(evidence.losing_ranks) or [-1],
            "closed": sorted(evidence.closed_ranks) or [-1],
            "least_ns": _LEAST_WAIT_NS,
        },
    )
    for _, absent, pair, count in found:
        rows = evidence.rows(
            f"SELECT {_ROW}, done_ns IS NULL FROM reductions WHERE pair = ? ORDER BY rank", [pair]
        )
        _, step, bucket, backward, microbatch, hook, fqns, number, waits = rows[0]
        ranks = [row[0] for row in rows]
        replica = evidence.replica(number)
        waited = f"{verb(ranks, 'waits', 'wait')} for it" if waits else "did without it"
        more = f" So in {counted(count, 'bucket')}." if count > 1 else ""
        yield collectives_match.violation(
            step,
            f"{bucket_phrase(step, bucket, fqns)}: rank {absent} never came to the reduction, "
            f"{ranks_phrase(ranks)} {waited}; {_whereabouts(evidence, absent, step)}.{more}",
            rank=absent,
            ranks=(absent,),
            microbatch=microbatch,
            backward_index=backward,
            bucket_index=bucket,
            **replica.fields,
            hook_name=hook,
            count=count,
            order=float(pair),
        )


def _whereabouts(evidence: Evidence, rank: int, step: int) -> str:
    """What the absent rank did meanwhile, as far as its recording tells."""
    [(last,)] = evidence.rows(
        "SELECT max(step) FROM (SELECT step FROM steps WHERE rank = $1 UNION ALL "
        "SELECT step FROM backward_passes WHERE rank = $1 UNION ALL "
        "SELECT step FROM module_calls WHERE rank = $1)",
        [rank],
    )
    if last is not None and last > step:
        return f"its recording goes on to step {last}"
    ended = "was ended" if rank in evidence.closed_ranks else "was cut off"
    return f"its recording {ended} in step {last}" if last is not None else f"its recording {ended}"
