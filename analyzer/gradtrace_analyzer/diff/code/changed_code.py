"""Which of the rows that one side alone has are a change of the code: they are taken out of the differences.

What a name of one side alone brings is code, and so is what one side alone has in every step from the first on, on all
ranks that run its module. What is missing in a later step, or on some of these ranks, happened: it stays a difference.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import duckdb

from gradtrace_analyzer.diff.pairing.pairs import leave_out
from gradtrace_analyzer.failures.failed_passes import OneSidedFailure
from gradtrace_analyzer.words.nouns import SIDES

# Share of the steps in which a Node must be there alone to count as other code and not as something that happened.
_MOSTLY = 0.5

_CHANGED = """
CREATE OR REPLACE TEMP TABLE changed_code AS
WITH other_passes AS (
    -- Where one side makes another pass, its passes ask for other Nodes: that tells nothing of a module's code.
    SELECT DISTINCT rank, step FROM differing_backward_passes WHERE only_in IS NOT NULL
),
unmatched AS (
    SELECT 'node_events' AS of_table, rank, step, place, only_in, key_module_fqn AS module_fqn,
        key_node_name AS node_name, CAST(NULL AS VARCHAR) AS phase, key_parameter_fqn AS parameter_fqn
    FROM differing_node_events n WHERE only_in IS NOT NULL AND NOT EXISTS (
        -- Nodes of a pass that one side alone has are that pass's.
        FROM differing_backward_passes p WHERE p.only_in = n.only_in AND p.rank = n.rank AND p.step = n.step
        AND p.key_backward_index = n.key_backward_index)
    UNION ALL SELECT 'module_calls', rank, step, place, only_in, key_module_fqn, NULL, key_phase, NULL
    FROM differing_module_calls WHERE only_in IS NOT NULL
    UNION ALL SELECT 'gradients', rank, step, place, only_in, NULL, NULL, NULL, key_parameter_fqn
    FROM differing_gradients WHERE only_in IS NOT NULL
    UNION ALL SELECT 'parameters', rank, step, place, only_in, NULL, NULL, NULL, key_parameter_fqn
    FROM differing_parameters WHERE only_in IS NOT NULL
),
marked AS (
    SELECT u.*, coalesce(m.name IS NOT NULL, false) OR coalesce(p.name IS NOT NULL, false) AS is_lone
    FROM unmatched u
    LEFT JOIN lone_name m ON m.kind = 'module' AND m.side = u.only_in AND m.name = u.module_fqn
    LEFT JOIN lone_name p ON p.kind = 'parameter' AND p.side = u.only_in AND p.name = u.parameter_fqn
    ANTI JOIN failed f ON f.rank = u.rank AND f.step <= u.step
),
seen_steps AS (
    SELECT rank, min(step) AS first, count(*) - count(u.step) AS step_count
    FROM common LEFT JOIN unjudged u USING (rank, step) ANTI JOIN other_passes USING (rank, step) GROUP BY rank
),
by_rank AS (
    SELECT of_table, only_in, module_fqn, node_name, phase, m.rank,
        min(step) = any_value(first) AND count(DISTINCT step) > $mostly * any_value(step_count) AS is_constant
    FROM marked m ANTI JOIN other_passes USING (rank, step) JOIN seen_steps USING (rank)
    WHERE NOT is_lone AND of_table IN ('node_events', 'module_calls') AND parameter_fqn IS NULL GROUP BY ALL
),
counted AS (
    SELECT of_table, only_in, module_fqn, node_name, phase, bool_and(is_constant) AS is_constant, count(*) AS rank_count
    FROM by_rank GROUP BY ALL
),
everywhere AS (
    SELECT of_table, only_in, module_fqn, node_name, phase FROM counted n
    WHERE is_constant AND rank_count >= coalesce(nullif(
        (SELECT count(*) FROM callers c WHERE c.module_fqn = n.module_fqn), 0), (SELECT count(*) FROM seen_steps))
)
SELECT DISTINCT m.* FROM marked m LEFT JOIN everywhere e ON e.of_table = m.of_table AND e.only_in = m.only_in
    AND e.module_fqn IS NOT DISTINCT FROM m.module_fqn AND e.node_name IS NOT DISTINCT FROM m.node_name
    AND e.phase IS NOT DISTINCT FROM m.phase
