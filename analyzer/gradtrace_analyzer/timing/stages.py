"""The answer of `analyzer timing --stages`: what each stage's actions take, where ranks are idle, and what is slow.

Definitions, for a step of one pipeline:
- its *window* reaches from the first start of an action on any rank to the last end of one;
- a rank's *bubble* is what of the window it spends in no action. Of it, waits that were recorded are told by what was
  waited for; `early_ns` lies after the last thing that the rank did in the window, and `other_ns` is in no recorded
  wait: the schedule's own code, the loss, the recorder, a core that another process had.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import duckdb

from gradtrace_analyzer.sql.pipelines import KINDS
from gradtrace_analyzer.timing.pipelines import MessageClock, pipelines
from gradtrace_analyzer.timing.slices import Steps
from gradtrace_analyzer.timing.slowest import SlowLink, StageJudgement, judged_stages, slow_link


@dataclass(frozen=True)
class KindTimes:
    """The actions of one kind of a stage, on all ranks that hold it. `stage_index` is None outside any stage."""

    stage_index: int | None
    kind: str
    ranks: tuple[int, ...]
    count: int
    median_ns: int
    p95_ns: int
    total_ns: int


@dataclass(frozen=True)
class Waited:
    """Part of a rank's bubble: waits of one kind for one other stage, in a step (mean)."""

    kind: str
    stage_index: int | None
    other_stage: int | None
    wait_ns: int
    share: float


@dataclass(frozen=True)
class RankIdle:
    """A rank's bubble in a step: means over steps, shares of the window. `waits` has the longest first."""

    rank: int
    stages: tuple[int, ...]
    step_count: int
    window_ns: int
    busy_ns: int
    bubble_ns: int
    bubble_share: float
    waits: tuple[Waited, ...]
    early_ns: int
    other_ns: int


@dataclass(frozen=True)
class HandOver:
    """What one stage receives from another on another rank: medians of `count` waits.

    `late_ns` is the part before the sender had it, `transfer_ns` that after it.
    """

    what: str
    from_stage: int
    to_stage: int
    count: int
    wait_ns: int
    late_ns: int
    transfer_ns: int
    p95_transfer_ns: int


@dataclass(frozen=True)
class StageAnswer:
    """All of it. `warm_up` is a step that was left out, `notes` say what is missing."""

    steps: tuple[int, ...]
    warm_up: int | None
    line_count: int
    window_ns: int
    kinds: tuple[KindTimes, ...]
    idle: tuple[RankIdle, ...]
    hand_overs: tuple[HandOver, ...]
    judgement: StageJudgement
    link: SlowLink | None
    clocks: tuple[MessageClock, ...]
    recorder_share: float | None
    notes: tuple[str, ...]


_BY_KIND = """
SELECT stage_index, kind, list(DISTINCT rank ORDER BY rank), count(*), median(took_ns),
    quantile_cont(took_ns, 0.95), sum(took_ns)
FROM actions GROUP BY stage_index, kind
"""

_WINDOWS = """
CREATE OR REPLACE TEMP TABLE windows AS
SELECT line, step, min(start_ns) AS from_ns, max(end_ns) AS until_ns FROM actions GROUP BY line, step
"""

_IDLE = """
WITH busy AS (
    SELECT a.rank, a.line, a.step, sum(a.took_ns) AS busy_ns, max(a.end_ns) AS last_ns
    FROM actions a GROUP BY a.rank, a.line, a.step),
last_waits AS (SELECT rank, step, max(end_ns) AS last_ns FROM stage_waits GROUP BY rank, step),
by_step AS (
    SELECT b.rank, w.until_ns - w.from_ns AS window_ns, least(b.busy_ns, w.until_ns - w.from_ns) AS busy_ns,
        w.until_ns - least(greatest(b.last_ns, coalesce(l.last_ns, b.last_ns)), w.until_ns) AS early_ns
    FROM busy b JOIN windows w ON w.line = b.line AND w.step = b.step
        LEFT JOIN last_waits l ON l.rank = b.rank AND l.step = b.step)
SELECT rank, count(*), avg(window_ns), avg(busy_ns), avg(early_ns) FROM by_step GROUP BY rank ORDER BY rank
"""

