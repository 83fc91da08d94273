"""Which stage of a pipeline is slow, which of its parts makes it so, and where in the model; which link is slow.

A stage's *load* is what its actions of one microbatch usually take: the medians of its kinds of actions together, which
a few long ones do not move. A stage is slow where it takes a tenth longer than the median of the others, and is the
slower, microbatch by microbatch, in so many of them that chance alone would make one of the stages so once in a hundred
times: what slows the whole machine down for a while says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from statistics import median
from typing import Literal

import duckdb

SMALLEST_SHARE = 0.1
SMALLEST_EXCESS_NS = 100_000
CHANCE = 0.01
SMALLEST_TRANSFER_NS = 1_000_000
_TRANSFERS = 3  # a slow link takes as many times longer than the others
_FEWEST_TRANSFERS = 16
_MAIN_SHARE = 0.5


@dataclass(frozen=True)
class PartTime:
    """What a stage takes for one kind of action, against the median of the other stages that have such a kind.

    `backward` stands for all of a backward where others split what it does not, or the reverse. `count` is how many
    such actions a microbatch has. `other_ns` is None where no other stage has any.
    """

    kind: str
    own_ns: int
    other_ns: int | None
    count: float

    @property
    def excess_ns(self) -> int:
        """What it takes in a microbatch beyond what the other stages take; 0 where they have no such part."""
        return 0 if self.other_ns is None else round((self.own_ns - self.other_ns) * self.count)


@dataclass(frozen=True)
class SlowPlace:
    """Where most of a part's time is: an autograd Node, or a module's forward without what it calls.

    Times are by action; `other_ns` is the most that a Node of that name, or a module of that class, takes in the same
    part of another stage, None where there is none.
    """

    what: Literal["node", "module"]
    module_fqn: str | None
    name: str
    own_ns: int
    part_ns: int
    other_ns: int | None
    other_stage: int | None


@dataclass(frozen=True)
class SlowStage:
    """The stage that the others wait for. `parts` are those that make it slow, or all where none does alone."""

    stage_index: int
    ranks: tuple[int, ...]
    parts: tuple[PartTime, ...]
    is_one_part: bool
    place: SlowPlace | None
    places_seen: bool


NoSlowStage = Literal["one", "few", "even", "unsure"]


@dataclass(frozen=True)
class StageJudgement:
    """Whether one stage is slow. Of the one with most load: `load_ns`, and `other_ns` of the others, by microbatch.

    In `slower_count` of `sample_count` microbatches it was the slower. `reason` says why none is named: `one` (there
    is no other stage), `few` (too few microbatches), `even` (by less than a tenth), `unsure` (not steadily).
    """

    stage_index: int | None
    load_ns: int
    other_ns: int
    sample_count: int
    slower_count: int
    slow: SlowStage | None
    reason: NoSlowStage | None


@dataclass(frozen=True)
class SlowLink:
    """What reaches a stage late though its sender had made it: medians of `count` receives."""

    what: str
    from_stage: int
    to_stage: int
    count: int
    transfer_ns: int
    other_ns: int


_LOADS = """
CREATE OR REPLACE TEMP TABLE loads AS
WITH loaded AS (
    SELECT line, step, microbatch, stage_index, sum(took_ns) AS load_ns
    FROM actions WHERE stage_index IS NOT NULL GROUP BY line, step, microbatch, stage_index),
-- A microbatch that some stage did not see whole says nothing.
whole AS (
    SELECT *, count(*) OVER (PARTITION BY line, step, microbatch) AS stages,
        (SELECT count(DISTINCT stage_index) FROM loaded) AS all_stages FROM loaded)
SELECT * EXCLUDE (stages, all_stages) FROM whole WHERE stages = all_stages
"""

_PAIRED = """
WITH others AS (
    SELECT line, step, microbatch, median(load_ns) AS other_ns FROM loads
    WHERE stage_index <> $stage GROUP BY line, step, microbatch)
SELECT count(*), count(*) FILTER (load_ns > other_ns)
FROM loads JOIN others USING (line, step, microbatch) WHERE stage_index = $stage
"""

_PARTS = """
WITH chunks AS (
    SELECT stage_index, count(DISTINCT (line, step, microbatch)) AS microbatches FROM actions
    WHERE stage_index IS NOT NULL GROUP BY stage_index)
