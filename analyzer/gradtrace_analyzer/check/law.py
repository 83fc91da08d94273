"""What the laws are, and what breaking one looks like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

Severity = Literal["error", "warning"]


class Law(Enum):
    """Each law with its name, its severity, and what it says."""

    name_: str
    severity: Severity
    doc: str

    def __init__(self, name_: str, severity: Severity, doc: str) -> None:
        self.name_ = name_
        self.severity = severity
        self.doc = doc

    DATA_DIFFER = (
        "data_differ",
        "warning",
        "The ranks of a data-parallel group train on different inputs in every step.",
    )
    VALUES_FINITE = (
        "values_finite",
        "error",
        "No value is born infinite or NaN. The first infinity and the first NaN are two findings. An infinity "
        "that stays in the forward pass (a mask), or in a step that GradScaler skipped, is a warning.",
    )
    FORWARD_IS_FRESH = (
        "forward_is_fresh",
        "warning",
        "Gradients differ from those of the step before when the parameters do.",
    )
    REPLAYS_EQUAL = (
        "replays_equal",
        "error",
        "A Node that is run again with the same gradients (GRADTRACE_REPLAY) gives the same bits. Where it does not, "
        "its kernel is nondeterministic or its device faulty; a rank that differs alone points to the device.",
    )
    PASSES_COMPLETE = (
        "passes_complete",
        "error",
        "No backward pass ends with an exception. One after which the rank completes others (it was caught) is a "
        "warning; one that ended while it waited for a reduction breaks the laws below.",
    )
    HANDOVERS_EQUAL = (
        "handovers_equal",
        "error",
        "What a pipeline stage receives is bit for bit what its neighbour sent for that microbatch: activations from "
        "the stage before, gradients from the one after.",
    )
    ACTIONS_COMPLETE = (
        "actions_complete",
        "error",
        "A pipeline stage runs for each microbatch one forward, and one whole backward, or one input half and one "
        "weight half; as often as the schedule is run in the step.",
    )
    GRADIENTS_ACCUMULATE = (
        "gradients_accumulate",
        "warning",
        "After a backward pass `.grad` holds what it held before in the step plus what arrived, or what arrived alone "
        "(it was reset): nothing else changes it between passes.",
    )
    MICROBATCHES_ADD_UP = (
        "microbatches_add_up",
        "error",
        "What a pipeline stage's microbatches give adds up in `.grad`: none of it is lost before the next one, and "
        "after the last the gradients of all stages are divided by the same number.",
    )
    WRAPPER_CALLED = (
        "wrapper_called",
        "warning",
        "A model that DDP wraps is called through its wrapper: called past it, its gradients are not reduced.",
    )
    LAST_PASS_REDUCES = (
        "last_pass_reduces",
        "warning",
        "The last backward pass before the optimizer's step reduces the gradients: it is not under no_sync.",
    )
    PASSES_MATCH = (
        "passes_match",
        "warning",
        "The ranks of a data-parallel group make as many steps, as many backward passes in each, and as many "
        "forwards that no backward pass follows.",
    )
    BUCKETS_LAUNCHED = (
        "buckets_launched",
        "warning",
        "A backward pass that reduces launches every bucket, and each launched bucket is done.",
    )
    COLLECTIVES_MATCH = (
        "collectives_match",
        "error",
        "What the ranks of a group reduce together is the same bucket of the same step by the same hook, and all "
        "ranks take part.",
    )
    REDUCTION_IS_MEAN = (
        "reduction_is_mean",
        "error",
        "A reduced bucket is the mean of the ranks' buckets, within 4 eps sqrt(ranks) of the larger of the mean of "
        "their norms and its own, with eps of the bucket's dtype, at least 2^-23, and half the dtype's smallest number "
        "per rank and element. Torch's compressing hooks are held to what they promise: eps sqrt(ranks) of the dtype "
        "on the wire, two levels of a quantized range; PowerSGD, post-local SGD and hooks named by `--compressing` to "
        "nothing, and what they lose is told. It is read from sketches: their standard error of 0.18 scales the size "
        "of a real deviation, and makes none where there is none. Buckets of sparse gradients are not judged.",
    )
    GRADIENTS_EQUAL = (
        "gradients_equal",
        "error",
        "After a reduction all ranks of the group hold bit-equal buckets and gradients, and their optimizers see them "
        "so.",
    )
    PARAMETERS_EQUAL = (
        "parameters_equal",
        "error",
        "All ranks of a data-parallel group hold bit-equal parameters before and after each step.",
    )

    @property
    def chain_order(self) -> int:
        """Its place in the chain of a step."""
        return list(Law).index(self)


@dataclass(frozen=True)
class Violation:
    """One broken law, at its first place. What does not apply is None.

    `phase` is the half of a stage's pass: `forward`, `backward` (a whole one), `input` or `weight`.

    `count` is how many like it there are, this one included. `inherits` names what broke before it in the same
    step and explains it. `order` sorts violations of one law and step. `at_start` puts it in front of the
    step's chain.
    """

    law: Law
    step: int
    explanation: str
    severity: Severity
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    group: str | None = None
    microbatch: int | None = None
    backward_index: int | None = None
    bucket_index: int | None = None
    root: int | None = None
    module_fqn: str | None = None
    node_name: str | None = None
    parameter_fqn: str | None = None
    hook_name: str | None = None
    factor: float | None = None
    relative_error: float | None = None
    tolerance: float | None = None
    event_index: int | None = None
    stage_index: int | None = None
    phase: str | None = None
    count: int | None = None
    inherits: Law | None = None
    at_start: bool = False
    order: float = 0.0


def violation(law: Law, step: int, explanation: str, **fields: Any) -> Violation:
    """A violation with the law's own severity, unless another is given."""
    return Violation(law, step, explanation, **{"severity": law.severity, **fields})


@dataclass(frozen=True)
class Compression:
    """How much a compressing hook loses: relative errors of its buckets, and what it promises at most."""

    hook_name: str
    group: str
    bucket_count: int
    median_error: float
    largest_error: float
    promised: float | None


@dataclass(frozen=True)
class Findings:
    """What laws have found: violations, how much each law compared, and why others could not be judged.

    `notes` say what limits the answer.
    """

    violations: Sequence[Violation] = ()
    judged: Mapping[Law, int] = field(default_factory=dict)
    not_judged: Mapping[Law, str] = field(default_factory=dict)
    compression: Sequence[Compression] = ()
    notes: Sequence[str] = ()


def outcome(
    law: Law, violations: Sequence[Violation], compared: int, otherwise: str, **more: Any
) -> Findings:
    """The findings of one law: judged if it compared anything, else not judged, for the reason given."""
    if compared:
        return Findings(violations, {law: compared}, **more)
    return Findings((), {}, {law: otherwise}, **more)
