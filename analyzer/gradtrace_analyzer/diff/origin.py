"""A place where two runs part, and all that is known of it: what the search for origins gives to the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gradtrace_analyzer.diff.code.structure import Lone
from gradtrace_analyzer.diff.difference import Change, Difference
from gradtrace_analyzer.failures.failed_passes import Failure
from gradtrace_analyzer.sql.pipelines import StagePlace


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
        """That row."""
        return cls(d.rank, d.step, d.link, d.key, d.bucket_index)


@dataclass(frozen=True)
class Origin:
    """A place where two runs part: the link, its row, and the ranks on which it is the same place.

    `between` is true where the row reads what already differs, though all before it agrees: then
    `module_fqn` is the module whose own code lies between. `others` counts further rows that differ at once
    (the other parameters of a changed set). `failure` is the exception that one side's backward pass ended
    with, where that is the place. `positions` are those of the Node's `position_count` gradients that differ,
    where not all do; `gradient_counts` their numbers on both sides where these differ. `aside` is a difference
    before it in a forward that no backward pass followed, `rescaled` where its factor ends. `code` are the changes
    of the code from which the place follows, the first of it being `follower`. In a pipeline, `place` is the action
    that it is in, `source` the rank and stage that what it received came from, where that differs. `repeat_count` is
    how often the same place shows it again, in other passes. `heirs` counts, by link, the rows that can have
    inherited from it alone and from others too; `reached` is where each other rank first differs because of it.
    `root_name` names its root module, where there are several. `rewritten` is a parameter of its module that was
    changed between the step's first forward and its end by other code than the optimizer. `shares_input` is true
    where another origin's module was called with the same tensor, and some gradients alone of both differ.
    """

    link: str
    difference: Difference
    ranks: tuple[int, ...]
    module_fqn: str | None
    change: Change | None
    between: bool = False
    other_count: int = 0
    failure: Failure | None = None
    positions: tuple[int, ...] = ()
    position_count: int | None = None
    gradient_counts: tuple[int, int] | None = None
    aside: Difference | None = None
    rescaled: Rescaled | None = None
    replays: tuple[Replayed, ...] = ()
    code: tuple[Lone, ...] = ()
    follower: Difference | None = None
    place: StagePlace | None = None
    source: tuple[int, int] | None = None
    repeat_count: int = 0
    heirs: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    reached: tuple[Reached, ...] = ()
    root_name: str | None = None
    rewritten: str | None = None
    shares_input: bool = False

    @property
    def step(self) -> int:
        """The step."""
        return self.difference.step

    @property
    def node_name(self) -> str | None:
        """The Node, where the link is one."""
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


@dataclass(frozen=True)
class Replayed:
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
        """The parameter."""
        return str(self.difference.key["parameter_fqn"])

    @property
    def backward_index(self) -> int:
        """The pass in which it shows."""
        return int(self.difference.key["backward_index"])