WHERE m.is_lone OR (e.of_table IS NOT NULL AND m.parameter_fqn IS NULL)
"""


def mark_code(
    connection: duckdb.DuckDBPyConnection,
    lone: Mapping[str, Mapping[str, Collection[str]]],
    failures: Collection[OneSidedFailure],
) -> None:
    """Make `changed_code`: the unmatched rows of lone names, and those that are alone in all steps and ranks."""
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE lone_name (side VARCHAR, kind VARCHAR, name VARCHAR)"
    )
    connection.execute("CREATE OR REPLACE TEMP TABLE failed (rank INTEGER, step INTEGER)")
    names = [(s, kind, name) for s in SIDES for kind in lone[s] for name in lone[s][kind]]
    if names:
        connection.executemany("INSERT INTO lone_name VALUES (?, ?, ?)", names)
    if failures:
        rows = [(failure.rank, failure.step) for failure in failures]
        connection.executemany("INSERT INTO failed VALUES (?, ?)", rows)
    connection.execute(_CHANGED, {"mostly": _MOSTLY})


def take_out(connection: duckdb.DuckDBPyConnection) -> None:
    """Take the changed code, and what follows from it alone, out of the differences."""
    for table in ("node_events", "module_calls", "gradients", "parameters"):
        leave_out(
            connection,
            table,
            "changed code",
            "only_in IS NOT NULL AND EXISTS (SELECT 1 FROM changed_code c "
            f"WHERE c.of_table = '{table}' AND c.rank = d.rank AND c.step = d.step AND c.place = d.place "
            "AND c.only_in = d.only_in)",
        )
    _forget_lone_in_groups(connection)
    _excuse_inside(connection)


def _forget_lone_in_groups(connection: duckdb.DuckDBPyConnection) -> None:
    """That an optimizer holds the parameters which one side alone has is no setting of its own."""
    known = "[x FOR x IN value_{side}_parameter_fqns IF NOT list_contains(names, x)]"
    b, c = known.format(side="b"), known.format(side="c")
    leave_out(
        connection,
        "optimizer_groups",
        "it holds parameters that one side alone has",
        "only_in IS NULL AND (rank, step, place) IN (SELECT (rank, step, place) FROM differing_optimizer_groups, "
        "(SELECT coalesce(list(name), []) AS names FROM lone_name "
        f"WHERE kind = 'parameter') WHERE {b} = {c} AND value_b_parameter_fqns <> value_c_parameter_fqns "
        "AND value_b_optimizer_class IS NOT DISTINCT FROM value_c_optimizer_class "
        "AND value_b_learning_rate IS NOT DISTINCT FROM value_c_learning_rate "
        "AND value_b_hyperparameters IS NOT DISTINCT FROM value_c_hyperparameters)",
    )


def _excuse_inside(connection: duckdb.DuckDBPyConnection) -> None:
    """Judge no Node by tolerance that changed code has given another part of the work from the first step on.

    Where a product became a part of a sum, the sum's Node gives the product's gradient. That is so if at the first step
    all else agrees: what leaves the module, the loss, the gradients. Faults inside still show in what leaves it.
    """
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE changed_module AS SELECT DISTINCT module_fqn FROM changed_code "
        "WHERE NOT is_lone AND of_table = 'node_events'"
    )
    first = "step = (SELECT min(step) FROM common c WHERE c.rank = d.rank)"
    inside = "EXISTS (SELECT 1 FROM changed_module m WHERE m.module_fqn IS NOT DISTINCT FROM d.key_module_fqn)"
    outside = " UNION ALL ".join(
        f"SELECT 1 FROM differing_{table} d WHERE exceeds AND {first}"
        + (f" AND NOT {inside}" if table == "node_events" else "")
        for table in ("module_calls", "node_events", "gradients", "backward_passes")
    )
    if connection.execute(f"SELECT 1 FROM ({outside}) LIMIT 1").fetchone() is not None:
        return
    keys = ("key_root", "key_module_fqn", "key_call_index", "key_node_name", "key_occurrence")
    same = " AND ".join(f"f.{key} IS NOT DISTINCT FROM d.{key}" for key in keys)
    connection.execute(
        f"CREATE OR REPLACE TEMP TABLE other_work AS SELECT DISTINCT rank, {', '.join(keys)} "
        f"FROM differing_node_events d WHERE beyond AND only_in IS NULL AND {first} AND {inside}"
    )
    connection.execute(
        "INSERT INTO excused SELECT d.id FROM differing_node_events d WHERE only_in IS NULL AND EXISTS "
        f"(SELECT 1 FROM other_work f WHERE f.rank = d.rank AND {same})"
    )
