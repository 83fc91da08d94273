"""What each place of a run took, step by step: the samples that two runs' times are compared by.

Times are medians or sums within one step, so that a run gives one sample of each place per step. The first recorded
step is left out: it allocates, compiles and connects. Places of a pipeline stage are told by stage, not by rank, and
take what one microbatch takes (on the slowest rank that holds the stage); all others are told by rank and take what a
step takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import duckdb

from gradtrace_analyzer.timing.pipelines import pipelines
from gradtrace_analyzer.timing.reductions import paired_reductions
from gradtrace_analyzer.timing.slices import Steps

What = Literal[
    "step", "between", "forward", "backward", "optimizer", "stage", "transfer", "receive",
    "module", "node", "bucket_transport", "bucket_wait",
]  # fmt: skip


@dataclass(frozen=True)
class TimedPlace:
    """What takes time.

    `step`: a whole step on the rank that takes longest; `between`: from a step's end to the next one's beginning (data,
    logging); `forward`, `backward`, `optimizer`: those parts of it. `stage`: an action of a stage. `transfer`: what a
    receive of `stage_index` takes once `other_stage` has made it, `receive` what it waits before that. `module`: a
    module's forward without the modules that it calls. `node`: the Nodes of one name of a module (`name`). `kind` is a
    stage's action, or what it receives. `bucket_transport` and `bucket_wait`: see `buckets`; `name` is its first
    parameter.
    """

    what: What
    rank: int | None = None
    stage_index: int | None = None
    kind: str | None = None
    other_stage: int | None = None
    root: int | None = None
    module_fqn: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Samples:
    """One value per step, in order of steps; `per_step` is how often such a time counts in a step."""

    values: tuple[float, ...]
    per_step: float


@dataclass(frozen=True)
class RunSeries:
    """The samples of one run, by place, of the closed `steps`, without the first (`left_out`) where there are several.

    `is_staged`: it has the actions of pipeline stages.
    """

    places: dict[TimedPlace, Samples]
    steps: tuple[int, ...]
    left_out: int | None
    is_staged: bool


_PARTS = """
WITH ended AS (
    SELECT rank, step, start_ns, end_ns, forward_ns, backward_ns, optimizer_ns,
        start_ns - lag(end_ns) OVER (PARTITION BY rank ORDER BY step) AS between_ns,
        step - lag(step) OVER (PARTITION BY rank ORDER BY step) AS apart
    FROM steps WHERE start_ns IS NOT NULL AND end_ns IS NOT NULL)
SELECT 'step' AS what, NULL AS rank, step, CAST(max(end_ns - start_ns) AS DOUBLE) AS ns FROM ended GROUP BY step
UNION ALL SELECT 'between', rank, step, between_ns FROM ended WHERE apart = 1 AND NOT $staged
UNION ALL SELECT 'forward', rank, step, forward_ns FROM ended WHERE NOT $staged
UNION ALL SELECT 'backward', rank, step, backward_ns FROM ended WHERE NOT $staged
UNION ALL SELECT 'optimizer', rank, step, optimizer_ns FROM ended
"""

_STAGES = """
WITH by_rank AS (
    SELECT stage_index, kind, rank, step, median(end_ns - start_ns) AS ns, count(*) AS count FROM stage_events
    WHERE error IS NULL AND end_ns IS NOT NULL AND stage_index IS NOT NULL
        AND kind IN ('forward', 'backward_full', 'backward_input', 'backward_weight')
    GROUP BY stage_index, kind, rank, step)
SELECT stage_index, kind, step, max(ns), max(count) FROM by_rank GROUP BY stage_index, kind, step
"""

_TRANSFERS = """
SELECT is_forward, from_stage, to_stage, step, median(transfer_ns), median(late_ns),
    CAST(count(*) AS DOUBLE) / count(DISTINCT line)
