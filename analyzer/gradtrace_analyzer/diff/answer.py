"""What a diff has found: the places where two runs part, what is inherited from them, and the verdict.

Ranks meet only where gradients are reduced: a rank that first differs there has inherited it from one that
differed before. Which rows are origins is told by `firsts` and `origins`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gradtrace_analyzer.diff.code.rewritten import Aside, Scaled
from gradtrace_analyzer.diff.code.structure import Lone
from gradtrace_analyzer.diff.difference import Change, Difference
from gradtrace_analyzer.diff.divided.sums import Repartitioned
from gradtrace_analyzer.diff.findings.repeated import Repeated
from gradtrace_analyzer.diff.findings.replayed import Replayed
from gradtrace_analyzer.diff.findings.rescaled import Rescaled
from gradtrace_analyzer.diff.names.renames import Rename
from gradtrace_analyzer.diff.origins.chain_rows import Passage
from gradtrace_analyzer.diff.scope.cover import Cover
from gradtrace_analyzer.diff.tolerances.noise import Noise
from gradtrace_analyzer.failures.failed_passes import Failure
from gradtrace_analyzer.numerics.tolerance import Rule
from gradtrace_analyzer.sql.pipelines import Place

Verdict = Literal["identical", "within_tolerance", "different", "incomparable"]


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
    place: Place | None = None
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
class Answer:
    """What a diff has found. `equal` is what of the origins' step does not differ anywhere: ranks, links, modules;
    `chain` the rows around the first origin, where these were asked for. `causes` are counts that explain its factor,
    `deaths` sentences on what stopped a rank, where the first origin is what it did not come to do.

    `unseen` is what lies in front of the origin and was not compared. `first_bits` is the first difference of
    all, where the origin is only the first beyond tolerance. `failures` are the exceptions that left a backward
    pass on one side alone, `first_nonfinite` the first value that is finite on one side alone, `repeated` the
    Nodes that a pass of one side alone ran again, with a multiple of what arrived before. `renames` are those that
    were applied, `likely_renames` what else names and shapes suggest; `causes` may explain the first origin's factor.
    `rule` and `noise` are where the tolerances come from, `sums` what was compared where the work is divided
    otherwise, `aside` the rows of one side alone that change nothing, `scaled` the loss scales that were divided out.
    """

    verdict: Verdict
    reason: str
    origins: tuple[Origin, ...]
    inherited: tuple[Origin, ...]
    cover: Cover
    configuration: tuple[Mapping[str, Any], ...] = ()
    structure: tuple[Lone, ...] = ()
    spread: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    first_bits: Origin | None = None
    failures: tuple[Failure, ...] = ()
    first_nonfinite: Origin | None = None
    repeated: tuple[Repeated, ...] = ()
    renames: tuple[Rename, ...] = ()
    likely_renames: tuple[Rename, ...] = ()
    causes: tuple[str, ...] = ()
    equal: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    chain: tuple[Passage, ...] = ()
    deaths: tuple[str, ...] = ()
    rule: Rule | None = None
    noise: Noise | None = None
    sums: Repartitioned | None = None
    aside: tuple[Aside, ...] = ()
    scaled: tuple[Scaled, ...] = ()
