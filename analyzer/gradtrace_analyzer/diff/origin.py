"""A place where two runs part, and all that is known of it: what the search for origins gives to the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

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
    """A place where two runs part: the link, its row, and the ranks on which it is the same place."""

    link: str
    difference: Difference
    ranks: tuple[int, ...]
    # The module that it lies in; where `between`, the one whose own code lies between what agrees and the row.
    module_fqn: str | None
    change: Change | None
    # The row reads what already differs, though all before it agrees.
    between: bool = False
    # Further rows that differ at once: the other parameters of a changed set.
    other_count: int = 0
    # The exception that one side's backward pass ended with, where that is the place.
    failure: OneSidedFailure | None = None
    # Which of the Node's `position_count` gradients differ, where not all do; and how many there are on both sides,
    # where that differs.
    positions: tuple[int, ...] = ()
    position_count: int | None = None
    gradient_counts: tuple[int, int] | None = None
    # A difference before it, in a forward that no backward pass followed.
    aside: Difference | None = None
    # Where its factor ends.
    rescaled: Rescaled | None = None
    # How its Node did when it was run again, for each side that did so.
    replays: tuple[Replay, ...] = ()
    # The changes of the code that it follows from, and the first row that does.
    code: tuple[OneSided, ...] = ()
    follower: Difference | None = None
    # In a pipeline: the action that it is in; and the rank and stage that what it received came from, where it differs.
    place: StagePlace | None = None
    source: tuple[int, int] | None = None
    # How often the same place shows it again, in other passes.
    repeat_count: int = 0
    # By link, the rows that can have inherited from it alone, and from others too.
    inherited_counts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    # Where each other rank first differs because of it.
    reached: tuple[Reached, ...] = ()
    # The class of its root module, where there are several roots.
    root_name: str | None = None
    # A parameter of its module that other code than the optimizer changed between the step's first forward and its end.
    rewritten: str | None = None
    # Another origin's module was called with the same tensor, and of both some gradients alone differ.
    shares_input: bool = False
    # What its sentence may call equal, since both sides recorded it.
    rests_on: frozenset[Ground] = frozenset()

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
