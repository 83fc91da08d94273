"""Whether the ranks of a data-parallel group hold equal buckets, gradients and parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gradtrace_analyzer.check.evidence import Evidence, Replica, Rows
from gradtrace_analyzer.check.law import Findings, Violation, law, not_judged, outcome
from gradtrace_analyzer.check.laws.reductions import deviating_ranks
from gradtrace_analyzer.numerics.hook_promises import hook_phrase
from gradtrace_analyzer.numerics.model import MODEL
from gradtrace_analyzer.words.nouns import bucket_phrase, listed
from gradtrace_analyzer.words.numbers import also_in, counted, possessive, ranks_phrase

_NOT_EQUAL_BY_PROMISE = "the hooks in use do not keep the ranks equal"


def unequal(full: bool, prefix: str = "") -> str:
    """A condition on a group of rows: their tensors are not bit-equal (by norms: not equal in norm, sum, counts).

    NaN have many bit patterns: tensors that all hold some are not compared.
    """
    by_norms = (
        f"max({prefix}norm) - min({prefix}norm) > {MODEL.as_added_up} * max({prefix}norm) "
        f"OR max({prefix}sum) - min({prefix}sum) > "
        f"{MODEL.as_added_up} * max({prefix}norm) * sqrt(max({prefix}numel)) "
        f"OR count(DISTINCT {prefix}inf_count) > 1 OR count(DISTINCT {prefix}nan_count) > 1"
    )
    apart = f"count(DISTINCT {prefix}fingerprint) > 1" if full else by_norms
    return f"({apart}) AND NOT coalesce(min({prefix}nan_count) > 0, false)"


def odd_ranks(identities: Mapping[int, Any]) -> tuple[int, ...]:
    """The ranks outside the majority; none where there is no majority."""
    counts = Counter(identities.values())
    (most, count), *others = counts.most_common()
    if not others or count <= len(identities) / 2:
        return ()
    return tuple(sorted(rank for rank, identity in identities.items() if identity != most))


def disagreement(odd: Sequence[int], everyone: Sequence[int], what: str) -> str:
    """`rank 1's reduced gradient of a differs from that of ranks 0, 2-3`."""
    if not odd:
        return f"{what} differs between {ranks_phrase(everyone)}"
    others = [rank for rank in everyone if rank not in odd]
    return f"{possessive(odd)} {what} differs from that of {ranks_phrase(others)}"


@law(
    "parameters_equal",
    "error",
    unit="parameter",
    doc="All ranks of a data-parallel group hold bit-equal parameters before and after each step.",
    after=["gradients_equal"],
    explained_by=[
        "gradients_equal",
        "reduction_is_mean",
        "collectives_match",
        "buckets_launched",
        "last_pass_reduces",
        "wrapper_called",
    ],
)
def parameters_equal(evidence: Evidence) -> Findings:
    """Report the first step and point at which a module's parameters differ."""
    if not evidence.modules:
        return not_judged(evidence.lacking)
    if not evidence.equal_modules:
        return not_judged(_NOT_EQUAL_BY_PROMISE)
    full = evidence.has_fingerprints("parameters")
    evidence.connection.execute(
        "CREATE TEMP TABLE parameter_groups AS "
        "SELECT m.replica, t.moment, min(p.step) AS step, p.point, p.parameter_fqn, "
        f"min(p.record_index) AS position, {unequal(full)} AS broken FROM parameters p "
        "JOIN members m ON m.rank = p.rank AND m.root = p.root "
        "JOIN moments t ON t.team = m.team AND t.rank = p.rank AND t.step = p.step "
        "JOIN managed g ON g.replica = m.replica AND g.parameter_fqn = p.parameter_fqn "
        "WHERE p.kind = 'parameter' AND p.norm IS NOT NULL AND t.moment IS NOT NULL "
        "GROUP BY m.replica, t.moment, p.point, p.parameter_fqn HAVING count(DISTINCT p.rank) > 1"
    )
    violations, compared = [], 0
    for replica in evidence.equal_modules:
        [(count,)] = evidence.rows(
            "SELECT count(*) FROM parameter_groups WHERE replica = ?", [replica.number]
        )
        compared += count
        broken = evidence.rows(
            "SELECT step, point, count(*), arg_min(parameter_fqn, position), moment FROM parameter_groups "
            "WHERE replica = ? AND broken GROUP BY step, point, moment ORDER BY step, point = 'after'",
            [replica.number],
        )
        if broken:
            violations.append(_parameters_apart(evidence, replica, broken, full))
    reason = "no parameter was recorded on two ranks of a group with values"
    return outcome(violations, compared, reason)


