"""Two pipelines that were scheduled otherwise, arranged alike: by stage, not by rank; by microbatch, not by time.

A schedule may split a backward pass in two, order microbatches otherwise, and put stages on other ranks. None of that
is a difference. So the views of both runs are replaced: each stage is a rank of its own, its rows are in the order
forward, backward, microbatch by microbatch, and a Node that ran in both halves is one row, with what left it in either.
What was recorded outside any stage is left out, and so are parts of rows that the two cannot have in common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

from gradtrace_analyzer.pipelines import FORWARD, FULL, INPUT, WEIGHT, stages_of_roots
from gradtrace_schemas import TABLES
from gradtrace_schemas.steps import DIGEST_LINKS
from gradtrace_schemas.summary import multipliers
from gradtrace_schemas.table import NODE_SKETCH_LANES, SKETCH_LANES

SIDES = ("baseline", "candidate")

# Where rows come in the step of a stage; what is of a microbatch is that much later.
_PARAMETERS, _FORWARD, _CARRIED, _BACKWARD = 0, 1_000, 100_000, 200_000
_LAST_LOCAL, _REDUCED, _FINAL, _OPTIMIZER, _AFTER, _STEP = (300_000 + n for n in range(6))
_BLOCK = 10**12
# Behind the Nodes of a microbatch comes what they were added to, and last the action's own row.
_SUMS, _END = _BLOCK // 4, _BLOCK // 2


@dataclass(frozen=True)
class Stages:
    """Which ranks of each side hold which stage. Where several ranks hold it, each copy of the pipeline has its own
    numbers, `count` apart."""

    ranks: Mapping[str, Mapping[int, int]]
    count: int

    @property
    def common(self) -> list[int]:
        """The stages of both sides."""
        return sorted(set(self.ranks["baseline"]) & set(self.ranks["candidate"]))

    def note(self) -> str:
        """That stages were compared, and where they are."""
        moved = [
            stage
            for stage in self.common
            if self.ranks["baseline"][stage] != self.ranks["candidate"][stage]
        ]
        said = (
            "The runs are scheduled otherwise: they were compared stage by stage and microbatch by microbatch, "
            "whatever the order, and a backward pass that was split as a whole one."
        )
        if not moved:
            return said
        where = (
            f"stage {stage % self.count} on rank {self.ranks['candidate'][stage]} instead of rank "
            f"{self.ranks['baseline'][stage]}"
            for stage in moved[:2]
        )
        more = f" and {len(moved) - 2} more" if len(moved) > 2 else ""
        where_all = f"{', '.join(where)}{more}"
        return f"{said} In the candidate stages are on other ranks ({where_all}); ranks are named as there."

    def spread(self, entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The entries of a spread with the candidate's ranks, and their stages."""
        held = self.ranks["candidate"]
        return [
            {**e, "rank": held[e["rank"]], "stage_index": e["rank"] % self.count} for e in entries
        ]

    def of_rank(self, side: str, rank: int) -> list[int]:
        """The stages that a rank of a side holds."""
        return [stage for stage, holder in self.ranks[side].items() if holder == rank]


_ORDERS = f"""
SELECT rank, list((stage_index, microbatch, kind) ORDER BY record_index) FROM {{side}}.stage_events
WHERE kind IN ('{FULL}', '{INPUT}', '{WEIGHT}') AND stage_index IS NOT NULL AND error IS NULL AND step = $step
GROUP BY ALL ORDER BY ALL
"""

_HOLDERS = """
SELECT stage_index + (SELECT max(stage_index) + 1 FROM {side}.stage_events) * (row_number() OVER (
    PARTITION BY stage_index ORDER BY rank) - 1) AS stage, rank, stage_index
FROM (SELECT DISTINCT rank, stage_index FROM {side}.stage_events WHERE stage_index IS NOT NULL)
"""


def scheduled_otherwise(connection: duckdb.DuckDBPyConnection) -> bool:
    """Whether both runs are pipelines, of which the first step that both made ran in another order, or on other
    ranks."""
    row = connection.execute(
        "SELECT min(step) FROM (SELECT step FROM baseline.stage_events WHERE stage_index IS NOT NULL "
        "INTERSECT SELECT step FROM candidate.stage_events WHERE stage_index IS NOT NULL)"
    ).fetchone()
    if row is None or row[0] is None:
        return False
    orders = [
        connection.execute(_ORDERS.format(side=side), {"step": row[0]}).fetchall() for side in SIDES
    ]
    return bool(orders[0] and orders[1]) and orders[0] != orders[1]


