"""Whether `.grad` holds what backward passes put there: what it held before plus what arrived, or what arrived alone.

Sketches are linear, so the law is read from them: of what a parameter's AccumulateGrad got, and of `.grad` before
and after it. What a law about 4 lanes cannot see is a change that cancels in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from gradtrace_analyzer.check.evidence import Evidence
from gradtrace_analyzer.check.law import Findings, Violation, law, outcome
from gradtrace_analyzer.numerics.sketches import closest_multiple, is_same_factor
from gradtrace_analyzer.numerics.tolerance import LANE_EPSILON, LAW_ULPS, epsilon
from gradtrace_analyzer.sql.pipelines import stages_of_roots
from gradtrace_analyzer.words.nouns import listed
from gradtrace_analyzer.words.numbers import counted, noun, ranks_phrase

# The norm of what is left over that counts as a change: far beyond rounding, which the sketches' own adds to.
_LEAST = 1e-4


# A parameter's `.grad` after each accumulation, with what it held before (null where that is not known) and what came.
_ACCUMULATED = """
WITH held AS (
    SELECT *, lag(on_node_lanes(sketch)) OVER before AS old, lag(numel) OVER before AS old_numel,
        lag(backward_index) OVER before AS old_backward_index, lag(point) OVER before AS old_point
    FROM gradients WHERE point IN ('carried', 'local', 'reduced')
    WINDOW before AS (PARTITION BY rank, step, root, parameter_fqn ORDER BY record_index))
SELECT h.rank, h.step, h.backward_index, h.microbatch, h.root, h.parameter_fqn, h.dtype, h.norm, h.record_index,
    h.old_backward_index, h.old_point, h.old, n.grad_output_sketch AS came, on_node_lanes(h.sketch) AS new,
    h.fingerprint IS NOT DISTINCT FROM n.grad_output_fingerprint AS is_alone
FROM held h JOIN node_events n ON n.rank = h.rank AND n.step = h.step AND n.backward_index = h.backward_index
    AND n.root = h.root AND n.parameter_fqn = h.parameter_fqn AND n.outcome = 'ok'
LEFT JOIN backward_passes o ON o.rank = h.rank AND o.step = h.step AND o.backward_index = h.old_backward_index
WHERE h.point = 'local' AND h.old IS NOT NULL AND h.numel = n.grad_output_numel AND h.numel = h.old_numel
    AND h.dtype = n.grad_output_dtype
    -- What a pass that reduced made of a gradient that no bucket held is not known: DDP may reduce it late.
    AND (h.old_point <> 'local' OR o.ddp_sync IS DISTINCT FROM 'sync')
    AND coalesce(h.nan_count + h.inf_count + n.grad_output_nan_count + n.grad_output_inf_count, 1) = 0
"""

# Ranks with gradients that a weight half added to, of which no Node tells what came.
_BY_HAND = """
SELECT DISTINCT g.rank FROM gradients g JOIN (SELECT DISTINCT rank, step, microbatch FROM stage_events
    WHERE kind = 'backward_weight' AND error IS NULL) w USING (rank, step, microbatch)
ANTI JOIN node_events n ON n.rank = g.rank AND n.step = g.step AND n.backward_index = g.backward_index
    AND n.root = g.root AND n.parameter_fqn = g.parameter_fqn
