"""What a law is, how one is declared, and what it finds.

A law is a function from the evidence to its findings, declared with `@law(...)` in a module of `check.laws`; `registry`
finds it there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gradtrace_analyzer.check.evidence import Evidence
from gradtrace_analyzer.words.numbers import noun

Severity = Literal["error", "warning"]
Judge = Callable[[Evidence], "Findings"]


@dataclass(frozen=True, eq=False)
class Law:
    """A law, as it is declared. It is called as the function that it was made of, and is equal to itself alone.

    `unit` is what one comparison is about, in the singular and in the plural. `after` are names of laws that stand
    before it in the chain of a step.

    `explained_by` are names of laws whose violation in the same step and group explains its own, the nearest cause
    first; `explains` are names of laws of which it is a cause behind those that they name themselves. `as_cause` says
    its own violation as a cause: `It follows from the above: {as_cause}.` Where `names_culprit`, a rank that it names
    is taken for the odd one by laws that it explains.
    """

    name: str
    severity: Severity
    unit: tuple[str, str]
    doc: str
    judge: Judge
    after: tuple[str, ...] = ()
    explained_by: tuple[str, ...] = ()
    explains: tuple[str, ...] = ()
    as_cause: str | None = None
    names_culprit: bool = False

    def __call__(self, evidence: Evidence) -> Findings:
        """What the law finds in a run."""
        return self.judge(evidence)

    def violation(self, step: int, explanation: str, **fields: Any) -> Violation:
        """That it is broken: with its own severity, unless another is given among the fields of `Violation`."""
        return Violation(self, step, explanation, **{"severity": self.severity, **fields})

    def counted(self, count: int) -> str:
        """So many comparisons: `1 backward pass`, `3 backward passes`."""
        one, many = self.unit
        return f"{count:,} {one if count == 1 else many}"


def law(
    name: str,
    severity: Severity,
    unit: str | tuple[str, str],
    doc: str,
    *,
    after: Sequence[str] = (),
    explained_by: Sequence[str] = (),
    explains: Sequence[str] = (),
    as_cause: str | None = None,
    names_culprit: bool = False,
) -> Callable[[Judge], Law]:
    """Make a law of the function below, which takes the evidence and returns its findings.

    `doc` says what holds where the law is kept. `unit` is a noun; with its plural, where an `s` does not make it. The
    rest is as in `Law`.
    """
    units = (unit, noun(2, unit)) if isinstance(unit, str) else unit

    def made(judge: Judge) -> Law:
        return Law(
            name,
            severity,
            units,
            doc,
            judge,
            tuple(after),
            tuple(explained_by),
            tuple(explains),
            as_cause,
            names_culprit,
        )

    return made


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
    """What one law has found: where it is broken, and how much it compared (in the law's unit).

    Where it compared nothing, `not_judged` says why; it is None where there was nothing to be compared and that is no
    lack (a law about stages in a run without any). `notes` say what limits the answer.
    """

    violations: Sequence[Violation] = ()
    compared: int = 0
    not_judged: str | None = None
    compression: Sequence[Compression] = ()
    notes: Sequence[str] = ()


def not_judged(why: str) -> Findings:
    """The findings of a law that could not be judged, with the reason: `Not judged, since {why}`."""
    return Findings(not_judged=why)


def outcome(
    violations: Sequence[Violation], compared: int, otherwise: str, **more: Any
) -> Findings:
    """The findings of a law: judged if it compared anything, else not judged, for the reason given."""
    if compared:
        return Findings(violations, compared, **more)
    return Findings(not_judged=otherwise, **more)