def arrange(connection: duckdb.DuckDBPyConnection) -> Stages:
    """Replace the views of both sides by those arranged by stage."""
    holders: dict[str, dict[int, int]] = {}
    for side in SIDES:
        connection.execute(f"CREATE TEMP TABLE {side}_holders AS {_HOLDERS.format(side=side)}")
        connection.execute(
            f"CREATE TEMP TABLE {side}_stages AS SELECT r.rank, r.root, h.stage FROM "
            f"({stages_of_roots(f'{side}.')}) r JOIN {side}_holders h USING (rank, stage_index)"
        )
        # Where a rank's rows of a step begin: numbers within a stage's block are counted from there.
        connection.execute(
            f"CREATE TEMP TABLE {side}_begins AS SELECT rank, step, min(record_index) AS begins FROM "
            f"(SELECT rank, step, record_index FROM {side}.parameters UNION ALL SELECT rank, step, record_index "
            f"FROM {side}.module_calls UNION ALL SELECT rank, step, record_index FROM {side}.stage_events) GROUP BY ALL"
        )
        found = connection.execute(f"SELECT stage, rank FROM {side}_holders").fetchall()
        holders[side] = {stage: rank for stage, rank in sorted(found)}
    for side in SIDES:
        for name, query in _arranged(side).items():
            connection.execute(f"CREATE TEMP TABLE {side}_{name}_by_stage AS {query}")
    _only_last_sums(connection)
    _only_common_losses(connection)
    for side in SIDES:
        for name in _arranged(side):
            connection.execute(
                f"CREATE OR REPLACE VIEW {side}.{name} AS SELECT * FROM {side}_{name}_by_stage"
            )
    count = connection.execute("SELECT max(stage_index) + 1 FROM baseline_holders").fetchone()
    return Stages(holders, count[0] if count is not None else 1)


def _arranged(side: str) -> dict[str, str]:
    """The query of each table."""
    calls = (
        f"SELECT c.* {_placed(_FORWARD, is_of_microbatch=True)} FROM {side}.module_calls c "
        f"JOIN {side}_stages s USING (rank, root) JOIN {side}_begins b USING (rank, step) WHERE c.phase = 'forward' "
        # Shape inference calls the module too, on memory that nobody has written.
        f"AND EXISTS (FROM {side}.stage_events e WHERE e.rank = c.rank AND e.step = c.step AND e.kind = '{FORWARD}' "
        "AND e.microbatch = c.microbatch AND e.start_ns <= c.start_ns AND c.end_ns <= e.end_ns)"
    )
    inputs = (
        f"SELECT c.* {_placed(_FORWARD, is_of_microbatch=True)} FROM {side}.inputs c "
        f"JOIN {side}_stages s USING (rank, root) JOIN {side}_begins b USING (rank, step) "
        f"SEMI JOIN ({calls}) k ON k.rank = s.stage AND k.step = c.step AND k.microbatch = c.microbatch "
        "AND k.call_index = c.call_index AND k.depth = 0"
    )
    points = f"CASE c.point WHEN 'before' THEN {_PARAMETERS} ELSE {_AFTER} END"
    parameters = (
        f"SELECT c.* {_placed(points)} "
        f"FROM {side}.parameters c JOIN {side}_stages s USING (rank, root) JOIN {side}_begins b USING (rank, step)"
    )
    points = (
        f"CASE c.point WHEN 'carried' THEN {_CARRIED} WHEN 'local' THEN {_BACKWARD} + c.microbatch "
        f"WHEN 'reduced' THEN {_REDUCED} ELSE {_FINAL} END"
    )
    gradients = (
        f"SELECT c.* {_placed(points, late=_SUMS, more=_GRADIENT_INDEX)} "
        f"FROM {side}.gradients c JOIN {side}_stages s USING (rank, root) JOIN {side}_begins b USING (rank, step) "
        # A half that was run again adds to the same microbatch.
        "QUALIFY c.point <> 'local' OR row_number() OVER (PARTITION BY c.rank, c.step, c.root, c.parameter_fqn, "
        "c.point, c.microbatch ORDER BY c.record_index DESC) = 1"
    )
    buckets = (
        f"SELECT c.* {_placed(_REDUCED, more='c.microbatch AS backward_index')} FROM {side}.buckets c "
        f"JOIN {side}_stages s USING (rank, root) JOIN {side}_begins b USING (rank, step)"
    )
    passes = (
        f"SELECT c.* {_placed(_BACKWARD, is_of_microbatch=True, root=False, more=_PASS)} "
        f"FROM {side}.backward_passes c JOIN {side}.stage_events e ON e.rank = c.rank AND e.step = c.step "
        f"AND e.microbatch = c.microbatch AND e.kind IN ('{FULL}', '{INPUT}') AND e.start_ns <= c.start_ns "
        f"AND c.end_ns <= e.end_ns JOIN {side}_holders s ON s.rank = c.rank AND s.stage_index = e.stage_index "
        f"JOIN {side}_begins b ON b.rank = c.rank AND b.step = c.step "
        "WHERE c.loss IS NOT NULL AND c.parent_backward_index IS NULL"
    )
    return {
        "module_calls": calls,
        "inputs": inputs,
        "parameters": parameters,
        "gradients": gradients,
        "buckets": buckets,
        "backward_passes": passes,
        "node_events": _nodes(side),
        "node_tensors": f"SELECT * FROM {side}.node_tensors WHERE false",
        "stage_events": _actions(side),
        "steps": _steps(side),
        # These are of a rank, whatever stages it has.
        "optimizer_groups": f"SELECT * FROM {side}.optimizer_groups WHERE false",
        "failures": f"SELECT * FROM {side}.failures WHERE false",
    }


