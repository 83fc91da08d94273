"""Two pipelines that were scheduled otherwise, arranged alike: by stage, not by rank; by microbatch, not by time.

A schedule may split a backward pass in two, order microbatches otherwise, and put stages on other ranks. None of that
is a difference. So the views of both runs are replaced: each stage is a rank of its own, its rows are in the order
forward, backward, microbatch by microbatch, and a Node that ran in both halves is one row, with what left it in either.
What was recorded outside any stage is left out, and so are parts of rows that the two cannot have in common.
"""

from __future__ import annotations

import duckdb

from gradtrace_analyzer.diff.divided.halves import whole_nodes
from gradtrace_analyzer.diff.scope.stages import Stages
from gradtrace_analyzer.sql.pipelines import FORWARD, FULL, INPUT, WEIGHT, stages_of_roots
from gradtrace_analyzer.words.nouns import SIDES
from gradtrace_schemas import TABLES
from gradtrace_schemas.steps import DIGEST_LINKS

# Where rows come in the step of a stage; what is of a microbatch is that much later.
_PARAMETERS, _FORWARD, _CARRIED, _BACKWARD = 0, 1_000, 100_000, 200_000
_LAST_LOCAL, _REDUCED, _FINAL, _OPTIMIZER, _AFTER, _STEP = (300_000 + n for n in range(6))
# Small enough that a place is exact as a float, with its halves.
_BLOCK = 10**9
# Behind the Nodes of a microbatch comes what they were added to, and last the action's own row.
_SUMS, _END = _BLOCK // 4, _BLOCK // 2


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


def scheduled_otherwise(
    connection: duckdb.DuckDBPyConnection, *, of_one_size: bool = False
) -> bool:
    """Whether both runs are pipelines, of which the first step that both made ran in another order, or on other
    ranks. Where they are of one size, a rank that only one side has is a recording that is missing."""
    row = connection.execute(
        "SELECT min(step) FROM (SELECT step FROM baseline.stage_events WHERE stage_index IS NOT NULL "
        "INTERSECT SELECT step FROM candidate.stage_events WHERE stage_index IS NOT NULL)"
    ).fetchone()
    if row is None or row[0] is None:
        return False
    baseline, candidate = (
        dict(connection.execute(_ORDERS.format(side=side), {"step": row[0]}).fetchall())
        for side in SIDES
    )
    if not baseline or not candidate:
        return False
    both = baseline.keys() & candidate.keys()
    if not of_one_size or not both:
        return bool(baseline != candidate)
    return any(baseline[rank] != candidate[rank] for rank in both)


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
    left_out = max(
        connection.execute(
            f"SELECT count(DISTINCT (rank, root, parameter_fqn)) FROM {side}.parameters "
            f"ANTI JOIN {side}_stages USING (rank, root)"
        ).fetchall()[0][0]
        for side in SIDES
    )
    _only_last_sums(connection)
    _only_in_both(connection)
    for side in SIDES:
        for name in _arranged(side):
            connection.execute(
                f"CREATE OR REPLACE VIEW {side}.{name} AS SELECT * FROM {side}_{name}_by_stage"
            )
    count = connection.execute("SELECT max(stage_index) + 1 FROM baseline_holders").fetchone()
    return Stages(holders, count[0] if count is not None else 1, left_out)


def _arranged(side: str) -> dict[str, str]:
    """Table name to the query that arranges its rows by stage and microbatch, for all tables that `diff` reads."""
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
        "node_events": whole_nodes(
            side, lambda microbatch: f"({_BACKWARD} + {microbatch})::BIGINT * {_BLOCK}"
        ),
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


_IN_BOTH = ("parameters", "inputs", "module_calls", "backward_passes", "node_events", "gradients")


def _only_in_both(connection: duckdb.DuckDBPyConnection) -> None:
    """What of a stage one side has no row of at all was not recorded there: a half has no loss of its own."""
    points = " AND (t.point <> 'local' OR o.point = 'local')"
    for side, other in (SIDES, SIDES[::-1]):
        for name in _IN_BOTH:
            connection.execute(
                f"DELETE FROM {side}_{name}_by_stage t WHERE NOT EXISTS "
                f"(FROM {other}_{name}_by_stage o WHERE o.rank = t.rank{points if name == 'gradients' else ''})"
            )