FROM hand_overs GROUP BY is_forward, from_stage, to_stage, step
"""

# Own time of a module: without the calls inside it, which lie one deeper, and within its own.
_MODULES = """
WITH calls AS (
    SELECT m.rank, m.step, m.microbatch, m.depth, m.root, m.module_fqn, m.module_class, m.start_ns, m.end_ns,
        a.stage_index
    FROM module_calls m LEFT JOIN stage_events a ON a.rank = m.rank AND a.step = m.step
        AND a.microbatch = m.microbatch AND a.kind = 'forward' AND a.start_ns <= m.start_ns AND m.end_ns <= a.end_ns
    WHERE m.phase IN ('forward', 'no_grad')),
inner_calls AS (
    SELECT p.rank, p.step, p.depth, p.start_ns, sum(i.end_ns - i.start_ns) AS inner_ns
    FROM calls i ASOF JOIN calls p ON p.rank = i.rank AND p.step = i.step AND p.microbatch = i.microbatch
        AND p.depth = i.depth - 1 AND p.start_ns <= i.start_ns
    WHERE i.depth > 0 AND i.end_ns <= p.end_ns GROUP BY p.rank, p.step, p.depth, p.start_ns),
own AS (
    SELECT c.*, c.end_ns - c.start_ns - coalesce(i.inner_ns, 0) AS ns
    FROM calls c LEFT JOIN inner_calls i
        ON i.rank = c.rank AND i.step = c.step AND i.depth = c.depth AND i.start_ns = c.start_ns),
by_rank AS (
    SELECT rank, step, stage_index, CASE WHEN stage_index IS NULL THEN root END AS root, module_fqn,
        module_class AS name, CASE WHEN stage_index IS NULL THEN rank END AS at_rank,
        count(DISTINCT CASE WHEN stage_index IS NULL THEN 0 ELSE microbatch END) AS count, sum(ns) AS ns
    FROM own GROUP BY ALL)
SELECT at_rank, stage_index, root, module_fqn, name, step, max(ns / count), max(count)
FROM by_rank GROUP BY at_rank, stage_index, root, module_fqn, name, step
"""

_NODES = """
WITH nested_passes AS (
    SELECT rank, step, backward_index FROM backward_passes WHERE parent_backward_index IS NOT NULL),
by_rank AS (
    SELECT n.rank, n.step, stage_index, CASE WHEN stage_index IS NULL THEN root END AS root,
        coalesce(module_fqn, parameter_fqn) AS fqn, node_name,
        CASE WHEN stage_index IS NULL THEN NULL WHEN phase = 'input' THEN 'backward_input'
            WHEN phase = 'weight' THEN 'backward_weight' ELSE 'backward_full' END AS kind,
        CASE WHEN stage_index IS NULL THEN n.rank END AS at_rank,
        count(DISTINCT CASE WHEN stage_index IS NULL THEN 0 ELSE microbatch END) AS count, sum(end_ns - start_ns) AS ns
    FROM node_events n ANTI JOIN nested_passes p
        ON p.rank = n.rank AND p.step = n.step AND p.backward_index = n.backward_index
    WHERE end_ns IS NOT NULL GROUP BY ALL)
