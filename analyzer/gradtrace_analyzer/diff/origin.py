"""Places where two runs part: one type a kind, with what only that kind can have. What the search gives to the answer.

Each kind says by its type what its row is and whether the difference came in with it or arose in it (`between`);
`reports/diff/origins` has one template for each. What all kinds have is in `Origin`, which is none itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from gradtrace_analyzer.diff.code.structure import OneSided
from gradtrace_analyzer.diff.difference import Change, Difference
from gradtrace_analyzer.failures.failed_passes import OneSidedFailure
from gradtrace_analyzer.sql.pipelines import StagePlace

# What a sentence may rest on, where both sides recorded it: what the row `reads`; its module's `parameters`, or that it
# has none; `outputs` of calls and gradients of `nodes` in front of it; `local` gradients, those `after backward`, and
# the `final` ones that the optimizer saw; a parameter's value `before` the step, and as the step before `left` it; the
# optimizer's `settings`; what the `sender` of a stage's tensor made.
Ground = Literal[
    "reads",
    "parameters",
    "no parameters",
    "outputs",
    "nodes",
    "local",
    "after backward",
    "final",
    "before",
    "left",
    "settings",
    "sender",
]


@dataclass(frozen=True)
class Reached:
    """The first row of a rank that inherits from an origin."""

    rank: int
    step: int
    link: str
    key: Mapping[str, Any]
    bucket_index: int | None = None

    @classmethod
    def by(cls, d: Difference) -> Reached:
        """That of the row in which the difference shows."""
        return cls(d.rank, d.step, d.link, d.key, d.bucket_index)


@dataclass(frozen=True)
class Replay:
    """A Node that one side ran again.

    `equal` and `error` are of the very run that the origin names, None where that one was not repeated. It was
    repeated in `run_count` places of these ranks, over all steps, and in `apart_count` it gave other bits.
    """

    side: str
    equal: bool | None
    error: float | None
    run_count: int
    apart_count: int


@dataclass(frozen=True)
class Rescaled:
    """The first accumulated gradient that does not follow the factor, after backward pass `after` left one that
    did. `times` is what `side` multiplied its `.grad` by in between; both are None where no number of one side
    explains it. `others` counts further parameters of which the same pass shows it."""

    difference: Difference
    after: int
    side: str | None
    times: float | None
    others: int = 0

    @property
    def parameter_fqn(self) -> str:
        """Whose accumulated gradient does not follow the factor."""
        return str(self.difference.key["parameter_fqn"])

    @property
    def backward_index(self) -> int:
        """Of the first backward pass after which it does not."""
        return int(self.difference.key["backward_index"])


@dataclass(frozen=True)
class Origin:
    """What each kind of origin has: its row, the ranks on which it is the same place, its size, what came of it."""

    difference: Difference
    ranks: tuple[int, ...]
    # The module that it lies in; of a `CallInputOrigin`, the one whose own code lies between what agrees and the row.
    module_fqn: str | None = None
    change: Change | None = None
    # Further rows that differ at once: the other parameters of a changed set.
    other_count: int = 0
    # How often the same place shows it again, in other passes.
    repeat_count: int = 0
    # A difference before it that is no cause of it, in a forward that no backward pass followed.
    aside: Difference | None = None
    # In a pipeline: the action that it is in.
    place: StagePlace | None = None
    # By link, the rows that can have inherited from it alone, and from others too.
    inherited_counts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    # Where each other rank first differs because of it.
    reached: tuple[Reached, ...] = ()
    # The class of its root module, where there are several roots.
    root_name: str | None = None
    # What its sentence may call equal, since both sides recorded it.
    rests_on: frozenset[Ground] = frozenset()

    @property
    def between(self) -> bool:
        """Whether the row reads what already differs, though all before it agrees."""
        return False

    @property
    def link(self) -> str:
        """The link of the chain at which the runs part: that of the row, where its kind says nothing else."""
        return self.difference.link

    @property
    def step(self) -> int:
        """The step of the row that differs."""
        return self.difference.step

    @property
    def node_name(self) -> str | None:
        """The class of the autograd Node, such as `MmBackward0`; None where the row is of none."""
        name = self.difference.key.get("node_name")
        return name if isinstance(name, str) else None

    @property
    def parameter_fqn(self) -> str | None:
        """The parameter or buffer, where the link concerns one."""
        name = self.difference.key.get("parameter_fqn")
        return name if isinstance(name, str) else None

    @property
    def factor(self) -> float | None:
        """f where candidate = f x baseline within noise."""
        return self.change.factor if self.change is not None else None


class ReadApart:
    """What those kinds have in common whose row reads what already differs."""

    @property
    def between(self) -> bool:
        """So it is."""
        return True


# What one side alone has, or has otherwise: no values to compare.


@dataclass(frozen=True)
class StructureOrigin(Origin):
    """What those have in common of which one side has no row."""

    @property
    def link(self) -> str:
        """Whatever the row is of."""
        return "structure"


@dataclass(frozen=True)
class CodeOrigin(StructureOrigin):
    """Changes of the code that all that differs follows from; `follower` is the first row that does."""

    code: tuple[OneSided, ...] = ()
    follower: Difference | None = None


@dataclass(frozen=True)
class LoneRowOrigin(StructureOrigin):
    """A row that one side alone has."""


@dataclass(frozen=True)
class PassKindOrigin(StructureOrigin):
    """A backward pass that is `backward()` on one side and `autograd.grad()` on the other."""


@dataclass(frozen=True)
class UnseenGradientOrigin(StructureOrigin):
    """A gradient that the optimizer saw on one side alone."""


@dataclass(frozen=True)
class FailureOrigin(Origin):
    """The exception that one side's backward pass ended with."""

    failure: OneSidedFailure = field(kw_only=True)


