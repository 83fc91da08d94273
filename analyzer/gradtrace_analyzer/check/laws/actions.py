"""Whether each pipeline stage has done for each microbatch all that it must, and nothing twice."""

from __future__ import annotations

from typing import Any

from gradtrace_analyzer.check.evidence import Evidence
from gradtrace_analyzer.check.law import Findings, Violation, law, outcome
from gradtrace_analyzer.check.laws.handovers import without_stages
from gradtrace_analyzer.sql.pipelines import FORWARD, FULL, INPUT, WEIGHT, stepless_ranks

# How often each stage did each action, beside the most that any stage did for that microbatch. Left out are steps in
# which an action failed, and those at the end of a rank that was cut off, or of which rows are lost.
_COUNTS = f"""
CREATE TEMP TABLE action_counts AS
WITH ended AS (SELECT rank, max(step) AS step FROM stage_events WHERE NOT list_contains($closed, rank) GROUP BY 1),
torn AS (SELECT DISTINCT step FROM stage_events WHERE error IS NOT NULL
    UNION SELECT e.step FROM ended e UNION SELECT step FROM stage_events WHERE list_contains($losing, rank)),
-- A step whose gradients the optimizer saw, or after which there are others, was not broken off.
ended_well AS (SELECT DISTINCT rank, step FROM gradients WHERE point = 'final'
    UNION SELECT DISTINCT rank, step FROM stage_events e
        WHERE EXISTS (FROM stage_events o WHERE o.rank = e.rank AND o.step > e.step)),
whole AS (FROM stage_events SEMI JOIN ended_well USING (rank, step)
    WHERE stage_index IS NOT NULL AND step NOT IN (FROM torn) AND NOT list_contains($stepless, rank)),
places AS (SELECT DISTINCT rank, step, stage_index FROM whole),
microbatches AS (SELECT DISTINCT step, microbatch FROM whole WHERE kind = '{FORWARD}'),
counts AS (SELECT p.rank, p.step, p.stage_index, m.microbatch,
        count(*) FILTER (w.kind = '{FORWARD}') AS forwards, count(*) FILTER (w.kind = '{FULL}') AS fulls,
        count(*) FILTER (w.kind = '{INPUT}') AS inputs, count(*) FILTER (w.kind = '{WEIGHT}') AS weights
    FROM places p JOIN microbatches m USING (step)
    LEFT JOIN whole w USING (rank, step, stage_index, microbatch) GROUP BY ALL)
SELECT *, fulls + inputs AS backwards, max(fulls + inputs) OVER same AS most_backwards,
    max(forwards) OVER same AS most_forwards, min(forwards - fulls - inputs) OVER same AS least_left,
    sum((forwards > fulls + inputs)::INT) OVER same AS with_left
FROM counts WINDOW same AS (PARTITION BY step, microbatch)
"""

_BROKEN = """
SELECT *, count(*) OVER (PARTITION BY stage_index, how) AS like_it FROM (
    SELECT *, CASE WHEN weights < inputs THEN 'weight missing' WHEN weights > inputs THEN 'weight twice'
        WHEN backwards > forwards THEN 'backward twice'
        WHEN forwards < most_forwards AND backwards < most_backwards THEN 'nothing'
        WHEN backwards < most_backwards AND forwards >= most_backwards THEN 'backward missing'
        WHEN forwards > backwards AND backwards > 0 AND least_left = 0 AND with_left = 1 THEN 'forward twice'
        END AS how FROM action_counts) WHERE how IS NOT NULL
QUALIFY row_number() OVER (PARTITION BY stage_index, how ORDER BY step, microbatch) = 1
ORDER BY step, microbatch, stage_index
"""


@law(
    "actions_complete",
    "error",
    unit=("microbatch of a stage", "microbatches of stages"),
    doc="A pipeline stage runs for each microbatch one forward, and one whole backward, or one input half and one "
    "weight half; as often as the schedule is run in the step.",
    after=["handovers_equal"],
)
def actions_complete(evidence: Evidence) -> Findings:
    """Report for each stage the first microbatch of which an action is missing, or was done twice."""
    evidence.connection.execute(
        _COUNTS,
        {
            "closed": sorted(evidence.closed_ranks) or [-1],
            "losing": sorted(evidence.losing_ranks) or [-1],
            "stepless": list(stepless_ranks(evidence.connection)) or [-1],
        },
    )
    [(compared,)] = evidence.rows("SELECT count(*) FROM action_counts")
    if not compared and not evidence.rows("SELECT 1 FROM stage_events LIMIT 1"):
        return without_stages(evidence)
    cursor = evidence.connection.execute(_BROKEN)
    names = [column[0] for column in cursor.description or ()]
    violations = [_told(dict(zip(names, row, strict=True))) for row in cursor.fetchall()]
    return outcome(violations, compared, "no step was recorded whole of any stage")


def _told(row: dict[str, Any]) -> Violation:
    forwards, backwards = (_times(row[what], what[:-1]) for what in ("forwards", "backwards"))
    halves, weights = _times(row["inputs"], "input half"), _times(row["weights"], "weight half")
    phase, said = {
        "weight missing": (
            "weight",
            f"{halves} and {weights}: the gradients of its parameters lack that microbatch",
        ),
        "weight twice": (
            "weight",
            f"{halves} and {weights}: that microbatch counts more than once in the gradients of "
            "its parameters",
        ),
        "backward twice": ("backward", f"{forwards} and {backwards}"),
        "backward missing": (
            "backward",
            f"{forwards} and {backwards}, while another stage has "
            f"{_times(row['most_backwards'], 'backward')}",
        ),
        "forward twice": ("forward", f"{forwards} and {backwards}"),
        "nothing": (
            "forward",
            f"{forwards} and {backwards}, while another stage has "
            f"{_times(row['most_forwards'], 'forward')}",
        ),
    }[row["how"]]
    more = f" So {row['like_it']:,} times." if row["like_it"] > 1 else ""
    return actions_complete.violation(
        row["step"],
        f"Step {row['step']}, microbatch {row['microbatch']}: stage {row['stage_index']} (rank {row['rank']}) ran "
        f"{said}.{more}",
        rank=row["rank"],
        ranks=(row["rank"],),
        microbatch=row["microbatch"],
        stage_index=row["stage_index"],
        phase=phase,
        count=row["like_it"],
        order=float(row["microbatch"]),
    )


def _times(count: int, what: str) -> str:
    """`no weight half`, `2 weight halves`."""
    if count == 1:
        return f"1 {what}"
    several = what.replace("half", "halve") + "s"
    return f"{count} {several}" if count else f"no {what}"
