"""Tables of the forward pass: calls of modules, and what the job fed them."""

from gradtrace_schemas.table import (
    CALL_INDEX,
    END_NS,
    IDENTITY,
    INT32,
    INT64,
    MICROBATCH,
    MODULE_FQN,
    RECORD_INDEX,
    ROOT,
    SHAPE,
    START_NS,
    STRING,
    Column,
    SummaryColumns,
    Table,
    nullable,
)

MODULE_CALLS = Table(
    name="module_calls",
    version=1,
    doc="One row per call of a module's forward.",
    key=("attempt", "rank", "step", "microbatch", "root", "module_fqn", "phase", "call_index"),
    entries=(
        *IDENTITY,
        MICROBATCH,
        RECORD_INDEX,
        ROOT,
        MODULE_FQN,
        Column("phase", STRING, "`forward`, `no_grad` or `recompute` (inside a backward pass)."),
        CALL_INDEX,
        Column("module_class", STRING, "Class of the module."),
        Column("depth", INT32, "Modules around this call, 0 for a root's."),
        START_NS,
        END_NS,
        SummaryColumns("input_", "All tensors that came in, combined"),
        SummaryColumns("output_", "All tensors that went out, combined"),
    ),
)

INPUTS = Table(
    name="inputs",
    version=1,
    doc="One row per tensor argument of a root module's call, or tensor given by `note(name, tensor)`.",
    key=("attempt", "rank", "step", "microbatch", "root", "call_index", "name"),
    entries=(
        *IDENTITY,
        MICROBATCH,
        RECORD_INDEX,
        nullable(ROOT, "Root module; null for a noted tensor."),
        nullable(
            CALL_INDEX, "Which call of the root; for a noted tensor, which note of that name."
        ),
        Column("name", STRING, "Name of the parameter of `forward`, or the noted name."),
        Column("shape", SHAPE, "Sizes, at most the first eight.", True),
        SummaryColumns("", "The tensor"),
    ),
)

STAGE_EVENTS = Table(
    name="stage_events",
    version=1,
    doc="One row per action of a pipeline stage.",
    key=("attempt", "rank", "step", "microbatch", "stage_index", "kind"),
    entries=(
        *IDENTITY,
        MICROBATCH,
        RECORD_INDEX,
        Column("stage_index", INT32, "Pipeline stage, from 0 at the input."),
        Column(
            "kind", STRING, "`forward`, `backward_full`, `backward_input` or `backward_weight`."
        ),
        START_NS,
        END_NS,
        Column("device_ns", INT64, "Time on the device, where events were recorded.", True),
        SummaryColumns("received_", "All tensors that the action received, combined"),
        SummaryColumns("sent_", "All tensors that the action sent, combined"),
    ),
)
