"""What a person should know before they believe an answer, as values, where more than words is in it: a step, a run."""

from __future__ import annotations

from dataclasses import dataclass

from gradtrace_analyzer.diff.code.legal_changes import LossScale
from gradtrace_analyzer.runs.run import Run


@dataclass(frozen=True)
class Note:
    """Each kind has a type, and a template in `reports/diff/notes`."""


@dataclass(frozen=True)
class JoinedAttempts(Note):
    """A side is several attempts of one job, read as one."""

    side: str
    run: Run


@dataclass(frozen=True)
class FirstOfAttempt(Note):
    """An origin lies in the first step that a later attempt of a side made."""

    side: str
    step: int
    attempt: int


@dataclass(frozen=True)
class DividedOut(Note):
    """Loss scales that were divided out, at least one."""

    scales: tuple[LossScale, ...]


@dataclass(frozen=True)
class GeneratorsApart(Note):
    """Random generators stand elsewhere at the beginning of steps, and no difference shows it."""

    steps: tuple[int, ...]
    ranks: tuple[int, ...]