_WAITED = """
WITH inside AS (
    SELECT s.rank, s.kind, s.stage_index, s.other_stage,
        share * greatest(least(s.end_ns, w.until_ns) - greatest(s.start_ns, w.from_ns), 0) AS wait_ns
    FROM stage_waits s JOIN windows w ON w.line = s.line AND w.step = s.step)
SELECT rank, kind, stage_index, other_stage, sum(wait_ns) AS wait_ns FROM inside
GROUP BY rank, kind, stage_index, other_stage ORDER BY rank, wait_ns DESC, kind, stage_index
"""

_HAND_OVERS = """
SELECT is_forward, from_stage, to_stage, count(*), median(wait_ns), median(late_ns), median(transfer_ns),
    quantile_cont(transfer_ns, 0.95)
FROM hand_overs GROUP BY is_forward, from_stage, to_stage ORDER BY NOT is_forward, from_stage
"""


def stage_answer(connection: duckdb.DuckDBPyConnection, steps: Steps) -> StageAnswer | None:
    """The answer for some steps of a run, None where it holds no stage's action of them."""
    made = pipelines(connection, steps)
    if made is None:
        return None
    connection.execute(_WINDOWS)
    window = connection.execute("SELECT median(until_ns - from_ns) FROM windows").fetchall()
    chosen = f"step >= {made.steps[0]} AND {steps.condition()}"
    recorder = connection.execute(
        "SELECT CAST(sum(recorder_ns) AS DOUBLE) / nullif(sum(end_ns - start_ns), 0) FROM steps "
        f"WHERE {chosen}"
    ).fetchall()
    return StageAnswer(
        steps=made.steps,
        warm_up=made.warm_up,
        line_count=made.line_count,
        window_ns=round(window[0][0]),
        kinds=_kinds(connection),
        idle=tuple(_idle(connection)),
        hand_overs=tuple(
            HandOver("activations" if forward else "gradients", source, target, count, *map(round, times))
            for forward, source, target, count, *times in connection.execute(_HAND_OVERS).fetchall()
        ),
        judgement=judged_stages(connection),
        link=slow_link(connection),
        clocks=made.clocks,
        recorder_share=recorder[0][0],
        notes=made.notes,
    )  # fmt: skip


def _kinds(connection: duckdb.DuckDBPyConnection) -> tuple[KindTimes, ...]:
    found = [
        KindTimes(stage, kind, tuple(ranks), count, round(median), round(p95), int(total))
        for stage, kind, ranks, count, median, p95, total in connection.execute(_BY_KIND).fetchall()
    ]
    found.sort(key=lambda k: (k.stage_index is None, k.stage_index or 0, KINDS.index(k.kind)))
    return tuple(found)


def _idle(connection: duckdb.DuckDBPyConnection) -> Iterator[RankIdle]:
    stages = dict(
        connection.execute(
            "SELECT rank, list(DISTINCT stage_index ORDER BY stage_index) FILTER (stage_index IS NOT NULL) "
            "FROM actions GROUP BY rank"
        ).fetchall()
    )
    waited: dict[int, list[tuple[str, int | None, int | None, float]]] = {}
    for rank, *wait in connection.execute(_WAITED).fetchall():
        waited.setdefault(rank, []).append((wait[0], wait[1], wait[2], float(wait[3])))
    for rank, count, window, busy, early in connection.execute(_IDLE).fetchall():
        window = max(window, 1)
        waits = tuple(
            Waited(kind, stage, other, round(ns / count), ns / count / window)
            for kind, stage, other, ns in waited.get(rank, ())
        )
        bubble = window - busy
        other = bubble - early - sum(wait.wait_ns for wait in waits)
        yield RankIdle(
            rank, tuple(stages[rank] or ()), count, round(window), round(busy), round(bubble),
            bubble / window, waits, round(early), max(0, round(other)),
        )  # fmt: skip
