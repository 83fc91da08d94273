"""Nodes that ran in the two halves of a backward pass, as the one that they are in a whole pass: SQL.

Of a Node the input half gives some gradients, the weight half the others, and where a path to a weight leads through
it, some are given in both.
"""

from __future__ import annotations

from collections.abc import Callable

from gradtrace_schemas.summary import multipliers
from gradtrace_schemas.table import NODE_SKETCH_LANES, SKETCH_LANES


def whole_nodes(side: str, block: Callable[[str], str]) -> str:
    """A Node's runs in the halves of a pass as one: what came in last, and all different gradients that went out.

    A query over a side's `node_events`, with a stage in place of the rank and the microbatch in place of the pass;
    `block` is where the rows of a microbatch begin. It reads the tables `<side>_holders` and `<side>_begins`.
    """
    lanes = ", ".join(f"sum(sketch[{lane + 1}])::FLOAT" for lane in range(NODE_SKETCH_LANES))
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
        f"({block('n.microbatch')} + n.record_index - b.begins)::BIGINT AS record_index",
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
            THEN on_node_lanes(t.sketch) END AS folded FROM ran n JOIN grouped g ON {same}
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
