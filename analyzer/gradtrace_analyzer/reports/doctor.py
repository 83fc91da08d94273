"""What the doctor found, as a short list, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gradtrace_analyzer.doctor.finding import DoctorVerdict, Finding, Mark, verdict
from gradtrace_analyzer.doctor.recorded import Recorded
from gradtrace_analyzer.doctor.trials import Trial

_MARKS: dict[Mark, str] = {"ok": "ok", "note": "--", "wrong": "!!", "unknown": "??"}
_OF_JOBS: dict[DoctorVerdict, str] = {
    "well": "Nothing was found that keeps a job that is started here from being recorded.",
    "wrong": "Something is wrong here: see the lines with !!.",
    "unknown": "It cannot be told whether a job that is started here is recorded: see the lines with ??.",
}
# Where recording is off, and all else is well: by whether a trial was recorded.
_WHERE_OFF = {
    True: "A job that is started here would be recorded with GRADTRACE_DIR set.",
    False: "Nothing was found that would keep a job from being recorded that is started here with GRADTRACE_DIR set.",
}
_OF_RUNS: dict[DoctorVerdict, str] = {
    "well": "Nothing is lost.",
    "wrong": "Something is wrong with it: see the lines with !!.",
    "unknown": "It cannot be told whether anything is lost: see the lines with ??.",
}


def lines(findings: Sequence[Finding], *, is_of_a_run: bool) -> Iterator[str]:
    """A line a finding, what would help below it, and one sentence over all."""
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        yield f"{_MARKS[finding.mark]}  {finding.name:<{width}}  {finding.said}"
        if finding.advice is not None:
            yield f"    {'':<{width}}  -> {finding.advice}"
    yield ""
    yield explanation(findings, is_of_a_run=is_of_a_run)


def explanation(findings: Sequence[Finding], *, is_of_a_run: bool) -> str:
    """One sentence over all."""
    if is_of_a_run:
        return _OF_RUNS[verdict(findings)]
    is_off = ("settings", "note") in [(finding.name, finding.mark) for finding in findings]
    was_tried = any((finding.name, finding.mark) == ("trial", "ok") for finding in findings)
    if verdict(findings) == "well" and is_off:
        return _WHERE_OFF[was_tried]
    if verdict(findings) == "well" and was_tried:
        return "A job that is started here is recorded."
    return _OF_JOBS[verdict(findings)]


def job_object(python: str, findings: Sequence[Finding], trial: Trial | None) -> dict[str, Any]:
    """The answer about this place."""
    return {
        **_object(findings, is_of_a_run=False),
        "python": python,
        "trial": None
        if trial is None
        else {
            "model": trial.model,
            "observer": trial.observer,
            "steps": trial.steps,
            "bare_ns": trial.bare_ns,
            "recorded_ns": trial.recorded_ns,
            "ratio": trial.ratio,
        },
        "run": None,
        "attempt": None,
        "ranks": None,
    }


def run_object(name: str, found: Recorded) -> dict[str, Any]:
    """The answer about a run."""
    return {
        **_object(found.findings, is_of_a_run=True),
        "python": None,
        "trial": None,
        "run": name,
        "attempt": found.run.attempt,
        "ranks": [
            {
                "rank": one.rank,
                "state": one.state,
                "first_step": one.first_step,
                "last_step": one.last_step,
                "step_count": one.step_count,
                "tables": list(one.tables),
            }
            for one in found.ranks
        ],
    }


def _object(findings: Sequence[Finding], *, is_of_a_run: bool) -> dict[str, Any]:
    return {
        "verdict": verdict(findings),
        "explanation": explanation(findings, is_of_a_run=is_of_a_run),
        "findings": [
            {"name": f.name, "mark": f.mark, "said": f.said, "advice": f.advice} for f in findings
        ],
    }
