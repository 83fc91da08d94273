"""All tables, and the history of the schema: one line per version."""

from gradtrace_schemas.groups import BUCKETS, GROUPS, RANKS
from gradtrace_schemas.modules import INPUTS, MODULE_CALLS, STAGE_EVENTS
from gradtrace_schemas.nodes import BACKWARD_PASSES, FAILURES, NODE_EVENTS, NODE_TENSORS
from gradtrace_schemas.steps import GRADIENTS, OPTIMIZER_GROUPS, PARAMETERS, STEPS
from gradtrace_schemas.table import Table

# 1  the first: all tables below.
# 2  buckets are recorded: their root, module, kind, layout, divisor, collective number, numel and dtype, and their
#    digest in steps; groups name the DDP module that reduces over them; backward_passes say how DDP was called.
# 3  failures say what came into the Node, which call made it, and who changed a tensor that it had saved; node_events
#    by how much a Node that was run again differs; ranks what was not run again, in which steps rows were dropped, and
#    which rows a flight recording let go of.
# 4  stage_events are recorded: which occurrence, with what error.
# 5  ranks say which commit was checked out.
# 6  node_events and buckets have a time on the device.
# 7  steps say what ended them, and the framework's own counter; groups which optimizer stood around theirs; ranks which
#    rule ended their steps, and why the first has its number.
SCHEMA_VERSION = 7

# The order is that of a step; the position of a table is the kind of its journal records, so append only.
ALL_TABLES: tuple[Table, ...] = (
    STEPS,
    INPUTS,
    PARAMETERS,
    OPTIMIZER_GROUPS,
    MODULE_CALLS,
    BACKWARD_PASSES,
    NODE_EVENTS,
    NODE_TENSORS,
    GRADIENTS,
    BUCKETS,
    STAGE_EVENTS,
    GROUPS,
    FAILURES,
    RANKS,
)

TABLES: dict[str, Table] = {table.name: table for table in ALL_TABLES}