# What a step begins with, and its forward.


@dataclass(frozen=True)
class FrozenOrigin(Origin):
    """A parameter that asks for gradients on one side alone."""


@dataclass(frozen=True)
class ParametersOrigin(Origin):
    """A parameter or buffer before the step's first forward."""


@dataclass(frozen=True)
class InputsOrigin(Origin):
    """What a root module was called with."""


@dataclass(frozen=True)
class RngOrigin(Origin):
    """The random generator's state, as the first call shows that draws: in what it `receives`, or returns."""

    receives: bool = False

    @property
    def between(self) -> bool:
        """Whether it shows in what the call receives."""
        return self.receives

    @property
    def link(self) -> str:
        """Whatever the row is of."""
        return "rng"


@dataclass(frozen=True)
class CallInputOrigin(ReadApart, Origin):
    """What a module's call receives, though all modules before it gave the same."""


@dataclass(frozen=True)
class ForwardOrigin(Origin):
    """What a module's call returns."""


@dataclass(frozen=True)
class ScaledOrigin(Origin):
    """What those have in common from which gradients can be a constant multiple: where that factor ends."""

    rescaled: Rescaled | None = None


@dataclass(frozen=True)
class LossOrigin(ScaledOrigin):
    """The loss, or the code between the model and `backward()`."""


# The backward pass.


@dataclass(frozen=True)
class GradientsOrigin(ScaledOrigin):
    """What those of a Node have in common: which of its `position_count` gradients differ, where not all do; and how
    many there are on both sides, where that differs."""

    positions: tuple[int, ...] = ()
    position_count: int | None = None
    gradient_counts: tuple[int, int] | None = None


@dataclass(frozen=True)
class ArrivingOrigin(ReadApart, GradientsOrigin):
    """The gradient that arrives at a Node, though all Nodes that ran before gave the same."""


@dataclass(frozen=True)
class NodeOrigin(GradientsOrigin):
    """The gradient that leaves a Node.

    `replays` say how the Node did when it was run again, for each side that did so; `rewritten` is a parameter of its
    module that other code than the optimizer changed between the step's first forward and its end; it `shares_input`,
    if another origin's module was called with the same tensor, and of both some gradients alone differ.
    """

    replays: tuple[Replay, ...] = ()
    rewritten: str | None = None
    shares_input: bool = False