SELECT at_rank, stage_index, kind, root, fqn, node_name, step, max(ns / count), max(count)
FROM by_rank GROUP BY at_rank, stage_index, kind, root, fqn, node_name, step
"""

_BUCKETS = """
SELECT 'bucket_transport', NULL, b.root, b.module_fqn, b.first, r.step, median(r.transport_ns)
FROM reductions r JOIN named_buckets b ON b.bucket = r.bucket WHERE transport_ns IS NOT NULL GROUP BY ALL
UNION ALL
SELECT 'bucket_wait', l.rank, b.root, b.module_fqn, b.first, l.step, median(l.wait_ns)
FROM launches l JOIN named_buckets b ON b.bucket = l.bucket GROUP BY ALL
"""


class _Gathered:
    """Values by place and step; a place that is met twice in a step keeps the larger."""

    def __init__(self, after: int | None) -> None:
        self._after = after
        self._values: dict[TimedPlace, dict[int, float]] = {}
        self._per_step: dict[TimedPlace, float] = {}

    def add(self, place: TimedPlace, step: int, ns: Any, per_step: float = 1) -> None:
        """Note what a place took in a step; None, and steps up to the one that is left out, are not counted."""
        if ns is None or (self._after is not None and step <= self._after):
            return
        of_place = self._values.setdefault(place, {})
        of_place[step] = max(float(ns), of_place.get(step, 0.0))
        self._per_step[place] = max(per_step, self._per_step.get(place, 0))

    def places(self) -> dict[TimedPlace, Samples]:
        """The samples of each place, in the order of its steps."""
        return {
            place: Samples(tuple(values[step] for step in sorted(values)), self._per_step[place])
            for place, values in self._values.items()
        }


def run_series(connection: duckdb.DuckDBPyConnection) -> RunSeries:
    """The samples of the run whose views the connection holds, where it makes tables of pipelines and reductions."""
    steps = [
        step
        for (step,) in connection.execute(
            "SELECT DISTINCT step FROM steps WHERE end_ns IS NOT NULL ORDER BY step"
        ).fetchall()
    ]
    left_out = steps[0] if len(steps) > 1 else None
    gathered = _Gathered(left_out)
    staged = pipelines(connection, Steps())
    for what, rank, step, ns in connection.execute(
        _PARTS, {"staged": staged is not None}
    ).fetchall():
        gathered.add(TimedPlace(what, rank), step, ns)
    if staged is not None:
        for place, *sample in _of_stages(connection):
            gathered.add(place, *sample)
    for place, *sample in (*_of_models(connection), *_of_buckets(connection)):
        gathered.add(place, *sample)
    kept = tuple(step for step in steps if step != left_out)
    return RunSeries(gathered.places(), kept, left_out, staged is not None)


def _of_stages(connection: duckdb.DuckDBPyConnection) -> Iterator[tuple[Any, ...]]:
    for stage, kind, step, ns, count in connection.execute(_STAGES).fetchall():
        yield TimedPlace("stage", stage_index=stage, kind=kind), step, ns, count
    for forward, source, target, step, took, late, count in connection.execute(
        _TRANSFERS
    ).fetchall():
        kind = "activations" if forward else "gradients"
        at = {"stage_index": target, "other_stage": source, "kind": kind}
        yield TimedPlace("transfer", **at), step, took, count
        yield TimedPlace("receive", **at), step, late, count


def _of_models(connection: duckdb.DuckDBPyConnection) -> Iterator[tuple[Any, ...]]:
    for rank, stage, root, fqn, name, step, ns, count in connection.execute(_MODULES).fetchall():
        kind = None if stage is None else "forward"
        yield TimedPlace("module", rank, stage, kind, None, root, fqn, name), step, ns, count
    for rank, stage, kind, root, fqn, name, step, ns, count in connection.execute(
        _NODES
    ).fetchall():
        yield TimedPlace("node", rank, stage, kind, None, root, fqn, name), step, ns, count


def _of_buckets(connection: duckdb.DuckDBPyConnection) -> Iterator[tuple[Any, ...]]:
    rows = connection.execute("SELECT count(*) FROM buckets").fetchall()
    if not rows[0][0]:
        return
    known = paired_reductions(connection, Steps()).buckets
    connection.execute(
        "CREATE TEMP TABLE named_buckets (bucket INTEGER, root INTEGER, module_fqn VARCHAR, first VARCHAR)"
    )
    connection.executemany(
        "INSERT INTO named_buckets VALUES (?, ?, ?, ?)",
        [
            (b.number, b.root, b.module_fqn, next(iter(b.parameter_fqns), None))
            for b in known.values()
        ],
    )
    for what, rank, root, fqn, first, step, ns in connection.execute(_BUCKETS).fetchall():
        yield TimedPlace(what, rank, root=root, module_fqn=fqn, name=first), step, ns, 1
