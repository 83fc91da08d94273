"""All that is found out about a job that would be started here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gradtrace_analyzer.doctor.finding import Finding
from gradtrace_analyzer.doctor.interpreter import Interpreter
from gradtrace_analyzer.doctor.surroundings import surroundings
from gradtrace_analyzer.doctor.trials import Trial, tried

_MOST_FAILED = 5


@dataclass(frozen=True)
class Examined:
    """The findings, in the order in which a job meets what they are about. `trial`: where one was run to its end."""

    findings: tuple[Finding, ...]
    trial: Trial | None


def examined(python: Interpreter, *, with_trial: bool) -> Examined:
    """What would become of a job that this Python runs here."""
    said = python.examined()
    if said.answer is None:
        return Examined((_not_there(python, said.why),), None)
    facts = said.answer
    findings = list(surroundings(facts, python.path))
    trial = None
    if facts["torch"] is not None:
        findings += _self_tests(python)
        if with_trial and facts["packages"]["pyarrow"] and facts["packages"]["numpy"]:
            trial, finding = tried(python, facts["settings"])
            findings.append(finding)
    return Examined(tuple(findings), trial)


def _not_there(python: Interpreter, why: str) -> Finding:
    if "No module named gradtrace_recorder" in why or "No module named 'gradtrace_recorder" in why:
        return Finding(
            "gradtrace",
            "wrong",
            f"{python.path} has none: no job of it is recorded",
            f"{python.path} -m pip install gradtrace",
        )
    return Finding("gradtrace", "unknown", f"{python.path} does not tell: {why}")


def _self_tests(python: Interpreter) -> Iterator[Finding]:
    """What of torch's insides is not what it was. Nothing where the recorder has no such test."""
    said = python.self_tests()
    tests = _found_in(said.answer)
    failed = [test for test in tests if not test.get("ok")]
    if tests and not failed:
        yield Finding(
            "self-test",
            "ok",
            f"all {len(tests)} things that the recorder leans on in torch are there",
        )
    for test in failed[:_MOST_FAILED]:
        source = test.get("source")
        yield Finding(
            "self-test",
            "wrong" if source else "note",
            f"{test.get('name')}: {test.get('detail')}; used for {test.get('used_for')}"
            + (f"; without it the {source} records nothing" if source else ""),
        )
    if len(failed) > _MOST_FAILED:
        more = len(failed) - _MOST_FAILED
        yield Finding(
            "self-test", "wrong", f"and {more} more: {python.path} -m gradtrace_recorder self-test"
        )


def _found_in(answer: Any) -> list[dict[str, Any]]:
    """The tests, whether they are the answer or stand in it."""
    if isinstance(answer, dict):
        answer = next((value for value in answer.values() if isinstance(value, list)), [])
    return [test for test in answer or [] if isinstance(test, dict)]
