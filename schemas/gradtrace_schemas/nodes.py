"""Tables of the backward pass: calls into the engine, the Nodes that ran, their single gradients."""

from gradtrace_schemas.table import (
    BACKWARD_INDEX,
    BOOL,
    CALL_INDEX,
    END_NS,
    FLOAT,
    IDENTITY,
    INT32,
    INT64,
    MICROBATCH,
    MODULE_FQN,
    NODE_SKETCH_LANES,
    RECORD_INDEX,
    ROOT,
    SHAPE,
    START_NS,
    STRING,
    STRINGS,
    Column,
    SummaryColumns,
    Table,
    nullable,
    since,
)

_PASS_KEY = ("attempt", "rank", "step", "backward_index")

BACKWARD_PASSES = Table(
    name="backward_passes",
    version=2,
    doc="One row per call into the autograd engine: `backward()`, `autograd.grad`, however it is made.",
    key=_PASS_KEY,
    entries=(
        *IDENTITY,
        MICROBATCH,
        BACKWARD_INDEX,
        RECORD_INDEX,
        Column(
            "parent_backward_index",
            INT32,
            "The pass inside whose Node this one was called (reentrant checkpointing).",
            nullable=True,
        ),
        Column(
            "kind", STRING, "`backward` (accumulates into leaves) or `grad` (returns gradients)."
        ),
        Column("root_node_name", STRING, "Node of the first tensor that it starts from.", True),
        Column("loss", FLOAT, "Value of the first tensor when it is a CPU scalar.", True),
        Column(
            "node_count",
            INT32,
            "Nodes of the graph that were watched; 0 in a weight half where Nodes are not recorded.",
        ),
        Column("unattributed_count", INT32, "Nodes whose module could not be told."),
        START_NS,
        END_NS,
        Column("device_ns", INT64, "Time on the device, where events were recorded.", True),
        Column("error", STRING, "Type and text of the exception that left it.", True),
        Column(
            "ddp_sync",
            STRING,
            "How the DDP models in front of it were called: `sync` (it reduces), `no_sync`, `bypassed` (the "
            "inner module was called past its wrapper); null where no DDP model was.",
            nullable=True,
            since=2,
        ),
    ),
)

NODE_EVENTS = Table(
    name="node_events",
    version=3,
    doc="One row per autograd Node that ran in a backward pass, or was running when its rank was killed, or looked at. "
    "Of such a one nothing is known but where it is, and when it began.",
    key=(*_PASS_KEY, "event_index"),
    entries=(
        *IDENTITY,
        MICROBATCH,
        BACKWARD_INDEX,
        Column("event_index", INT32, "Order of start within the backward pass, from 0, no gaps."),
        RECORD_INDEX,
        Column(
            "autograd_seq",
            INT64,
            "Autograd's own number of the Node, counted per thread as forward creates it.",
            nullable=True,
        ),
        Column("node_name", STRING, "Class of the Node: `AddmmBackward0`."),
        nullable(ROOT, "Root of the module that made the Node; null where it cannot be told."),
        nullable(
            MODULE_FQN,
            "Module that made the Node (innermost call); for AccumulateGrad the parameter's owner. "
            "Null outside any module, and where it cannot be told.",
        ),
        nullable(CALL_INDEX, "Which call of that module made it."),
        Column(
            "occurrence",
            INT32,
            "Among the Nodes of this name from one module call, in order of creation, from 0; null while it runs.",
            nullable=True,
        ),
        Column("parameter_fqn", STRING, "Parameter, when the Node accumulates one.", True),
        Column(
            "phase",
            STRING,
            "`backward`, `grad`, or the half of a stage's split backward: `input`, `weight`.",
        ),
        Column("stage_index", INT32, "Pipeline stage whose action ran it.", True),
        Column("thread", INT64, "Identifier of the thread that ran it.", encoding="dictionary"),
        START_NS,
        nullable(END_NS, "End, on the same clock; null while it runs."),
        since(
            6, Column("device_ns", INT64, "Time on the device, where events were recorded.", True)
        ),
        Column("grad_output_count", INT32, "Gradients that came in, not counting None.", True),
        Column("grad_input_count", INT32, "Gradients that went out, not counting None.", True),
        SummaryColumns("grad_output_", "All gradients that came in, combined", NODE_SKETCH_LANES),
        SummaryColumns("grad_input_", "All gradients that went out, combined", NODE_SKETCH_LANES),
        Column("outcome", STRING, "`ok`, `failed` (an exception left it) or `running`."),
        Column(
            "grad_output_mutated",
            BOOL,
            "A Node defined in Python changed what came in; null where it was not watched for.",
            nullable=True,
        ),
        Column("replay_equal", BOOL, "Run again with the same input, it gave the same bits.", True),
        Column(
            "replay_error",
            FLOAT,
            "Where it did not: the norm of the difference over the larger of both norms; null where that is no "
            "number (NaN, infinite, another shape).",
            nullable=True,
            since=3,
        ),
    ),
)

