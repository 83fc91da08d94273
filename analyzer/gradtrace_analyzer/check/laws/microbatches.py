"""Whether the gradients of a stage's microbatches add up: none is lost in between, and all stages are scaled alike.

That what a microbatch has given is gone is told by bits: `.grad` then is just what a Node gave in the next one. What
a weight half adds is in no row of its own, so of it nothing more can be told from one run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gradtrace_analyzer.check.evidence import Evidence
from gradtrace_analyzer.check.law import Findings, Violation, law, outcome
from gradtrace_analyzer.check.laws.handovers import without_stages
from gradtrace_analyzer.sql.pipelines import stages_of_roots
from gradtrace_analyzer.words.nouns import listed

# What a stage's parameter held after each microbatch, with what it held after the one before in the same run of the
# schedule: a microbatch that comes again is of another.
_HELD = f"""
CREATE TEMP TABLE stage_gradients AS
SELECT *, lag(norm) OVER before AS old_norm, lag(microbatch) OVER before AS old_microbatch, lag(nth) OVER before AS
    old_nth FROM (
    SELECT g.*, r.stage_index, row_number() OVER (
        PARTITION BY g.rank, g.step, g.root, g.parameter_fqn, g.microbatch ORDER BY g.record_index) AS nth
    FROM gradients g JOIN ({stages_of_roots()}) r USING (rank, root) WHERE g.point = 'local')
WINDOW before AS (PARTITION BY rank, step, root, parameter_fqn ORDER BY record_index)
"""

# An old value this much smaller than what comes may be rounded away.
_LEAST = 0.05

_LOST = f"""
WITH given AS (
    SELECT rank, step, microbatch, grad_input_fingerprint AS fingerprint FROM node_events
    UNION SELECT rank, step, microbatch, grad_output_fingerprint FROM node_events WHERE parameter_fqn IS NOT NULL
    UNION SELECT rank, step, microbatch, fingerprint FROM node_tensors WHERE direction = 'grad_input')
SELECT rank, step, stage_index, old_microbatch, microbatch, min(backward_index), root,
    list(parameter_fqn ORDER BY parameter_fqn) FROM stage_gradients h
SEMI JOIN given USING (rank, step, microbatch, fingerprint)
WHERE old_nth = nth AND old_microbatch <> microbatch AND old_norm > {_LEAST} * norm AND norm > 0
GROUP BY ALL ORDER BY step, min(record_index)
"""

# The factor between what a parameter holds after its last microbatch and what its optimizer saw.
_SCALED = f"""
WITH last AS (SELECT rank, step, root, parameter_fqn, arg_max(sketch, record_index)::DOUBLE[] AS a
    FROM gradients WHERE point IN ('local', 'reduced') GROUP BY ALL),
factors AS (
    SELECT f.rank, f.step, r.stage_index, parameter_fqn,
        least_squares_factor(a, f.sketch::DOUBLE[]) AS factor, left_over(a, f.sketch::DOUBLE[], factor) AS rest
    FROM last JOIN gradients f USING (rank, step, root, parameter_fqn) JOIN ({stages_of_roots()}) r USING (rank, root)
    WHERE f.point = 'final' AND len(a) = len(f.sketch) AND list_dot_product(a, a) > 0
        AND f.nan_count + f.inf_count = 0)
SELECT step, stage_index, rank, median(factor) AS factor FROM factors GROUP BY ALL
HAVING max(rest) < 1e-3 AND max(factor) - min(factor) <= 1e-3 * max(abs(factor)) ORDER BY ALL
"""


@law(
    "microbatches_add_up",
    "error",
    unit="sum",
    doc="What a pipeline stage's microbatches give adds up in `.grad`: none of it is lost before the next one, and "
    "after the last the gradients of all stages are divided by the same number.",
    after=["gradients_accumulate"],
)
def microbatches_add_up(evidence: Evidence) -> Findings:
    """Report the first loss of what microbatches gave, and the first step whose stages were not scaled alike."""
    [(any_stage,)] = evidence.rows(
        "SELECT count(*) FROM stage_events WHERE stage_index IS NOT NULL"
    )
    if not any_stage:
        return without_stages(evidence)
    evidence.connection.execute(_HELD)
    [(compared,)] = evidence.rows("SELECT count(*) FROM stage_gradients WHERE old_norm IS NOT NULL")
    scaled = evidence.rows(_SCALED)
    violations = [*_lost(evidence), *_unlike(evidence, scaled)]
    return outcome(
        violations,
        compared + len(scaled),
        "no gradient of a stage was recorded after several microbatches",
    )


def _lost(evidence: Evidence) -> Iterator[Violation]:
    told = set()
    for rank, step, stage, before, microbatch, index, root, fqns in evidence.rows(_LOST):
        if (rank, stage) in told:
            continue
        told.add((rank, stage))
        yield microbatches_add_up.violation(
            step,
            f"Step {step}, microbatch {before}: what it and those before it gave is lost in stage {stage} (rank "
            f"{rank}): `.grad` of {listed(fqns, 2)} was set to zero before microbatch {microbatch}, after which it "
            "holds what that one gave, and nothing else.",
            rank=rank,
            ranks=(rank,),
            microbatch=before,
            backward_index=index,
            stage_index=stage,
            root=root,
            parameter_fqn=fqns[0],
            count=len(fqns),
            order=float(before),
        )


def _unlike(evidence: Evidence, scaled: list[tuple[Any, ...]]) -> Iterator[Violation]:
    for step in dict.fromkeys(row[0] for row in scaled):
        rows = [row[1:] for row in scaled if row[0] == step]
        for stage, rank, factor in rows:
            others = [f for s, _, f in rows if s != stage]
            usual = others[0] if others else factor
            if any(abs(f - usual) > 1e-3 * abs(usual) for f in others) or len(others) < 2:
                continue
            count = _microbatch_count(evidence, step, stage)
            if not _is_forgotten(factor, usual, count):
                continue
            yield microbatches_add_up.violation(
                step,
                f"Step {step}: after its {count} microbatches the gradients of stage "
                f"{stage} (rank {rank}) were {_scaled(factor)}, those of the other stages {_scaled(usual)}: "
                f"{_why(factor, usual)}.",
                rank=rank,
                ranks=(rank,),
                stage_index=stage,
                factor=factor / usual if usual else None,
                count=count,
            )
            return


def _microbatch_count(evidence: Evidence, step: int, stage: int) -> int:
    [(count,)] = evidence.rows(
        "SELECT count(DISTINCT microbatch) FROM stage_events WHERE step = ? AND stage_index = ?",
        [step, stage],
    )
    return int(count)


def _is_forgotten(factor: float, usual: float, count: int) -> bool:
    """Whether it was divided by the number of microbatches once more, or once less, than the others; or is gone."""
    if usual == 0 or count < 2:
        return False
    ratio = abs(factor / usual)
    return any(abs(ratio - times) < 1e-3 * max(times, 1e-3) for times in (count, 1 / count, 0.0))


def _scaled(factor: float) -> str:
    if abs(factor - 1) < 1e-3:
        return "not scaled"
    return "set to zero" if abs(factor) < 1e-6 else f"multiplied by {factor:.4g}"


def _why(factor: float, usual: float) -> str:
    if abs(factor) < 1e-6:
        return "what all its microbatches gave is lost"
    once = "left out" if abs(factor) > abs(usual) else "done twice"
    return f"dividing by the number of microbatches was {once}"