_GRADIENT_INDEX = (
    "CASE c.point WHEN 'local' THEN c.microbatch ELSE 0 END::INTEGER AS backward_index"
)
_PASS = "c.microbatch AS backward_index, 'backward' AS kind"


def _placed(
    block: int | str,
    *,
    is_of_microbatch: bool = False,
    root: bool = True,
    late: int = 0,
    more: str = "",
) -> str:
    """The columns of a row `c` that are replaced: a stage for its rank, a stage for its root, its place in the step."""
    number = f"({block} + c.microbatch)" if is_of_microbatch else f"({block})"
    columns = [
        "s.stage::INTEGER AS rank",
        f"({number}::BIGINT * {_BLOCK} + c.record_index - b.begins + {late})::BIGINT AS record_index",
    ]
    if root:
        columns.append("s.stage::INTEGER AS root")
    if more:
        columns.append(more)
    return f"REPLACE ({', '.join(columns)})"


def _actions(side: str) -> str:
    """Forwards, and backwards of one kind: what the first stage sends and the last receives is nobody's."""
    nulls = []
    for prefix, condition in (("received_", _HAS_NO_SOURCE), ("sent_", _HAS_NO_TARGET)):
        for column in TABLES["stage_events"].columns:
            if column.name.startswith(prefix):
                nulls.append(
                    f"CASE WHEN NOT ({condition}) THEN e.{column.name} END AS {column.name}"
                )
    return (
        f"SELECT e.* REPLACE (s.stage::INTEGER AS rank, "
        f"CASE kind WHEN '{FORWARD}' THEN kind ELSE '{FULL}' END AS kind, "
        f"(row_number() OVER (PARTITION BY s.stage, e.step, microbatch, kind = '{FORWARD}' "
        "ORDER BY e.record_index) - 1)::INTEGER AS occurrence, "
        f"((CASE kind WHEN '{FORWARD}' THEN {_FORWARD} ELSE {_BACKWARD} END + microbatch)::BIGINT * {_BLOCK} "
        f"+ e.record_index - b.begins + {_END})::BIGINT AS record_index, {', '.join(nulls)}) "
        f"FROM {side}.stage_events e JOIN {side}_holders s USING (rank, stage_index) "
        f"JOIN {side}_begins b USING (rank, step) "
        f"WHERE kind IN ('{FORWARD}', '{FULL}', '{INPUT}') AND error IS NULL"
    )


_HAS_NO_SOURCE = (
    f"CASE e.kind WHEN '{FORWARD}' THEN e.stage_index = 0 ELSE e.stage_index = "
    "(SELECT max(stage_index) FROM baseline_holders) END"
)
_HAS_NO_TARGET = f"e.kind <> '{FORWARD}' AND e.stage_index = 0"