def _parameters_apart(evidence: Evidence, replica: Replica, broken: Rows, full: bool) -> Violation:
    step, point, count, fqn, moment = broken[0]
    identities = _identities(
        evidence,
        "parameters",
        f"root = ? AND point = ? AND parameter_fqn = ? AND {_AT_MOMENT}",
        [replica.root, point, fqn, replica.team, moment],
        replica,
        full,
    )
    odd, everyone = odd_ranks(identities), tuple(sorted(identities))
    when = "before the first forward" if point == "before" else "after the optimizer's step"
    others = f" (and {counted(count - 1, 'more parameter')})" if count > 1 else ""
    start = ""
    if point == "before":
        start = " They differ from the start." if step == 0 else ""
        moved = _changed_between(evidence, replica, fqn, moment) if step else ()
        if moved and len(moved) < len(everyone):
            odd = moved
            start = f" It was changed on {ranks_phrase(odd)} after the optimizer's step {step - 1}."
    steps = sorted({row[0] for row in broken})
    return parameters_equal.violation(
        step,
        f"Step {step}: {disagreement(odd, everyone, f'parameter {fqn}')} {when}{others}.{start}"
        f"{also_in(steps, step)}",
        rank=odd[0] if len(odd) == 1 else None,
        ranks=odd or everyone,
        **replica.fields,
        parameter_fqn=fqn,
        count=count,
        at_start=point == "before",
    )


_AT_MOMENT = "(rank, step) IN (SELECT (rank, step) FROM moments WHERE team = ? AND moment = ?)"


def _changed_between(
    evidence: Evidence, replica: Replica, fqn: str, moment: int
) -> tuple[int, ...]:
    """The ranks on which a parameter is not what their step before had left."""
    found = evidence.rows(
        "SELECT b.rank FROM parameters b JOIN parameters a ON a.rank = b.rank AND a.root = b.root "
        "AND a.parameter_fqn = b.parameter_fqn AND a.step = b.step - 1 AND a.point = 'after' "
        "WHERE b.root = ? AND b.parameter_fqn = ? AND b.point = 'before' "
        "AND (a.fingerprint <> b.fingerprint OR (a.fingerprint IS NULL AND a.norm <> b.norm)) "
        f"AND {_AT_MOMENT.replace('rank, step', 'b.rank, b.step', 1)} ORDER BY 1",
        [replica.root, fqn, replica.team, moment],
    )
    return tuple(rank for (rank,) in found)


def _identities(
    evidence: Evidence,
    table: str,
    where: str,
    values: Sequence[Any],
    replica: Replica,
    full: bool,
    prefix: str = "",
) -> dict[int, Any]:
    """What tells one rank's tensor from another's: its fingerprint, or its norm and sum."""
    identity = f"{prefix}fingerprint" if full else f"printf('%.4e', {prefix}norm)"
    return dict(
        evidence.rows(
            f"SELECT rank, {identity} FROM {table} "
            f"WHERE {where} AND list_contains(?, rank) AND {prefix}norm IS NOT NULL",
            [*values, list(replica.recorded)],
        )
    )


