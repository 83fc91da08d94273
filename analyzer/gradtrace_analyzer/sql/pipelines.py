"""Pipelines in the records: who holds which stage, and who hands what to whom. SQL over the tables of one run.

A stage may be held by several ranks, in as many copies of the pipeline: who a rank's neighbour is is told by what
they handed on, and by their order where that says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import duckdb

FORWARD, FULL, INPUT, WEIGHT = "forward", "backward_full", "backward_input", "backward_weight"
KINDS = (FORWARD, FULL, INPUT, WEIGHT)
ACTIONS = f"('{FORWARD}', '{FULL}', '{INPUT}', '{WEIGHT}')"

# The half of a pass that an action is, in the words of `node_events.phase`.
PHASES = {FORWARD: "forward", FULL: "backward", INPUT: "input", WEIGHT: "weight"}

HALF_WORDS = {
    "forward": "forward",
    "backward": "backward",
    "input": "input half",
    "weight": "weight half",
}

_SUMMARY = ("numel", "dtype", "norm", "nan_count", "inf_count", "fingerprint", "sketch")


@dataclass(frozen=True)
class StagePlace:
    """Where in a pipeline something is: the stage, the microbatch, and the half of the pass (`node_events.phase`).

    What is of no microbatch, such as a parameter, has the stage alone.
    """

    stage_index: int
    microbatch: int | None = None
    phase: str | None = None

    @property
    def said(self) -> str:
        """It in words: `stage 2, microbatch 0, weight half`."""
        said = f"stage {self.stage_index}"
        if self.microbatch is not None:
            said += f", microbatch {self.microbatch}"
        return said if self.phase is None else f"{said}, {HALF_WORDS[self.phase]}"


def action_around(
    connection: duckdb.DuckDBPyConnection,
    rank: int,
    step: int,
    record_index: int,
    microbatch: int | None,
) -> tuple[StagePlace, dict[str, Any]] | None:
    """The action of a stage in which a row was written, with its own row; None outside any.

    An action's row is written when it is over: it is the next one of the rank.
    """
    cursor = connection.execute(
        "SELECT * FROM stage_events WHERE rank = $1 AND step = $2 AND record_index > $3 AND stage_index IS NOT NULL "
        f"AND kind IN {ACTIONS} ORDER BY record_index LIMIT 1",
        [rank, step, record_index],
    )
    names = [column[0] for column in cursor.description or ()]
    for values in cursor.fetchall():
        row = dict(zip(names, values, strict=True))
        if microbatch is None or row["microbatch"] == microbatch:
            place = StagePlace(row["stage_index"], row["microbatch"], PHASES[row["kind"]])
            return place, row
    return None


def _handed(schema: str, side: str) -> str:
    """What actions have received or sent: `what` says of which kind, `other_stage` to whom or from whom.

    `nth` counts a stage's forwards, or backwards of either kind, of one step and microbatch.
    """
    forth, back = ("stage_index - 1", "stage_index + 1")
    if side == "sent":
        forth, back = back, forth
    columns = ", ".join(f"{side}_{name} AS {name}" for name in _SUMMARY)
    return (
        "SELECT *, row_number() OVER (PARTITION BY rank, step, microbatch, stage_index, what ORDER BY record_index) "
        f"AS nth FROM (SELECT rank, step, microbatch, record_index, stage_index, kind, start_ns, {columns}, "
        f"CASE kind WHEN '{FORWARD}' THEN 'activations' ELSE 'gradient' END AS what, "
        f"CASE kind WHEN '{FORWARD}' THEN {forth} ELSE {back} END AS other_stage "
        f"FROM {schema}stage_events WHERE kind IN ('{FORWARD}', '{FULL}', '{INPUT}') AND stage_index IS NOT NULL "
        "AND error IS NULL AND end_ns IS NOT NULL)"
    )


_NEIGHBOURS = """
CREATE TEMP TABLE {name} AS
WITH held AS (SELECT *, row_number() OVER (PARTITION BY stage_index ORDER BY rank) AS place
    FROM (SELECT DISTINCT rank, stage_index FROM {schema}stage_events WHERE stage_index IS NOT NULL)),