@dataclass(frozen=True)
class CarriedGradientOrigin(Origin):
    """What `.grad` of a parameter holds when the step begins, on both sides or one."""


@dataclass(frozen=True)
class LocalGradientOrigin(Origin):
    """What a parameter's `.grad` accumulated in a backward pass, or what came to be added to it (`arrives`)."""

    arrives: bool = False

    @property
    def between(self) -> bool:
        """Whether it shows in what comes to be added."""
        return self.arrives

    @property
    def link(self) -> str:
        """Whatever the row is of."""
        return "local_gradient"


# Where ranks meet.


@dataclass(frozen=True)
class SyncOrigin(Origin):
    """A backward pass that reduces on one side alone (`no_sync`)."""

    @property
    def link(self) -> str:
        """Whatever the row is of."""
        return "bucket"


@dataclass(frozen=True)
class BucketSettingsOrigin(Origin):
    """A bucket that is reduced otherwise: by another hook, or with another divisor."""


@dataclass(frozen=True)
class BucketInputOrigin(ReadApart, Origin):
    """A bucket as it goes into its reduction."""


@dataclass(frozen=True)
class BucketOrigin(Origin):
    """A bucket as it comes out of its reduction."""


@dataclass(frozen=True)
class ReceivedOrigin(ReadApart, Origin):
    """What a pipeline's stage received; `source` is the rank and stage that it came from, where that is known."""

    source: tuple[int, int] | None = None


@dataclass(frozen=True)
class SentOrigin(ScaledOrigin):
    """What a pipeline's stage made for its neighbour."""

    @property
    def link(self) -> str:
        """By the way that it goes."""
        return "forward" if self.difference.key["kind"] == "forward" else "backward"


@dataclass(frozen=True)
class ReducedGradientOrigin(Origin):
    """A parameter's gradient after its reduction."""


# The optimizer's step.


@dataclass(frozen=True)
class ClipOrigin(Origin):
    """The gradient that the optimizer saw: after clipping and unscaling."""


@dataclass(frozen=True)
class OptimizerSettingsOrigin(Origin):
    """What an optimizer's parameter group is set to."""


@dataclass(frozen=True)
class UpdateOrigin(Origin):
    """A parameter after the optimizer's step."""


# Told beside the origins.


@dataclass(frozen=True)
class NonfiniteOrigin(Origin):
    """The first value that is finite on one side alone: what its row receives (`arrives`), or what it gives."""

    arrives: bool = False


@dataclass(frozen=True)
class RowOrigin(Origin):
    """A row of a link that has no kind of its own: what it is of and how far it differs is all that is told."""


# All of them. The other types in this module only hold what several kinds have.
OriginKind = (
    CodeOrigin
    | LoneRowOrigin
    | PassKindOrigin
    | UnseenGradientOrigin
    | FailureOrigin
    | FrozenOrigin
    | ParametersOrigin
    | InputsOrigin
    | RngOrigin
    | CallInputOrigin
    | ForwardOrigin
    | LossOrigin
    | ArrivingOrigin
    | NodeOrigin
    | CarriedGradientOrigin
    | LocalGradientOrigin
    | SyncOrigin
    | BucketSettingsOrigin
    | BucketInputOrigin
    | BucketOrigin
    | ReceivedOrigin
    | SentOrigin
    | ReducedGradientOrigin
    | ClipOrigin
    | OptimizerSettingsOrigin
    | UpdateOrigin
    | NonfiniteOrigin
    | RowOrigin
)
KINDS: tuple[type[Origin], ...] = get_args(OriginKind)


def failure_of(origin: Origin) -> OneSidedFailure | None:
    """The exception that is the origin, where it is one."""
    return origin.failure if isinstance(origin, FailureOrigin) else None
