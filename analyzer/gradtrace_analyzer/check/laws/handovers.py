"""Whether what a pipeline stage receives is what its neighbour sent: activations from the stage before, gradients from
the one after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gradtrace_analyzer.check.evidence import Evidence
from gradtrace_analyzer.check.law import Findings, Violation, law, not_judged, outcome
from gradtrace_analyzer.numerics.sketches import factor_between, relative_error
from gradtrace_analyzer.numerics.tolerance import epsilon
from gradtrace_analyzer.sql.pipelines import PHASES, make_handed, stepless_ranks
from gradtrace_analyzer.words.nouns import upper_first
from gradtrace_analyzer.words.numbers import counted, ranks_phrase

NO_STAGE = "no pipeline stage was recorded"
NOT_BOTH = (
    "of no tensor was a fingerprint recorded both where it was sent and where it was received (a job's own stages say "
    "what they hand on with `received` and `sent` of `gradtrace_recorder.stage`)"
)

# What was received beside what was sent for it. A cut-off rank may lack the row of what it had sent.
_PAIRED = """
CREATE TEMP TABLE handovers AS
SELECT r.*, n.other_rank, s.record_index IS NOT NULL AS is_sent, s.kind AS sent_kind, s.numel AS sent_numel,
    s.dtype AS sent_dtype, s.norm AS sent_norm, s.nan_count AS sent_nan_count, s.inf_count AS sent_inf_count,
    s.fingerprint AS sent_fingerprint, s.sketch AS sent_sketch
FROM received r JOIN neighbours n USING (rank, stage_index, what)
LEFT JOIN sent s ON s.rank = n.other_rank AND s.stage_index = n.other_stage AND s.what = r.what AND s.step = r.step
    AND s.microbatch = r.microbatch AND s.nth = r.nth
WHERE r.fingerprint IS NOT NULL AND r.other_stage = n.other_stage
"""

# What never came to the rank it was made for. Either what was sent after it came in the places of other things, since
# what is not sent is not waited for by a number; or it alone is no send that was waited for, and nothing came.
_LOST = """
CREATE TEMP TABLE lost AS
WITH over AS (SELECT s.*, n.rank AS receiver FROM sent s JOIN neighbours n ON n.other_rank = s.rank
        AND n.other_stage = s.stage_index AND n.stage_index = s.other_stage AND n.what = s.what AND n.rank <> s.rank
    WHERE s.fingerprint IS NOT NULL AND s.norm > 0),
never AS (FROM over o ANTI JOIN received r
    ON r.rank = o.receiver AND r.step = o.step AND r.fingerprint = o.fingerprint),
moved AS (SELECT o.rank, o.receiver, o.step, max(o.record_index) AS last FROM over o JOIN received r
    ON r.rank = o.receiver AND r.step = o.step AND r.fingerprint = o.fingerprint
    AND (r.what, r.stage_index, r.microbatch) <> (o.what, o.other_stage, o.microbatch)
    -- What came where it belongs too was sent twice.
    WHERE NOT EXISTS (FROM received own WHERE own.rank = o.receiver AND own.step = o.step AND own.what = o.what
        AND own.stage_index = o.other_stage AND own.microbatch = o.microbatch AND own.fingerprint = o.fingerprint)
    GROUP BY ALL),
waited AS (SELECT DISTINCT rank, step, stage_index, microbatch, CASE kind WHEN 'send_activations' THEN 'activations'
    ELSE 'gradient' END AS what FROM stage_events WHERE kind IN ('send_activations', 'send_gradients'))
SELECT * FROM (SELECT *, EXISTS (FROM moved m WHERE m.rank = o.rank AND m.receiver = o.receiver AND m.step = o.step
        AND m.last > o.record_index) AS is_moved FROM never o) n
WHERE is_moved
    OR (n.rank, n.step, n.stage_index, n.what) IN (SELECT (w.rank, w.step, w.stage_index, w.what) FROM waited w)
    AND (n.rank, n.step, n.stage_index, n.microbatch, n.what) NOT IN
        (SELECT (w.rank, w.step, w.stage_index, w.microbatch, w.what) FROM waited w)
    AND (n.receiver, n.step, n.other_stage, n.microbatch, n.what) NOT IN
        (SELECT (r.rank, r.step, r.stage_index, r.microbatch, r.what) FROM received r)
QUALIFY row_number() OVER (PARTITION BY n.rank, n.receiver ORDER BY step, record_index) = 1
"""

_BROKEN = """
SELECT *, count(*) OVER (PARTITION BY stage_index, what, is_sent) AS like_it FROM handovers h
WHERE NOT EXISTS (FROM lost l WHERE l.rank = h.other_rank AND l.receiver = h.rank AND l.step <= h.step)
    AND CASE WHEN is_sent THEN sent_fingerprint <> fingerprint ELSE list_contains($whole, other_rank)
        AND EXISTS (FROM sent o WHERE o.rank = other_rank AND o.step = h.step AND o.stage_index = other_stage) END