@law(
    "gradients_equal",
    "error",
    unit=("bucket or gradient", "buckets and gradients"),
    doc="After a reduction all ranks of the group hold bit-equal buckets and gradients, and their optimizers see them "
    "so.",
    after=["reduction_is_mean"],
    explained_by=["collectives_match", "reduction_is_mean"],
    as_cause="the gradients differ",
    names_culprit=True,
)
def gradients_equal(evidence: Evidence) -> Findings:
    """Report the first bucket, or reduced gradient, in which ranks differ."""
    if not evidence.modules:
        return not_judged(evidence.lacking)
    if not evidence.equal_modules:
        return not_judged(_NOT_EQUAL_BY_PROMISE)
    _make_gradient_groups(evidence)
    violations: list[Violation] = []
    compared = 0
    for replica in evidence.equal_modules:
        [(buckets, gradients)] = evidence.rows(
            "SELECT (SELECT count(*) FROM bucket_groups WHERE replica = $1), "
            "(SELECT count(*) FROM gradient_groups WHERE replica = $1 AND point = 'reduced')",
            [replica.number],
        )
        compared += buckets + gradients
        found = [
            _buckets_apart(evidence, replica),
            _gradients_apart(evidence, replica, "reduced"),
            _gradients_apart(evidence, replica, "final"),
        ]
        # What breaks later in the chain than something else of that step, or of one before, follows from it.
        earliest: list[Violation] = []
        for v in found:
            if v is not None and all(v.step < w.step for w in earliest):
                earliest.append(v)
        violations += earliest
    reason = "no reduced bucket or gradient was recorded on two ranks of a group with values"
    return outcome(violations, compared, reason)


_BUCKET_GROUPS = """
CREATE TEMP TABLE bucket_groups AS
SELECT replica, pair, min(step) AS step, {unequal} AS broken FROM reductions
WHERE NOT is_shadow AND after_norm IS NOT NULL
GROUP BY replica, pair HAVING count(DISTINCT rank) > 1
"""

# Of the last pass of a step also what the optimizer saw. A gradient whose bucket was not launched stays the rank's
# own: another law tells.
_GRADIENT_GROUPS = """
CREATE TEMP TABLE gradient_groups AS
WITH launched AS (
    SELECT DISTINCT replica, rank, step, backward_index, unnest(parameter_fqns) AS parameter_fqn FROM reductions
    WHERE NOT is_shadow)
SELECT m.replica, g.point, t.moment, min(g.step) AS step, g.backward_index, g.parameter_fqn,
    min(g.record_index) AS position, {unequal} AS broken
FROM gradients g JOIN members m ON m.rank = g.rank AND m.root = g.root
JOIN moments t ON t.team = m.team AND t.rank = g.rank AND t.step = g.step
JOIN managed p ON p.replica = m.replica AND p.parameter_fqn = g.parameter_fqn
JOIN backward_passes b ON b.rank = g.rank AND b.step = g.step AND b.backward_index = g.backward_index
    AND b.ddp_sync = 'sync'
LEFT JOIN launched l ON l.replica = m.replica AND l.rank = g.rank AND l.step = g.step
    AND l.backward_index = g.backward_index AND l.parameter_fqn = g.parameter_fqn
WHERE g.point IN ('reduced', 'final') AND g.norm IS NOT NULL AND t.moment IS NOT NULL
    AND (l.replica IS NOT NULL OR m.replica NOT IN (SELECT replica FROM launched))
GROUP BY m.replica, g.point, t.moment, g.backward_index, g.parameter_fqn HAVING count(DISTINCT g.rank) > 1
"""


def _make_gradient_groups(evidence: Evidence) -> None:
    full = evidence.has_fingerprints("reductions", "after_")
    evidence.connection.execute(_BUCKET_GROUPS.format(unequal=unequal(full, "after_")))
    full = evidence.has_fingerprints("gradients")
    evidence.connection.execute(_GRADIENT_GROUPS.format(unequal=unequal(full, "g.")))