def _steps(side: str) -> str:
    """Of a step's row only that the stage made it: digests and generators are the rank's."""
    nulls = [
        f"NULL::BIGINT AS {name}"
        for name in ("rng_fingerprint", *(f"digest_{link}" for link in DIGEST_LINKS))
    ]
    return (
        f"SELECT t.* REPLACE (s.stage::INTEGER AS rank, ({_STEP}::BIGINT * {_BLOCK})::BIGINT AS record_index, "
        f"{', '.join(nulls)}) FROM {side}.steps t JOIN {side}_holders s USING (rank)"
    )


def _nodes(side: str) -> str:
    """A Node's runs in the halves of a pass as one: what came in last, and all different gradients that went out."""
    lanes = ", ".join(f"sum(sketch[{lane + 1}])::FLOAT" for lane in range(NODE_SKETCH_LANES))
    folded = ", ".join(
        " + ".join(f"t.sketch[{k}]" for k in range(lane + 1, SKETCH_LANES + 1, NODE_SKETCH_LANES))
        for lane in range(NODE_SKETCH_LANES)
    )
    summary = ("numel", "dtype", "norm", "abs_max", "sum", "nan_count", "inf_count", "fingerprint")
    own = ", ".join(f"n.grad_input_{name} AS {name}" for name in summary)
    parts = ", ".join(f"t.{name}" for name in summary if name != "fingerprint")
    turned = ", ".join(
        f"folded[({lane} - position + {64 * NODE_SKETCH_LANES}) % {NODE_SKETCH_LANES} + 1]"
        for lane in range(NODE_SKETCH_LANES)
    )
    call = "rank, step, microbatch, stage_index, root, module_fqn, call_index, node_name"
    identity = f"{call}, autograd_seq"
    same = " AND ".join(f"g.{name} IS NOT DISTINCT FROM n.{name}" for name in identity.split(", "))
    of_call = ", ".join(f"n.{name}" for name in call.split(", "))
    arrived = [f"grad_output_{name}" for name in (*summary, "sketch")]
    last = ", ".join(f"arg_max({name}, n.record_index) AS {name}" for name in arrived)
    left = {
        "numel": "sum(numel)::BIGINT",
        "dtype": "min(dtype)",
        "norm": "sqrt(sum(norm * norm))",
        "abs_max": "max(abs_max)",
        "sum": "sum(sum)",
        "nan_count": "sum(nan_count)::BIGINT",
        "inf_count": "sum(inf_count)::BIGINT",
        # The sum of them, small enough to be a number of the same type.
        "fingerprint": "(sum(fingerprint::HUGEINT) % (2::HUGEINT ** 61)::HUGEINT)::BIGINT",
        "sketch": f"CASE WHEN count(sketch) = count(*) THEN [{lanes}] END",
    }
    outputs = ", ".join(f"{value} AS grad_input_{name}" for name, value in left.items())
    replaced = [
        "s.stage::INTEGER AS rank",
        "CASE WHEN n.root IS NOT NULL THEN s.stage END::INTEGER AS root",
        "n.microbatch AS backward_index",
        "(row_number() OVER (PARTITION BY s.stage, n.step, n.microbatch ORDER BY n.record_index) - 1)::INTEGER "
        "AS event_index",
        f"(({_BACKWARD} + n.microbatch)::BIGINT * {_BLOCK} + n.record_index - b.begins)::BIGINT AS record_index",
        # A Node's number among those of its pass is another where the pass has fewer of them.
        f"(row_number() OVER (PARTITION BY {of_call} ORDER BY n.autograd_seq, n.record_index) - 1)::INTEGER "
        "AS occurrence",
        "g.outcome AS outcome",
        "coalesce(o.count, 0)::INTEGER AS grad_input_count",
        *(f"g.{name} AS {name}" for name in arrived),
        *(f"o.grad_input_{name} AS grad_input_{name}" for name in left),
    ]
    return f"""
WITH ran AS (SELECT * FROM {side}.node_events WHERE stage_index IS NOT NULL AND node_name <> 'AccumulateGrad'),
grouped AS (SELECT {identity}, min(n.record_index) AS first, max(outcome) AS outcome, {last} FROM ran n GROUP BY ALL),
gone AS (
    SELECT g.rank, g.step, g.first, {own}, n.grad_input_sketch AS sketch FROM ran n JOIN grouped g ON {same}
        WHERE n.grad_input_count = 1 AND n.grad_input_numel IS NOT NULL
    UNION ALL SELECT rank, step, first, {", ".join(summary)}, [{turned}] FROM (
        SELECT g.rank, g.step, g.first, {parts}, {_weighted("t")} AS fingerprint, t.position,
            CASE WHEN len(t.sketch) = {NODE_SKETCH_LANES} THEN t.sketch WHEN len(t.sketch) = {SKETCH_LANES}
            THEN [{folded}] END AS folded FROM ran n JOIN grouped g ON {same}
        JOIN {side}.node_tensors t ON t.rank = n.rank AND t.step = n.step AND t.backward_index = n.backward_index
            AND t.event_index = n.event_index AND t.direction = 'grad_input' WHERE n.grad_input_count > 1)),
different AS (SELECT DISTINCT ON (rank, step, first, numel, fingerprint, norm) * FROM gone),
outputs AS (SELECT rank, step, first, count(*) AS count, {outputs} FROM different GROUP BY ALL)
SELECT n.* REPLACE ({", ".join(replaced)}) FROM ran n
JOIN grouped g ON g.rank = n.rank AND g.step = n.step AND g.first = n.record_index
LEFT JOIN outputs o ON o.rank = n.rank AND o.step = n.step AND o.first = n.record_index
JOIN {side}_holders s ON s.rank = n.rank AND s.stage_index = n.stage_index
JOIN {side}_begins b ON b.rank = n.rank AND b.step = n.step
"""


