"""A small job, bare and recorded in turn: whether it is recorded, by which observer, and what that costs."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradtrace_analyzer.doctor.finding import Finding
from gradtrace_analyzer.doctor.interpreter import Interpreter
from gradtrace_analyzer.errors import GradtraceError
from gradtrace_analyzer.progress import progress
from gradtrace_analyzer.runs.opening import open_run
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.words.numbers import ms_text

_ROUNDS = 2
# Of wall time, for all of them: on a machine that is free it takes 20 or less, most of it imports of torch.
_SECONDS = 30.0
# What the trial takes over of the settings; others choose steps, ranks or modules, which are the job's own.
_TAKEN_OVER = ("detail", "summary", "device_times", "observer")


@dataclass(frozen=True)
class Trial:
    """Processor time of a step, the least median of the rounds, of so many steps each."""

    model: str
    observer: str
    steps: int
    bare_ns: int
    recorded_ns: int

    @property
    def ratio(self) -> float:
        """How many times as long a recorded step takes."""
        return self.recorded_ns / self.bare_ns


def tried(python: Interpreter, settings: Mapping[str, Any] | None) -> tuple[Trial | None, Finding]:
    """The trial, and what it shows; no trial where a job failed, was not recorded or took too long."""
    given = {name: str(value) for name in _TAKEN_OVER if (value := (settings or {}).get(name))}
    try:
        folder = tempfile.mkdtemp(prefix="gradtrace-doctor-")
    except OSError as error:
        return None, Finding("trial", "unknown", f"no small job was run: {error}")
    try:
        return _tried_in(Path(folder), python, given)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tried_in(
    folder: Path, python: Interpreter, given: Mapping[str, str]
) -> tuple[Trial | None, Finding]:
    bare: list[Mapping[str, Any]] = []
    recorded: list[Mapping[str, Any]] = []
    turns = [
        turn
        for number in range(_ROUNDS)
        for turn in ((bare, None), (recorded, folder / str(number)))
    ]
    ends = time.monotonic() + _SECONDS
    with progress("training a small model, bare and recorded"):
        for answers, place in turns:
            said = python.trial(place, given, max(ends - time.monotonic(), 1.0))
            if said.is_late:
                break
            if said.answer is None:
                how = "bare" if place is None else "recorded"
                return None, Finding(
                    "trial", "unknown", f"a small job fails when run {how}: {said.why}"
                )
            answers.append(said.answer)
    if not recorded:
        return None, Finding(
            "trial",
            "note",
            f"no small job was recorded within {_SECONDS:g} s: this machine is busy, or slow",
            "ask again when less runs here",
        )
    try:
        run = open_run(folder / "0")
    except GradtraceError:
        return None, Finding(
            "trial", "wrong", "a small job was run with GRADTRACE_DIR, and nothing was recorded"
        )
    return _judged(run, bare, recorded)


def _judged(
    run: Run, bare: Sequence[Mapping[str, Any]], recorded: Sequence[Mapping[str, Any]]
) -> tuple[Trial, Finding]:
    facts = run.ranks[0].facts
    trial = Trial(
        model=bare[0]["model"],
        observer=str((facts.get("observer") or {}).get("kind")),
        steps=min(one["steps"] for one in (*bare, *recorded)),
        bare_ns=min(one["step_ns"] for one in bare),
        recorded_ns=min(one["step_ns"] for one in recorded),
    )
    lost = list(_lost(facts))
    if lost:
        return trial, Finding("trial", "wrong", f"a small job was recorded, but: {'; '.join(lost)}")
    return trial, Finding(
        "trial",
        "ok",
        f"a small job was recorded, by the {trial.observer.replace('python', 'Python')} observer: "
        f"a step of {trial.model} takes {ms_text(trial.bare_ns)} bare and {ms_text(trial.recorded_ns)} recorded, "
        f"{trial.ratio:.2f} times as long "
        f"(processor time of its thread, {trial.steps} steps or more a round)"
        + (
            f"; one round within {_SECONDS:g} s: this machine is busy"
            if len(recorded) < _ROUNDS
            else ""
        ),
    )


def _lost(facts: Mapping[str, Any]) -> Iterator[str]:
    if facts.get("complete") is not True:
        yield "its recording was not closed"
    yield from facts.get("problems") or ()