NODE_TENSORS = Table(
    name="node_tensors",
    version=1,
    doc="One row per gradient into or out of a Node that has several.",
    key=(*_PASS_KEY, "event_index", "direction", "position"),
    entries=(
        *IDENTITY,
        MICROBATCH,
        BACKWARD_INDEX,
        Column("event_index", INT32, "The Node's row in `node_events`."),
        RECORD_INDEX,
        Column("direction", STRING, "`grad_output` (came in) or `grad_input` (went out)."),
        Column("position", INT32, "Position among the Node's outputs or inputs."),
        Column("shape", SHAPE, "Sizes, at most the first eight.", True),
        SummaryColumns("", "The gradient"),
    ),
)

_OF_THE_NODE = (
    Column("parameter_fqn", STRING, "Parameter, when that Node accumulates one.", True),
    Column("autograd_seq", INT64, "Autograd's own number of that Node.", True),
    Column("node_start_ns", INT64, "When that Node began, on the recording's clock.", True),
    Column(
        "grad_outputs",
        STRINGS,
        "What came into that Node, in order: `float32[4, 6]`, null where no gradient came.",
        nullable=True,
    ),
    Column("call_step", INT32, "Step of the forward call that made that Node.", True),
    Column("call_microbatch", INT32, "Microbatch of that call.", True),
    Column("call_phase", STRING, "Its phase, as in `module_calls`.", True),
    Column(
        "changed_between",
        STRING,
        "Where the exception says that a saved tensor was modified in place: between which two moments that was. That "
        "Node holds the tensor. Null where it cannot be told.",
        nullable=True,
    ),
    Column("changed_root", INT32, "Root of the module in `changed_module_fqn`.", True),
    Column(
        "changed_module_fqn",
        STRING,
        "Innermost module call during which it was changed; null where it was not surely during one.",
        nullable=True,
    ),
    Column("changed_call_index", INT32, "Which call of that module.", True),
)

FAILURES = Table(
    name="failures",
    version=2,
    doc="One row per exception that left a backward pass.",
    key=_PASS_KEY,
    entries=(
        *IDENTITY,
        MICROBATCH,
        BACKWARD_INDEX,
        RECORD_INDEX,
        Column("event_index", INT32, "The Node that was running, in `node_events`.", True),
        Column("node_name", STRING, "Class of the Node that was running.", True),
        nullable(ROOT, "Root of the module that made that Node."),
        nullable(MODULE_FQN, "Module that made that Node."),
        nullable(CALL_INDEX, "Which call of that module made it."),
        Column("stage_index", INT32, "Pipeline stage.", True),
        Column("exception_type", STRING, "Class of the exception."),
        Column("exception_text", STRING, "Its text, at most 4,000 characters."),
        Column("traceback", STRING, "Its traceback, at most 16,000 characters.", True),
        Column("time_ns", INT64, "When it left the engine, on the recording's clock."),
        *(since(3, column) for column in _OF_THE_NODE),
    ),
)