def _buckets_apart(evidence: Evidence, replica: Replica) -> Violation | None:
    broken = evidence.rows(
        "SELECT pair, step FROM bucket_groups WHERE replica = ? AND broken ORDER BY step, pair",
        [replica.number],
    )
    if not broken:
        return None
    pair, step = broken[0]
    full = evidence.has_fingerprints("reductions", "after_")
    identities = _identities(
        evidence, "reductions", "pair = ? AND NOT is_shadow", [pair], replica, full, "after_"
    )
    everyone = tuple(sorted(identities))
    # Between two ranks the odd one is that which came out with something else than the mean.
    wrong = deviating_ranks(evidence).get(pair, frozenset())
    odd = odd_ranks(identities) or (tuple(sorted(wrong)) if len(wrong) == 1 else ())
    [(bucket, backward, microbatch, hook, fqns)] = evidence.rows(
        "SELECT bucket_index, backward_index, microbatch, hook_name, parameter_fqns "
        "FROM reductions WHERE pair = ? AND rank = ? ORDER BY record_index LIMIT 1",
        [pair, (odd or everyone)[0]],
    )
    apart = evidence.rows(
        "SELECT parameter_fqn FROM gradient_groups "
        "WHERE replica = ? AND step = ? AND backward_index = ? AND broken AND point = 'reduced' "
        "AND list_contains(?, parameter_fqn) ORDER BY list_position(?, parameter_fqn)",
        [replica.number, step, backward, fqns, fqns],
    )
    gradients = (
        f" The reduced gradient of {listed([f for (f,) in apart])} differs." if apart else ""
    )
    where = f"after {hook_phrase(hook)} "
    return gradients_equal.violation(
        step,
        f"{bucket_phrase(step, bucket, fqns)}: {where}{disagreement(odd, everyone, 'reduced bucket')}."
        f"{gradients} So in {counted(len(broken), 'bucket')}.",
        rank=odd[0] if len(odd) == 1 else None,
        ranks=odd or everyone,
        microbatch=microbatch,
        backward_index=backward,
        bucket_index=bucket,
        **replica.fields,
        parameter_fqn=apart[0][0] if apart else None,
        hook_name=hook,
        count=len(broken),
        order=float(pair),
    )


def _gradients_apart(evidence: Evidence, replica: Replica, point: str) -> Violation | None:
    broken = evidence.rows(
        "SELECT step, backward_index, parameter_fqn, moment FROM gradient_groups "
        "WHERE replica = ? AND point = ? AND broken ORDER BY step, backward_index, position",
        [replica.number, point],
    )
    if not broken:
        return None
    step, backward, fqn, moment = broken[0]
    identities = _identities(
        evidence,
        "gradients",
        f"root = ? AND backward_index = ? AND parameter_fqn = ? AND point = ? AND {_AT_MOMENT}",
        [replica.root, backward, fqn, point, replica.team, moment],
        replica,
        evidence.has_fingerprints("gradients"),
    )
    odd, everyone = odd_ranks(identities), tuple(sorted(identities))
    if point == "reduced":
        name = f"reduced gradient of {fqn}"
        [(bucket_count,)] = evidence.rows(
            "SELECT count(*) FROM bucket_groups WHERE replica = ? AND step = ?",
            [replica.number, step],
        )
        why = "The buckets that came out of the reduction are equal: it broke after the reduction."
        why = f" {why}" if bucket_count else ""
    else:
        name = f"gradient of {fqn} as the optimizer saw it"
        touched = _changed_after(evidence, replica, fqn, backward, moment)
        odd = odd or (touched if len(touched) < len(everyone) else ())
        where = f" on {ranks_phrase(odd)}" if odd else ""
        [(seen,)] = evidence.rows(
            "SELECT count(*) FROM gradient_groups WHERE replica = ? AND step = ? AND parameter_fqn = ? "
            "AND point = 'reduced'",
            [replica.number, step, fqn],
        )
        why = f" The reduced gradients are equal: it was changed{where} between backward() and the optimizer's step."
        why = why if seen else ""
    count = sum(row[0] == step for row in broken)
    others = f" (and of {counted(count - 1, 'more parameter')})" if count > 1 else ""
    return gradients_equal.violation(
        step,
        f"Step {step}: {disagreement(odd, everyone, name)}{others}.{why}"
        f"{also_in(sorted({row[0] for row in broken}), step)}",
        rank=odd[0] if len(odd) == 1 else None,
        ranks=odd or everyone,
        backward_index=backward,
        **replica.fields,
        parameter_fqn=fqn,
        count=count,
    )


def _changed_after(
    evidence: Evidence, replica: Replica, fqn: str, backward: int, moment: int
) -> tuple[int, ...]:
    """The ranks on which a gradient is not what the reduction had left."""
    found = evidence.rows(
        "SELECT rank FROM gradients WHERE root = ? AND parameter_fqn = ? AND backward_index = ? "
        f"AND point IN ('reduced', 'final') AND {_AT_MOMENT} GROUP BY rank "
        "HAVING count(DISTINCT fingerprint) > 1 "
        "OR (count(fingerprint) = 0 AND count(DISTINCT norm) > 1) ORDER BY 1",
        [replica.root, fqn, backward, replica.team, moment],
    )
    return tuple(rank for (rank,) in found)
