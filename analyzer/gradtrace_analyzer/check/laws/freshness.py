"""Whether ranks train on data of their own, and every step on what the one before has changed."""

from __future__ import annotations

from gradtrace_analyzer.check.evidence import Evidence
from gradtrace_analyzer.check.law import Findings, law, not_judged, outcome
from gradtrace_analyzer.words.numbers import counted, ranks_phrase, steps_phrase, verb

# What a rank was fed in a step. Scalars and constants (a mask of ones, a learning rate) are the same everywhere.
_FED = """
SELECT m.team, i.step, i.rank,
    string_agg(concat_ws(' ', i.microbatch, i.root, i.call_index, i.name, i.fingerprint), ','
        ORDER BY i.microbatch, i.root, i.call_index, i.name) AS fed
FROM inputs i JOIN (SELECT DISTINCT team, rank FROM members) m ON m.rank = i.rank
WHERE i.numel >= 2 AND i.norm > 0 AND i.fingerprint IS NOT NULL
    AND abs(i.sum) IS DISTINCT FROM i.abs_max * i.numel
GROUP BY 1, 2, 3
"""


@law(
    "data_differ",
    "warning",
    unit="step",
    doc="The ranks of a data-parallel group train on different inputs in every step.",
)
def data_differ(evidence: Evidence) -> Findings:
    """Report the ranks that were fed the same, and in which steps."""
    if not any(len(r.recorded) > 1 for r in evidence.replicas):
        return not_judged(evidence.lacking)
    evidence.connection.execute(f"CREATE TEMP TABLE fed AS {_FED}")
    [(compared,)] = evidence.rows(
        "SELECT count(*) FROM (SELECT 1 FROM fed GROUP BY team, step HAVING count(*) > 1)"
    )
    found = evidence.rows(
        "SELECT team, ranks, list(step ORDER BY step), "
        "(SELECT count(DISTINCT step) FROM fed f WHERE f.team = same.team) FROM "
        "(SELECT team, step, list(rank ORDER BY rank) AS ranks FROM fed GROUP BY team, step, fed "
        "HAVING count(*) > 1) same GROUP BY team, ranks ORDER BY min(step), ranks"
    )
    violations = []
    for team, ranks, steps, step_count in found:
        group = next(r.group for r in evidence.replicas if r.team == team)
        when = "in every step" if len(steps) == step_count else f"in {steps_phrase(steps)}"
        violations.append(
            data_differ.violation(
                steps[0],
                f"Step {steps[0]}: {ranks_phrase(ranks)} were fed bit-equal inputs, {when}: they train on the same "
                "data.",
                ranks=tuple(ranks),
                group=group,
                count=len(steps),
            )
        )
    return outcome(
        violations,
        compared,
        "no inputs were recorded on two ranks with fingerprints",
    )


# A rank's gradients of a step, and its parameters before it, each folded into one number.
_FOLDED = """
WITH points AS (SELECT CASE WHEN bool_or(point = 'local') THEN 'local' ELSE 'reduced' END AS point FROM gradients),
gradient AS (
    SELECT rank, step, count(*) AS gradient_count,
        bit_xor(hash(root, parameter_fqn, microbatch, fingerprint)) AS gradients
    FROM gradients WHERE point = (SELECT point FROM points) AND norm > 0 AND fingerprint IS NOT NULL GROUP BY 1, 2),
parameter AS (
    SELECT rank, step, bit_xor(hash(root, parameter_fqn, fingerprint)) AS parameters
    FROM parameters WHERE kind = 'parameter' AND point = 'before' AND fingerprint IS NOT NULL GROUP BY 1, 2)
SELECT g.rank, g.step, g.gradient_count,
    g.gradients = o.gradients AND g.gradient_count = o.gradient_count AND p.parameters <> q.parameters AS is_stale
FROM gradient g JOIN gradient o ON o.rank = g.rank AND o.step = g.step - 1
JOIN parameter p ON p.rank = g.rank AND p.step = g.step
JOIN parameter q ON q.rank = g.rank AND q.step = g.step - 1
"""


@law(
    "forward_is_fresh",
    "warning",
    unit=("pair of steps", "pairs of steps"),
    doc="Gradients differ from those of the step before when the parameters do.",
    after=["values_finite"],
)
def forward_is_fresh(evidence: Evidence) -> Findings:
    """Report the first step whose gradients are those of the step before, though its parameters are not."""
    evidence.connection.execute(f"CREATE TEMP TABLE folded AS {_FOLDED}")
    [(compared,)] = evidence.rows("SELECT count(*) FROM folded")
    found = evidence.rows(
        "SELECT min(step), list(DISTINCT rank ORDER BY rank), count(DISTINCT step), "
        "arg_min(gradient_count, step) FROM folded WHERE is_stale HAVING count(*) > 0"
    )
    violations = [
        forward_is_fresh.violation(
            step,
            f"Step {step}, {ranks_phrase(ranks)}: {counted(gradient_count, 'gradient')} "
            f"{verb(range(gradient_count), 'is', 'are')} bit-equal to those of step {step - 1} although the parameters "
            f"changed between: the forward pass used stale weights, or a cached graph. So in {counted(steps, 'step')}.",
            rank=ranks[0] if len(ranks) == 1 else None,
            ranks=tuple(ranks),
            count=steps,
        )
        for step, ranks, steps, gradient_count in found
    ]
    return outcome(
        violations,
        compared,
        "no two consecutive steps have gradients and parameters with fingerprints",
    )
