"""A diff's answer as JUnit XML: one test case for each link of the chain, in the chain's order."""

from __future__ import annotations

from collections.abc import Mapping
from xml.etree import ElementTree

from gradtrace_analyzer.diff.answer import Answer
from gradtrace_analyzer.diff.gate import Gate, GateFailure
from gradtrace_analyzer.diff.links import LINKS
from gradtrace_analyzer.reports.diff.gate import failure_words
from gradtrace_analyzer.reports.diff.text import explanation


def junit_xml(
    answer: Answer,
    names: tuple[str, str],
    gates: tuple[Gate, ...],
    found: Mapping[str, GateFailure],
) -> str:
    """The document. A link that no gate speaks of, or of which nothing was compared, is skipped; where nothing can be
    compared at all, each that a gate speaks of is an error."""
    cases = [_case(link, answer, names, gates, found) for link in LINKS]
    counts = {
        "tests": len(cases),
        "failures": sum(case.find("failure") is not None for case in cases),
        "errors": sum(case.find("error") is not None for case in cases),
        "skipped": sum(case.find("skipped") is not None for case in cases),
    }
    attributes = {name: str(count) for name, count in counts.items()}
    suite = ElementTree.Element(
        "testsuite",
        {"name": _clean(f"analyzer diff {names[0]} {names[1]}"), **attributes, "time": "0"},
    )
    suite.extend(cases)
    said = ElementTree.SubElement(suite, "system-out")
    said.text = _clean(f"{answer.verdict}: {explanation(answer)}")
    suites = ElementTree.Element("testsuites", {"name": "analyzer diff", **attributes, "time": "0"})
    suites.append(suite)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _case(
    link: str,
    answer: Answer,
    names: tuple[str, str],
    gates: tuple[Gate, ...],
    found: Mapping[str, GateFailure],
) -> ElementTree.Element:
    case = ElementTree.Element(
        "testcase", {"classname": f"gradtrace.{_clean(names[1])}", "name": link, "time": "0"}
    )
    if link in found:
        message = _clean(failure_words(found[link]))
        failure = ElementTree.SubElement(case, "failure", {"type": "different", "message": message})
        failure.text = _clean(f"{message}\n{explanation(answer)}")
    elif not any(gate.covers(link) for gate in gates):
        ElementTree.SubElement(case, "skipped", {"message": "no --fail-on speaks of this link"})
    elif answer.verdict == "incomparable":
        error = ElementTree.SubElement(
            case, "error", {"type": "incomparable", "message": _clean(answer.reason)}
        )
        error.text = _clean(explanation(answer))
    return case


def _clean(text: str) -> str:
    """Without the control characters that XML 1.0 cannot hold: names and texts come from the job."""
    return "".join(
        c
        for c in text
        if c in "\t\n" or (c >= " " and not "\ud800" <= c <= "\udfff" and c < "\ufffe")
    )
