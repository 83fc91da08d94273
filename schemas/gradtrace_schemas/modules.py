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
    since,
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

_WAITS = (
    "or, for a wait of the rank on the host, `receive_activations`, `receive_gradients` (before the action that needs "
    "them), `send_activations`, `send_gradients` (after the action that made them)."
)

STAGE_EVENTS = Table(
    name="stage_events",
    version=2,
    doc="One row per action of a pipeline stage, and per wait for what it receives or sends.",
    key=("attempt", "rank", "step", "microbatch", "stage_index", "kind", "occurrence"),
    entries=(
        *IDENTITY,
        MICROBATCH,
        RECORD_INDEX,
        Column(
            "stage_index",
            INT32,
            "Pipeline stage, from 0 at the input; null where a backward function is called outside any stage.",
            nullable=True,
        ),
        Column(
            "kind",
            STRING,
            "`forward`, `backward_full`, `backward_input` (gradients for the previous stage), `backward_weight` "
            f"(gradients for the parameters); {_WAITS} A first stage, which sends no gradients, runs a "
            "`backward_full` where others run their `backward_weight`.",
        ),
        since(
            4,
            Column(
                "occurrence",
                INT32,
                "Among the rows of this step, microbatch, stage and kind, in order of end, from 0.",
            ),
        ),
        START_NS,
        nullable(
            END_NS,
            "End, on the same clock; null where the rank was killed, or looked at, before that.",
        ),
        Column("device_ns", INT64, "Time on the device, where events were recorded.", True),
        since(4, Column("error", STRING, "Type and text of the exception that left it.", True)),
        SummaryColumns(
            "received_", "All activations or gradients that the action received, combined"
        ),
        SummaryColumns(
            "sent_",
            "All activations or gradients that the action made for its neighbour, combined; of the last stage's "
            "forward, its output",
        ),
    ),
)