def _weighted(table: str) -> str:
    """The fingerprint of one of several gradients as it is of one alone, which is weighted by its position.

    Source: `combined` of the recorder's summaries/values.py.
    """
    weights = ", ".join(
        "1" if position == 0 else str(int(weight) % (1 << 64))
        for position, weight in enumerate(multipliers(1 << 40, 64))
    )
    whole, half = f"{1 << 64}::HUGEINT", f"{1 << 63}::HUGEINT"
    bits, weight = f"{table}.fingerprint::HUGEINT", f"[{weights}][{table}.position % 64 + 1]"
    unsigned = f"({bits} + CASE WHEN {bits} < 0 THEN {whole} ELSE 0 END)"
    product = f"({unsigned}::UHUGEINT * {weight}::UHUGEINT % {1 << 64}::UHUGEINT)::HUGEINT"
    return f"({product} - CASE WHEN {product} >= {half} THEN {whole} ELSE 0 END)::BIGINT"


def _only_last_sums(connection: duckdb.DuckDBPyConnection) -> None:
    """Where microbatches were added in another order, only the sum of all of them is the same."""
    orders = " UNION ALL ".join(
        f"SELECT '{side}' AS side, rank, step, root, parameter_fqn, list(backward_index ORDER BY arrived) AS added, "
        f"max_by(record_index, arrived) AS last FROM (SELECT *, record_index % {_BLOCK} AS arrived "
        f"FROM {side}_gradients_by_stage WHERE point = 'local') GROUP BY ALL"
        for side in SIDES
    )
    connection.execute(
        "CREATE TEMP TABLE otherwise_added AS SELECT side, rank, step, root, parameter_fqn, last FROM "
        f"({orders}) WINDOW same AS (PARTITION BY rank, step, root, parameter_fqn) "
        "QUALIFY count(DISTINCT added) OVER same > 1 OR count(*) OVER same < 2"
    )
    for side in SIDES:
        table = f"{side}_gradients_by_stage"
        same = (
            f"o.side = '{side}' AND o.rank = t.rank AND o.step = t.step AND o.root = t.root "
            "AND o.parameter_fqn = t.parameter_fqn"
        )
        connection.execute(
            f"DELETE FROM {table} t WHERE point = 'local' AND EXISTS (FROM otherwise_added o WHERE {same} "
            "AND o.last <> t.record_index)"
        )
        connection.execute(
            f"UPDATE {table} t SET backward_index = 0, record_index = {_LAST_LOCAL}::BIGINT * {_BLOCK} + "
            f"record_index % {_BLOCK} WHERE point = 'local' AND EXISTS (FROM otherwise_added o WHERE {same})"
        )


def _only_common_losses(connection: duckdb.DuckDBPyConnection) -> None:
    """A half may have no loss of its own."""
    for side, other in (SIDES, SIDES[::-1]):
        connection.execute(
            f"DELETE FROM {side}_backward_passes_by_stage t WHERE NOT EXISTS "
            f"(FROM {other}_backward_passes_by_stage o WHERE o.rank = t.rank)"
        )
