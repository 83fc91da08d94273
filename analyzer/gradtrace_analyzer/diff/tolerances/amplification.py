"""What makes rounding larger on its way through a backward pass: normalisations, kinks, Nodes that are not steady.

Each is a table of the opened steps, by place: from there on the judgement allows for it.
"""

from __future__ import annotations

import duckdb

from gradtrace_analyzer.diff.pairing.pairs import opened_places, within
from gradtrace_analyzer.words.nouns import SIDES

# How many times a normalisation's backward pass may amplify the relative error of what it receives.
_MOST_AMPLIFIED = 1e4

# Nodes whose derivative jumps, and the share of normal numbers that a relative error of 1 would carry over the jump.
_KINKED = "^(Relu|Threshold|LeakyRelu|Hard|Clamp|Max|Min|Abs|Prelu|Rrelu|Adaptive.*Max|Amax|Amin|Topk|Sort)"
_FLIPPED = 0.64

# How many times what a Node's replay showed it may err.
_REPLAYED = 4.0


def write_arriving(connection: duckdb.DuckDBPyConnection) -> None:
    """`arriving`: the largest gradient that reaches a module's Nodes, what its parameters' gradients are summed
    from; and `cancelling`: by how much normalisations so far may have amplified relative errors."""
    here = within(opened_places(connection))
    norm = "greatest(reads_b_norm, reads_c_norm)"
    out = "greatest(writes_b_norm, writes_c_norm)"
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE arriving AS "
        f"SELECT rank, step, key_root AS root, key_module_fqn AS module_fqn, max({norm}) AS norm "
        "FROM differing_node_events WHERE key_parameter_fqn IS NULL AND key_module_fqn IS NOT NULL GROUP BY ALL"
    )
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE cancelling AS WITH calls AS ("
        "SELECT rank, step, root, module_fqn, call_index, "
        "max(sqrt(input_numel) / nullif(input_norm, 0)) AS gain FROM baseline.module_calls t "
        f"SEMI JOIN opened USING (rank, step) WHERE phase = 'forward' AND {here} GROUP BY ALL), "
        f"shares AS (SELECT d.rank, d.step, d.place, least(greatest(1, {norm} * c.gain / nullif({out}, 0)), "
        f"{_MOST_AMPLIFIED}) AS share FROM differing_node_events d JOIN calls c ON c.rank = d.rank "
        "AND c.step = d.step AND c.root = d.key_root AND c.module_fqn = d.key_module_fqn "
        "AND c.call_index = d.key_call_index WHERE d.key_node_name LIKE '%NormBackward%' AND d.only_in IS NULL) "
        "SELECT rank, step, place, coalesce(lead(place) OVER w, 1e18) AS until, "
        "exp(sum(ln(share)) OVER w) AS times FROM shares WINDOW w AS (PARTITION BY rank, step ORDER BY place)"
    )


def write_kinks(connection: duckdb.DuckDBPyConnection) -> None:
    """`kinked`: what elements on the wrong side of a kink may change in the gradients from there on.

    Of normal numbers with a relative error m, about 0.64 m change their sign, and with it a whole element of a
    ReLU's gradient. Where less than a hundredth of one is to be expected, none is allowed for.
    """
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE kinked AS WITH nodes AS (SELECT d.rank, d.step, d.place, "
        f"CASE WHEN {_FLIPPED} * w.change * d.writes_b_numel > 0.01 "
        f"THEN {_FLIPPED} * w.change + 2.0 / d.writes_b_numel ELSE 0 END AS share "
        "FROM differing_node_events d JOIN seen_noise w "
        f"USING (rank, step) WHERE regexp_matches(d.key_node_name, '{_KINKED}') AND d.only_in IS NULL) "
        "SELECT rank, step, place, coalesce(lead(place) OVER w, 1e18) AS until, "
        "2 * sqrt(sum(share) OVER w) AS extra FROM nodes WINDOW w AS (PARTITION BY rank, step ORDER BY place)"
    )


def write_unsteady(connection: duckdb.DuckDBPyConnection) -> None:
    """`unsteady`: by how much Nodes so far disagreed with themselves when they were run again, on either side."""
    here = within(opened_places(connection), "n")
    sides = " UNION ALL ".join(
        "SELECT n.rank, n.step, n.record_index - s.first AS place, n.replay_error AS error "
        f"FROM {side}.node_events n SEMI JOIN opened USING (rank, step) JOIN step_start s ON s.rank = n.rank "
        f"AND s.step = n.step AND s.side = '{side}' WHERE NOT n.replay_equal AND n.replay_error > 0 AND {here}"
        for side in SIDES
    )
    connection.execute(
        f"CREATE OR REPLACE TEMP TABLE unsteady AS SELECT rank, step, place, coalesce(lead(place) OVER w, 1e18) "
        f"AS until, {_REPLAYED} * max(error) OVER w AS extra FROM (SELECT rank, step, place, max(error) AS error "
        f"FROM ({sides}) GROUP BY ALL) WINDOW w AS (PARTITION BY rank, step ORDER BY place)"
    )
