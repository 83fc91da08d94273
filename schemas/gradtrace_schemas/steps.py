"""Tables of a step as a whole: its times, its parameters, its gradients, its optimizer."""

from gradtrace_schemas.table import (
    BACKWARD_INDEX,
    BOOL,
    END_NS,
    FLOAT,
    IDENTITY,
    INT32,
    INT64,
    MICROBATCH,
    RECORD_INDEX,
    ROOT,
    SHAPE,
    START_NS,
    STRING,
    STRINGS,
    Column,
    SummaryColumns,
    Table,
    since,
)

# The links whose rows are folded into a digest per step; the order is that of the step itself.
DIGEST_LINKS = ("parameters", "inputs", "forward", "backward", "gradients", "optimizer", "buckets")
_DIGESTS_SINCE = {"buckets": 2}


def _digest(link: str) -> Column:
    return Column(
        f"digest_{link}",
        INT64,
        f"Hash over order and fingerprint of the step's {link} rows; null where they lack fingerprints.",
        True,
        "plain",
        _DIGESTS_SINCE.get(link, 1),
    )


STEPS = Table(
    name="steps",
    version=3,
    doc="One row per optimizer step of a rank.",
    key=("attempt", "rank", "step"),
    entries=(
        *IDENTITY,
        RECORD_INDEX,
        START_NS,
        END_NS,
        Column("forward_ns", INT64, "Time inside calls of root modules in grad mode."),
        Column("backward_ns", INT64, "Time inside top-level calls into the autograd engine."),
        Column("optimizer_ns", INT64, "Time inside `Optimizer.step`."),
        Column(
            "skipped",
            BOOL,
            "GradScaler left the optimizer out; null where no optimizer step was seen, or it cannot be told.",
            nullable=True,
        ),
        since(
            7,
            Column(
                "ended_by",
                STRING,
                "What ended the step: `optimizer` (one stepped), `scaler` (GradScaler left the optimizer out), `job` "
                "(`gradtrace_recorder.step` said the next), `parameters` (no torch optimizer was seen: they had "
                "changed between two passes); null where the recording ended inside it.",
                nullable=True,
            ),
        ),
        since(
            7,
            Column(
                "framework",
                STRING,
                "Whose counter `framework_step` is: `deepspeed`, `lightning`, `torchtitan`, `transformers`; null where "
                "none was found.",
                nullable=True,
            ),
        ),
        since(
            7,
            Column(
                "framework_step",
                INT64,
                "The framework's own counter as it stood while this step ran.",
                nullable=True,
            ),
        ),
        Column(
            "backward_count",
            INT32,
            "Accumulating top-level backward passes; a weight half of a pipeline stage counts as one.",
        ),
        Column("abandoned_forwards", INT32, "Grad-mode root calls that no backward pass followed."),
        Column(
            "rng_fingerprint",
            INT64,
            "Fingerprint of the CPU generator's state at the step's first forward.",
            True,
            "plain",
        ),
        Column("recorder_ns", INT64, "The recorder's own time in the job's threads."),
        *(_digest(link) for link in DIGEST_LINKS),
    ),
)

PARAMETERS = Table(
    name="parameters",
    version=1,
    doc="One row per parameter or buffer at one point of a step.",
    key=("attempt", "rank", "step", "root", "parameter_fqn", "point"),
    entries=(
        *IDENTITY,
        RECORD_INDEX,
        ROOT,
        Column("parameter_fqn", STRING, "Canonical dotted name relative to the root."),
        Column("point", STRING, "`before` the root's first forward, `after` the optimizer."),
        Column("kind", STRING, "`parameter` or `buffer`."),
        Column("shape", SHAPE, "Sizes, at most the first eight.", True),
        Column("requires_grad", BOOL, "Whether it asks for a gradient."),
        Column("other_fqns", STRINGS, "Other names of a tied parameter.", True),
        SummaryColumns("", "The parameter"),
    ),
)

OPTIMIZER_GROUPS = Table(
    name="optimizer_groups",
    version=2,
    doc="One row per parameter group of an optimizer at a step.",
    key=("attempt", "rank", "step", "optimizer_index", "group_index"),
    entries=(
        *IDENTITY,
        RECORD_INDEX,
        Column("optimizer_index", INT32, "Optimizers numbered by their first step."),
        Column("group_index", INT32, "Position in `param_groups`."),
        Column("optimizer_class", STRING, "Class of the optimizer that holds the group."),
        since(
            7,
            Column(
                "wrapper_class",
                STRING,
                "Class of the optimizer around it whose step this was; null where the job called its own.",
                nullable=True,
            ),
        ),
        Column("learning_rate", FLOAT, "The group's `lr`, where it is a number on the CPU.", True),
        Column("hyperparameters", STRING, "The group's other numbers and switches, as JSON."),
        Column("parameter_fqns", STRINGS, "Its parameters; null for one that no root owns.", True),
    ),
)

GRADIENTS = Table(
    name="gradients",
    version=1,
    doc="One row per parameter's gradient at one point. A parameter that has none there has no row.",
    key=("attempt", "rank", "step", "backward_index", "root", "parameter_fqn", "point"),
    entries=(
        *IDENTITY,
        MICROBATCH,
        BACKWARD_INDEX,
        RECORD_INDEX,
        ROOT,
        Column("parameter_fqn", STRING, "Canonical dotted name relative to the root."),
        Column(
            "point",
            STRING,
            "`carried` (in `.grad` when the step's first backward began), `local` (accumulated on this "
            "rank), `reduced` (after a DDP backward pass), `final` (what the optimizer saw; of one that is given a "
            "closure, after each call of it; of one that GradScaler left out, what it would have seen).",
        ),
        Column("shape", SHAPE, "Sizes, at most the first eight.", True),
        SummaryColumns("", "The gradient"),
    ),
)
