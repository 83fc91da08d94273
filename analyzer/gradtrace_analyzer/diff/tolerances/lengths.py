"""By how much Nodes and modules lengthen what they hand on, more in one run than in the other: directions cannot tell.

Rounding turns a vector further than it lengthens it, so that a factor of 1.01 shows in a norm where it is lost in
the distance of two vectors. What lengths do without a fault is seen in the rest of the step. And where that is
too much, a factor still gives itself away: rounding errs otherwise each time, a factor is the same at every step.
"""

from __future__ import annotations

from pathlib import Path

import duckdb

from gradtrace_analyzer.numerics.model import MODEL
from gradtrace_analyzer.sql.derived import derived

HERE = Path(__file__).parent

# How many times the lengthening that is usual in a step one row may show, by the link tables of which that is asked.
USUAL_TIMES = {"node_events": MODEL.usual_of_nodes, "module_calls": MODEL.usual_of_modules}

# A norm of few numbers says little.
MANY = f"writes_b_numel >= {MODEL.fewest_numbers} AND writes_b_numel = writes_c_numel"

_OF_NODES = (
    "only_in IS NULL AND key_parameter_fqn IS NULL AND key_node_name IS NOT NULL AND writes_differs "
    f"AND {MANY}"
)
_NODE = "key_root, key_module_fqn, key_call_index, key_node_name, key_occurrence"


def write_usual_gain(connection: duckdb.DuckDBPyConnection) -> None:
    """`usual_gain`: what is usual in a rank's step, of the Nodes and of the modules."""
    derived(HERE, "usual_gain").make(connection, of_nodes=_OF_NODES, many=MANY)


def write_steady(connection: duckdb.DuckDBPyConnection) -> None:
    """`steady`: Nodes that lengthen by the same factor time after time."""
    derived(HERE, "steady").make(connection, of_nodes=_OF_NODES, node=_NODE)
