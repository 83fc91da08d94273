"""What makes rounding larger on its way through a backward pass: normalisations, kinks, Nodes that are not steady.

Each is a table of the opened steps, by place: from there on the judgement allows for it.
"""

from __future__ import annotations

from pathlib import Path

import duckdb

from gradtrace_analyzer.diff.pairing.pairs import opened_places, within
from gradtrace_analyzer.sql.derived import derived
from gradtrace_analyzer.words.nouns import SIDES

HERE = Path(__file__).parent

# Nodes whose derivative jumps.
_KINKED = "^(Relu|Threshold|LeakyRelu|Hard|Clamp|Max|Min|Abs|Prelu|Rrelu|Adaptive.*Max|Amax|Amin|Topk|Sort)"


def write_arriving(connection: duckdb.DuckDBPyConnection) -> None:
    """`arriving`: the largest gradient that reaches a module's Nodes, what its parameters' gradients are summed
    from; and `cancelling`: by how much normalisations so far may have amplified relative errors."""
    derived(HERE, "arriving").make(connection)
    derived(HERE, "cancelling").make(connection, here=within(opened_places(connection)))


def write_kinks(connection: duckdb.DuckDBPyConnection) -> None:
    """`kinked`: what elements on the wrong side of a kink may change in the gradients from there on.

    Of normal numbers with a relative error m, about 0.64 m change their sign, and with it a whole element of a
    ReLU's gradient. Where less than a hundredth of one is to be expected, none is allowed for.
    """
    derived(HERE, "kinked").make(connection, kinks=_KINKED)


def write_unsteady(connection: duckdb.DuckDBPyConnection) -> None:
    """`unsteady`: by how much Nodes so far disagreed with themselves when they were run again, on either side."""
    here = within(opened_places(connection), "n")
    replays = " UNION ALL ".join(
        "SELECT n.rank, n.step, n.record_index - s.first AS place, n.replay_error AS error "
        f"FROM {side}.node_events n SEMI JOIN opened USING (rank, step) JOIN step_start s ON s.rank = n.rank "
        f"AND s.step = n.step AND s.side = '{side}' WHERE NOT n.replay_equal AND n.replay_error > 0 AND {here}"
        for side in SIDES
    )
    derived(HERE, "unsteady").make(connection, replays=replays)
