"""All that is found out about a job that would be started here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
    try:
        findings = list(surroundings(facts, python.path))
    except (KeyError, TypeError) as error:
        why = f"what it tells is not what this analyzer knows ({error}): its gradtrace is of another version"
        return Examined((Finding("gradtrace", "unknown", f"{python.path}: {why}"),), None)
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
    """What of torch's insides is not what it was."""
    said = python.self_tests()
    if said.answer is None:
        yield Finding("self-test", "unknown", f"it gives no answer: {said.why}")
        return
    tests = said.answer["findings"]
    failed = [test for test in tests if not test["ok"]]
    if not failed:
        yield Finding(
            "self-test",
            "ok",
            f"all {len(tests)} things of torch's that the recorder leans on are there",
        )
    for test in failed[:_MOST_FAILED]:
        yield Finding(
            "self-test",
            "wrong" if test["source"] else "note",
            f"{test['name']}: {test['detail']}; it serves {test['used_for']}"
            + (f"; the {test['source']} records nothing without it" if test["source"] else ""),
        )
    if len(failed) > _MOST_FAILED:
        yield Finding(
            "self-test",
            "note",
            f"and {len(failed) - _MOST_FAILED} more",
            f"{python.path} -m gradtrace_recorder self-test",
        )