QUALIFY row_number() OVER (PARTITION BY stage_index, what, is_sent ORDER BY step, start_ns) = 1
ORDER BY step, start_ns
"""


@law(
    "handovers_equal",
    "error",
    unit="handover",
    doc="What a pipeline stage receives is bit for bit what its neighbour sent for that microbatch: activations from "
    "the stage before, gradients from the one after.",
    after=["passes_complete"],
)
def handovers_equal(evidence: Evidence) -> Findings:
    """Report for each boundary the first thing that was not received as it was sent."""
    if not make_handed(evidence.connection):
        return without_stages(evidence)
    stepless = stepless_ranks(evidence.connection)
    evidence.connection.execute(
        "DELETE FROM neighbours WHERE list_contains($1, rank) OR list_contains($1, other_rank)",
        [list(stepless) or [-1]],
    )
    evidence.connection.execute(_PAIRED)
    evidence.connection.execute(_LOST)
    [(compared,)] = evidence.rows("SELECT count(*) FROM handovers WHERE is_sent")
    whole = sorted(evidence.closed_ranks - evidence.losing_ranks) or [-1]
    violations = [_missing(row) for row in _named(evidence, "FROM lost ORDER BY step, start_ns")]
    violations += [
        v for row in _named(evidence, _BROKEN, {"whole": whole}) for v in _told(evidence, row)
    ]
    notes = []
    if stepless:
        who = ranks_phrase(stepless)
        notes.append(
            f"{upper_first(who)} ran no optimizer, so that every run of the schedule there counts as one step: "
            "what was handed on is not compared there; gradtrace_recorder.step(n) tells steps apart."
        )
    return outcome(violations, compared, NOT_BOTH, notes=notes)


def without_stages(evidence: Evidence) -> Findings:
    """The findings of a law about stages where there are none: a run that is no pipeline lacks nothing."""
    if evidence.rows("SELECT 1 FROM backward_passes LIMIT 1"):
        return Findings()
    return not_judged(NO_STAGE)


def _named(
    evidence: Evidence, query: str, parameters: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    cursor = evidence.connection.execute(query, parameters or {})
    names = [column[0] for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def _missing(row: Mapping[str, Any]) -> Violation:
    what = "activations" if row["what"] == "activations" else "gradient"
    then = f"Rank {row['receiver']} waits for it."
    if row["is_moved"]:
        then = f"What rank {row['rank']} sent after it came in the place of other things."
    return handovers_equal.violation(
        row["step"],
        f"Step {row['step']}, microbatch {row['microbatch']}: the {what} that stage {row['stage_index']} (rank "
        f"{row['rank']}) made for stage {row['other_stage']} (rank {row['receiver']}) never came there: the send is "
        f"missing. {then}",
        rank=row["rank"],
        ranks=(row["rank"], row["receiver"]),
        microbatch=row["microbatch"],
        stage_index=row["stage_index"],
        phase=PHASES[row["kind"]],
        count=1,
        order=-1.0,
    )


def _told(evidence: Evidence, row: Mapping[str, Any]) -> Iterator[Violation]:
    if row["is_sent"] and row["dtype"] != row["sent_dtype"] and _is_rounded(row):
        return
    stage, other = row["stage_index"], row["other_stage"]
    what, verb = (
        ("the activations", "are") if row["what"] == "activations" else ("the gradient", "is")
    )
    start = (
        f"Step {row['step']}, microbatch {row['microbatch']}: {what} that stage {stage} (rank {row['rank']}) received "
        f"from stage {other} (rank {row['other_rank']}) "
    )
    factor, why = None, ""
    if not row["is_sent"]:
        said = f"{verb} of no action of it: stage {other} sent nothing for that microbatch"
    else:
        factor, why = _difference(evidence, row)
        said = f"{verb} not what was sent{why}"
    more = f" So {row['like_it']:,} times." if row["like_it"] > 1 else ""
    yield handovers_equal.violation(
        row["step"],
        f"{start}{said}.{more}",
        rank=row["rank"],
        ranks=(row["rank"], row["other_rank"]),
        microbatch=row["microbatch"],
        stage_index=stage,
        phase=PHASES[row["kind"]],
        factor=factor,
        count=row["like_it"],
        order=float(row["start_ns"]),
    )


def _is_rounded(row: Mapping[str, Any]) -> bool:
    """Whether it was sent in another dtype, and differs by no more than that."""
    error = _error(row)
    return error is not None and error <= max(epsilon(row["dtype"]), epsilon(row["sent_dtype"]))


def _error(row: Mapping[str, Any]) -> float | None:
    sent, received = ({s: row[f"{side}{s}"] for s in ("norm", "sketch")} for side in ("sent_", ""))
    return relative_error(sent, received, from_sketches_alone=True)


def _difference(evidence: Evidence, row: Mapping[str, Any]) -> tuple[float | None, str]:
    """(the factor, if one explains it; what it is instead, to follow `is not what was sent`)."""
    for name, what in (("nan_count", "NaN"), ("inf_count", "infinite")):
        if (row[name] or 0) != (row[f"sent_{name}"] or 0):
            return None, (
                f": it has {counted(row[name], f'{what} element')}, and had {row[f'sent_{name}']} when it was sent"
            )
    other = evidence.rows(
        "SELECT step, microbatch FROM sent WHERE rank = $1 AND stage_index = $2 AND what = $3 AND fingerprint = $4 "
        "ORDER BY step = $5 DESC, abs(step - $5), abs(microbatch - $6) LIMIT 1",
        [
            row["other_rank"], row["other_stage"], row["what"], row["fingerprint"], row["step"], row["microbatch"],
        ],
    )  # fmt: skip
    if other and row["norm"]:
        step, microbatch = other[0]
        when = "" if step == row["step"] else f" of step {step}"
        verb = "they are" if row["what"] == "activations" else "it is"
        return None, f": {verb} what was sent for microbatch {microbatch}{when}"
    if row["numel"] != row["sent_numel"]:
        return None, f": {row['numel']:,} elements instead of {row['sent_numel']:,}"
    if row["norm"] == 0:
        return 0.0, ", but all zero"
    factor = factor_between(row["sent_sketch"], row["sketch"])
    if factor is not None:
        return factor, f", but {factor:.4g} times that"
    error = _error(row)
    if error is None or error == 0:
        return None, ""
    they = row["what"] == "activations"
    return None, f": {'they differ' if they else 'it differs'} by {error:.1e}"