SELECT a.stage_index, kind, median(took_ns), CAST(count(*) AS DOUBLE) / any_value(microbatches)
FROM actions a JOIN chunks c ON c.stage_index = a.stage_index GROUP BY a.stage_index, kind
"""

# Of one kind of action, by stage: each Node of each module, what it takes in such an action (all its calls together).
_NODE_PLACES = """
WITH ran AS (
    SELECT a.stage_index, a.record_index, a.rank, a.step, n.module_fqn, n.node_name AS name,
        sum(n.end_ns - n.start_ns) AS ns
    FROM node_events n JOIN actions a ON a.rank = n.rank AND a.step = n.step AND a.microbatch = n.microbatch
        AND a.stage_index = n.stage_index
        AND CASE n.phase WHEN 'input' THEN 'backward_input' WHEN 'weight' THEN 'backward_weight'
            ELSE 'backward_full' END = a.kind
    WHERE list_contains($kinds, a.kind) AND n.end_ns IS NOT NULL GROUP BY ALL)
SELECT stage_index, module_fqn, name, name, median(ns) FROM ran GROUP BY ALL
"""

# Own time of a module: without the calls inside it, which lie one deeper, and within its own.
_MODULE_PLACES = """
WITH calls AS (
    SELECT rank, step, microbatch, depth, module_fqn, module_class AS name,
        start_ns + c.began_ns - o.offset_ns AS start_ns, end_ns + c.began_ns - o.offset_ns AS end_ns
    FROM module_calls m JOIN clocks c USING (rank) JOIN offsets o ON o.host = c.host
    WHERE phase IN ('forward', 'no_grad') AND step IN (SELECT step FROM windows)),
inner_calls AS (
    SELECT p.rank, p.step, p.depth, p.start_ns, sum(i.end_ns - i.start_ns) AS inner_ns
    FROM calls i ASOF JOIN calls p ON p.rank = i.rank AND p.step = i.step AND p.microbatch = i.microbatch
        AND p.depth = i.depth - 1 AND p.start_ns <= i.start_ns
    WHERE i.depth > 0 AND i.end_ns <= p.end_ns GROUP BY ALL),
ran AS (
    SELECT a.stage_index, a.record_index, a.rank, a.step, c.module_fqn, c.name,
        sum(c.end_ns - c.start_ns - coalesce(i.inner_ns, 0)) AS ns
    FROM calls c JOIN actions a ON a.rank = c.rank AND a.step = c.step AND a.microbatch = c.microbatch
        AND a.kind = 'forward' AND a.start_ns <= c.start_ns AND c.end_ns <= a.end_ns
        LEFT JOIN inner_calls i ON i.rank = c.rank AND i.step = c.step AND i.depth = c.depth AND i.start_ns = c.start_ns
    GROUP BY ALL)
SELECT stage_index, module_fqn, name, name, median(ns) FROM ran GROUP BY ALL
"""

_LINKS = """
WITH of_link AS (
    SELECT is_forward, from_stage, to_stage, count(*) AS count, median(transfer_ns) AS transfer_ns,
        quantile_cont(transfer_ns, 0.25) AS low_ns
    FROM hand_overs GROUP BY is_forward, from_stage, to_stage),
worst AS (SELECT * FROM of_link WHERE count >= $fewest ORDER BY transfer_ns DESC, from_stage LIMIT 1),
others AS (
    SELECT median(h.transfer_ns) AS other_ns, quantile_cont(h.transfer_ns, 0.75) AS high_ns, count(*) AS count
    FROM hand_overs h ANTI JOIN worst w USING (is_forward, from_stage, to_stage))
SELECT is_forward, from_stage, to_stage, w.count, transfer_ns, other_ns
FROM worst w CROSS JOIN others o
WHERE o.count >= $fewest AND transfer_ns >= $smallest AND transfer_ns >= $times * other_ns AND low_ns > high_ns
"""


def judged_stages(connection: duckdb.DuckDBPyConnection) -> StageJudgement:
    """Whether one stage is slow. Reads the tables of `pipelines`, makes `loads`."""
    connection.execute(_LOADS)
    kinds = _kinds_by_stage(connection)
    if not kinds:
        return StageJudgement(None, 0, 0, 0, 0, None, "one")
    loads = {stage: round(sum(ns * n for ns, n in of.values())) for stage, of in kinds.items()}
    stage = max(loads, key=lambda index: (loads[index], -index))
    load = loads.pop(stage)
    if not loads:
        return StageJudgement(stage, load, 0, 0, 0, None, "one")
    other = round(median(loads.values()))
    samples, slower = connection.execute(_PAIRED, {"stage": stage}).fetchall()[0]
    reason: NoSlowStage | None = None
    if len(kinds) * 0.5**samples > CHANCE:
        reason = "few"
    elif load - other < max(SMALLEST_SHARE * other, SMALLEST_EXCESS_NS):
        reason = "even"
    elif len(kinds) * _chance(samples, slower) > CHANCE:
        reason = "unsure"
    slow = None if reason is not None else _slow_stage(connection, stage, kinds)
    return StageJudgement(stage, load, other, samples, slower, slow, reason)


def slow_link(connection: duckdb.DuckDBPyConnection) -> SlowLink | None:
    """The boundary of stages whose transfers take longer than the others', None where none stands out."""
    rows = connection.execute(
        _LINKS,
        {"fewest": _FEWEST_TRANSFERS, "smallest": SMALLEST_TRANSFER_NS, "times": _TRANSFERS},
    ).fetchall()
    for forward, source, target, count, transfer, other in rows:
        what = "activations" if forward else "gradients"
        return SlowLink(what, source, target, count, round(transfer), round(other))
    return None