met AS (SELECT r.rank, r.stage_index, r.what, s.rank AS other_rank, count(*) AS times
    FROM {received} r JOIN {sent} s ON s.stage_index = r.other_stage AND s.what = r.what AND s.step = r.step
        AND s.microbatch = r.microbatch AND s.nth = r.nth AND s.fingerprint = r.fingerprint GROUP BY ALL)
SELECT a.rank, a.stage_index, w.what, b.stage_index AS other_stage, b.rank AS other_rank
FROM held a CROSS JOIN (VALUES ('activations', -1), ('gradient', 1)) w (what, offset_)
JOIN held b ON b.stage_index = a.stage_index + w.offset_
LEFT JOIN met m ON m.rank = a.rank AND m.stage_index = a.stage_index AND m.what = w.what AND m.other_rank = b.rank
QUALIFY row_number() OVER (PARTITION BY a.rank, a.stage_index, w.what
    ORDER BY coalesce(m.times, 0) DESC, abs(a.place - b.place), b.rank) = 1
"""


def make_handed(connection: duckdb.DuckDBPyConnection, schema: str = "", prefix: str = "") -> bool:
    """Make the tables `received`, `sent` and `neighbours` of a run's stages; whether it has any.

    A row of `neighbours`: from which rank, which holds `other_stage`, a stage receives what. `schema` with its dot.
    """
    found = connection.execute(
        f"SELECT 1 FROM {schema}stage_events WHERE stage_index IS NOT NULL LIMIT 1"
    ).fetchone()
    if found is None:
        return False
    for side in ("received", "sent"):
        connection.execute(f"CREATE TEMP TABLE {prefix}{side} AS {_handed(schema, side)}")
    connection.execute(
        _NEIGHBOURS.format(
            name=f"{prefix}neighbours",
            schema=schema,
            received=f"{prefix}received",
            sent=f"{prefix}sent",
        )
    )
    return True


def stepless_ranks(connection: duckdb.DuckDBPyConnection) -> tuple[int, ...]:
    """The ranks without an optimizer, all of whose runs of a schedule count as one step where others have several.

    What they did cannot be paired by step with what other ranks did.
    """
    rows = connection.execute(
        "SELECT rank FROM stage_events WHERE stage_index IS NOT NULL "
        "AND rank NOT IN (SELECT rank FROM steps WHERE optimizer_ns > 0) "
        "AND (SELECT count(DISTINCT step) FROM stage_events) > 1 GROUP BY rank "
        f"HAVING count(DISTINCT step) = 1 AND max(occurrence) FILTER (kind = '{FORWARD}') > 0 ORDER BY rank"
    ).fetchall()
    return tuple(rank for (rank,) in rows)


def stages_of_roots(schema: str = "") -> str:
    """A query: the stage that each root of a rank belongs to (rank, root, stage_index), where it is one alone.

    Nodes say it, and calls inside an action. Where no call was recorded, the order does: roots are numbered by their
    first call, and on a rank the lower of its stages is called first.
    """
    number = "row_number() OVER (PARTITION BY rank ORDER BY {by}) AS number, count(*) OVER (PARTITION BY rank) AS count"
    return f"""
SELECT rank, root, min(stage_index) AS stage_index FROM (
    SELECT DISTINCT rank, root, stage_index FROM {schema}node_events
        WHERE stage_index IS NOT NULL AND root IS NOT NULL
    UNION SELECT DISTINCT c.rank, c.root, e.stage_index FROM {schema}module_calls c JOIN {schema}stage_events e
        ON e.rank = c.rank AND e.step = c.step AND e.microbatch = c.microbatch AND e.kind = '{FORWARD}'
        AND c.start_ns >= e.start_ns AND c.end_ns <= e.end_ns WHERE e.stage_index IS NOT NULL AND c.depth = 0
    UNION SELECT r.rank, r.root, e.stage_index FROM (SELECT rank, root, {number.format(by="root")} FROM
            (SELECT DISTINCT rank, root FROM {schema}parameters ANTI JOIN {schema}module_calls USING (rank))) r
        JOIN (SELECT rank, stage_index, {number.format(by="stage_index")} FROM
            (SELECT DISTINCT rank, stage_index FROM {schema}stage_events WHERE stage_index IS NOT NULL)) e
        USING (rank, number, count))
GROUP BY ALL HAVING count(DISTINCT stage_index) = 1"""