WHERE g.point = 'local' AND EXISTS (FROM node_events) ORDER BY 1
"""


@dataclass(frozen=True)
class _Changed:
    """A `.grad` that is neither: by how much of its norm, and what its old value was multiplied by, if that explains
    it. `since` is the pass after which it was right, None where the step began with it."""

    rank: int
    step: int
    backward_index: int
    microbatch: int
    root: int
    parameter_fqn: str
    since: int | None
    share: float
    factor: float | None


@law(
    "gradients_accumulate",
    "warning",
    unit="accumulation",
    doc="After a backward pass `.grad` holds what it held before in the step plus what arrived, or what arrived alone "
    "(it was reset): nothing else changes it between passes.",
    after=["actions_complete"],
)
def gradients_accumulate(evidence: Evidence) -> Findings:
    """Report the first passes before which `.grad` was changed outside backward."""
    [(most,)] = evidence.rows(
        "SELECT max(n) FROM (SELECT count(*) AS n FROM backward_passes WHERE kind = 'backward' GROUP BY rank, step)"
    )
    if most == 1:
        return Findings()  # one pass a step accumulates onto nothing: that is no lack
    evidence.connection.execute(f"CREATE TEMP TABLE accumulated AS {_ACCUMULATED}")
    [(compared,)] = evidence.rows("SELECT count(*) FROM accumulated")
    found = list(_of_first_step(evidence))
    by_hand = [rank for (rank,) in evidence.rows(_BY_HAND)]
    notes = []
    if by_hand:
        who = ranks_phrase(by_hand)
        notes.append(
            f"What weight halves of stages add to `.grad` on {who} is added by hand, past AccumulateGrad. That "
            "a gradient was changed between two of them is seen by no law (gradients_accumulate did not judge them)."
        )
    return outcome(
        list(_told(evidence, found)),
        compared,
        "no gradient was accumulated onto one that was recorded before it in its step",
        notes=notes,
    )


def _of_first_step(evidence: Evidence) -> Iterator[_Changed]:
    """What was changed in the first step in which anything was, in program order."""
    cursor = evidence.connection.execute(
        "SELECT rank, step, backward_index, microbatch, root, parameter_fqn, "
        "CASE WHEN old_point <> 'carried' THEN old_backward_index END, dtype, norm, old, came, new "
        "FROM accumulated WHERE NOT is_alone ORDER BY step, record_index, rank"
    )
    first_step = None
    while rows := cursor.fetchmany(10_000):
        for rank, step, index, microbatch, root, fqn, since, dtype, norm, old, came, new in rows:
            if first_step is not None and step > first_step:
                return
            left = _left_over(old, came, new, LAW_ULPS * max(epsilon(dtype), LANE_EPSILON))
            if left is not None:
                first_step = step
                share = left[0] / norm if norm else 1.0
                yield _Changed(rank, step, index, microbatch, root, fqn, since, share, left[1])


def _left_over(
    old: Sequence[float], came: Sequence[float], new: Sequence[float], allowed: float
) -> tuple[float, float | None] | None:
    """(the norm of what neither explains, the factor that explains it); None where one of the two laws holds."""
    size = math.hypot(*old) + math.hypot(*came) + math.hypot(*new)
    least = max(allowed, _LEAST) * size
    kept = [n - c for n, c in zip(new, came, strict=True)]
    reset = math.hypot(*kept)
    added = math.dist(kept, old)
    if not math.isfinite(size) or min(reset, added) <= least:
        return None
    fit = closest_multiple(old, kept)
    explains = fit is not None and fit.left_over <= 2 * least
    return min(reset, added), fit.factor if fit is not None and explains else None


def _told(evidence: Evidence, found: Sequence[_Changed]) -> Iterator[Violation]:
    """One violation for each pass that is a rank's first to show it, with all its ranks and parameters."""
    firsts: dict[int, int] = {}
    for changed in found:
        firsts.setdefault(changed.rank, changed.backward_index)
    for index in dict.fromkeys(firsts.values()):
        same = [f for f in found if f.backward_index == index == firsts[f.rank]]
        first = same[0]
        ranks = tuple(sorted({f.rank for f in same}))
        names = list(dict.fromkeys(f.parameter_fqn for f in same))
        began = (
            "in front of"
            if first.since is None
            else f"after backward pass {first.since} and before"
        )
        later = {f.backward_index for f in found if f.rank in ranks} - {index}
        more = f" So before {counted(len(later), 'later pass')} of the step." if later else ""
        stages = _stages(evidence, first.step, {(f.rank, f.root) for f in same})
        where = ""
        if stages:
            listed_stages = ", ".join(str(stage) for stage, _ in stages)
            where = (
                f" ({noun(len(stages), 'stage')} {listed_stages}, microbatch {first.microbatch})"
            )
            more += _divided_again(first.factor, {count for _, count in stages})
        yield gradients_accumulate.violation(
            first.step,
            f"Step {first.step}, {ranks_phrase(ranks)}{where}: {began} pass {index}, `.grad` of {listed(names, 2)} was "
            f"{_how(same)} outside backward.{more}",
            rank=ranks[0] if len(ranks) == 1 else None,
            ranks=ranks,
            microbatch=first.microbatch,
            backward_index=index,
            root=first.root,
            parameter_fqn=first.parameter_fqn,
            factor=first.factor,
            stage_index=stages[0][0] if len(stages) == 1 else None,
            count=len(same),
        )


def _stages(evidence: Evidence, step: int, roots: Set[tuple[int, int]]) -> list[tuple[int, int]]:
    """(stage, number of its microbatches) of those roots that are stages of a pipeline."""
    found: list[tuple[int, int]] = []
    for rank, root, stage in evidence.rows(f"FROM ({stages_of_roots()}) ORDER BY stage_index"):
        if (rank, root) in roots:
            [(count,)] = evidence.rows(
                "SELECT count(DISTINCT microbatch) FROM stage_events WHERE rank = ? AND step = ? AND stage_index = ? "
                "AND kind = 'forward'",
                [rank, step, stage],
            )
            found.append((stage, count))
    return found


def _divided_again(factor: float | None, counts: Set[int]) -> str:
    """That a schedule which runs several times in a step divides what the runs before gave, each time again."""
    if factor is None or not any(abs(factor * count - 1) < 1e-3 for count in counts if count > 1):
        return ""
    return (
        f" {1 / factor:.0f} is the number of microbatches: a schedule divides by it at the end of each of its runs "
        "(`scale_grads`), so what an earlier run of the step gave is divided again."
    )


def _how(same: Sequence[_Changed]) -> str:
    first = same[0]
    if first.factor is not None and all(is_same_factor(f.factor, first.factor) for f in same):
        return f"multiplied by {first.factor:.4g}"
    return f"changed (of {first.parameter_fqn}, {first.share:.1%} of its norm is neither what it held nor what arrived)"