def _chance(tries: int, successes: int) -> float:
    """How likely a fair coin falls so often, or more often, on one side."""
    if (
        tries > 1000
    ):  # the sums below would take long; far out in the tail for any share that matters
        return 0.0 if successes > 0.55 * tries else 1.0
    return float(sum(comb(tries, n) for n in range(successes, tries + 1)) / 2**tries)


Kinds = dict[int, dict[str, tuple[float, float]]]


def _slow_stage(connection: duckdb.DuckDBPyConnection, stage: int, kinds: Kinds) -> SlowStage:
    parts = _parts(kinds, stage)
    total = sum(max(part.excess_ns, 0) for part in parts)
    main = [part for part in parts if part.excess_ns > _MAIN_SHARE * total]
    place, seen = _place(connection, stage, main[0]) if main else (None, True)
    ranks = connection.execute(
        "SELECT list(DISTINCT rank ORDER BY rank) FROM actions WHERE stage_index = $stage",
        {"stage": stage},
    ).fetchall()[0][0]
    return SlowStage(stage, tuple(ranks), tuple(main or parts), bool(main), place, seen)


def _kinds_by_stage(connection: duckdb.DuckDBPyConnection) -> Kinds:
    """By stage and kind: the median time of an action, and how many a microbatch has."""
    by_stage: Kinds = {}
    for index, kind, ns, count in connection.execute(_PARTS).fetchall():
        by_stage.setdefault(index, {})[kind] = (ns, count)
    return by_stage


def _parts(kinds: Kinds, stage: int) -> list[PartTime]:
    """The parts of a stage against the medians of the other stages, largest excess first."""
    by_stage = dict(kinds)
    own = by_stage.pop(stage)
    found = []
    for kind, (ns, count) in own.items():
        others = [theirs[kind][0] for theirs in by_stage.values() if kind in theirs]
        if others:
            found.append(PartTime(kind, round(ns), round(median(others)), count))
    alone = [kind for kind in own if kind not in [part.kind for part in found]]
    if alone:
        # It splits what no other stage does, or the reverse.
        found = [part for part in found if part.kind == "forward"]
        whole = _whole_backward(own)
        found.append(
            PartTime(
                "backward", round(whole), round(median(map(_whole_backward, by_stage.values()))), 1
            )
        )
    return sorted(found, key=lambda part: -part.excess_ns)


def _whole_backward(kinds: dict[str, tuple[float, float]]) -> float:
    return sum(ns * count for kind, (ns, count) in kinds.items() if kind != "forward")


def _place(
    connection: duckdb.DuckDBPyConnection, stage: int, part: PartTime
) -> tuple[SlowPlace | None, bool]:
    """What explains at least half of the part's excess, None where nothing does; and whether places were recorded."""
    if part.kind == "forward":
        rows = connection.execute(_MODULE_PLACES).fetchall()
    else:
        every = ["backward_full", "backward_input", "backward_weight"]
        kinds = every if part.kind == "backward" else [part.kind]
        rows = connection.execute(_NODE_PLACES, {"kinds": kinds}).fetchall()
    own = [row for row in rows if row[0] == stage]
    if not own:
        return None, False
    _, fqn, name, _, ns = max(own, key=lambda row: (row[4], str(row[1])))
    others = [row for row in rows if row[0] != stage and row[2] == name]
    most = max(others, key=lambda row: row[4], default=None)
    if ns < _MAIN_SHARE * (part.own_ns - (part.other_ns or 0)):
        return None, True
    return (
        SlowPlace(
            "module" if part.kind == "forward" else "node",
            fqn,
            name,
            round(ns),
            part.own_ns,
            None if most is None else round(most[4]),
            None if most is None else most[0],
        ),
        True,
    )
