"""What a person asks of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gradtrace_analyzer.diff.scope.selection import Selection
from gradtrace_analyzer.diff.scope.step_alignment import StepAlignment
from gradtrace_analyzer.runs.run import Run


@dataclass(frozen=True)
class Question:
    """What is `chosen` is compared, with `exact` by its bits.

    `precision` is that of matrix products on one side where no record tells it; `repeats` are further runs of the
    baseline, from which noise is measured; `scale` multiplies every tolerance of the rule. `aligned`, the candidate's
    steps are numbered as that says. `with_chain`, the rows around the first origin are asked for too.
    """

    chosen: Selection = field(default_factory=Selection)
    exact: bool = False
    with_chain: bool = False
    precision: str | None = None
    repeats: Sequence[Run] = ()
    scale: float = 1.0
    aligned: StepAlignment | None = None
