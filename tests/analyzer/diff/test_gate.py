"""`--fail-on` and `--junit`: which differences fail, what is said of them, and that the XML is what CI systems read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from gradtrace_analyzer.diff.gate import Gate, gate_of
from gradtrace_analyzer.diff.links import LINKS
from gradtrace_analyzer.errors import BadGate
from support.answers.commands import asked, told
from support.synthetic_runs.builder import build_run, summary_columns

Rows = Mapping[str, list[dict[str, Any]]]


def rows(gradient: list[float], parameter: list[float] | None = None) -> Rows:
    """Two steps of two ranks; the gradient is rank 1's in step 1."""
    places = [(rank, step) for rank in (0, 1) for step in (0, 1)]

    def row(rank: int, step: int, point: str, values: list[float]) -> dict[str, Any]:
        names = {"root": 0, "parameter_fqn": "head.weight", "point": point}
        return {"rank": rank, "step": step, **names, **summary_columns(values)}

    return {
        "parameters": [row(r, s, "before", parameter or [1.0, 2.0]) for r, s in places],
        "gradients": [
            row(r, s, "final", gradient if (r, s) == (1, 1) else [1.0, 1.0])
            | {"backward_index": 0, "microbatch": 0}
            for r, s in places
        ],
    }


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    build_run(tmp_path / "a", rows([1.0, 1.0]), world_size=2)
    build_run(tmp_path / "b", rows([1.0, 1.5]), world_size=2)
    build_run(tmp_path / "nan", rows([1.0, float("nan")]), world_size=2)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "gate"),
    [
        ("final>=1e-3", Gate("clip", 1e-3)),
        (" any >= 0 ", Gate("any", 0.0)),
        ("structure>=0", Gate("structure", 0.0)),
    ],
)
def test_gate_is_read(text: str, gate: Gate) -> None:
    assert gate_of(text) == gate


@pytest.mark.parametrize("text", ["clip", "clip>1", "nowhere>=1", "clip>=much", "clip>=-1", "clip>=nan"])  # fmt: skip
def test_gate_that_cannot_be_read_is_a_sentence(text: str) -> None:
    with pytest.raises(BadGate):
        gate_of(text)


@pytest.mark.parametrize(
    ("gates", "code"),
    [
        (["clip>=0.1"], 1),
        (["clip>=0.9"], 0),
        (["any>=0"], 1),
        (["parameters>=0"], 0),
        (["parameters>=0", "final>=0.1"], 1),
    ],
)
def test_only_a_difference_that_reaches_the_gate_fails(
    gates: list[str], code: int, runs: Path
) -> None:
    options = [word for gate in gates for word in ("--fail-on", gate)]
    status, answer = asked("diff", "--format", "json", *options, runs / "a", runs / "b")
    assert (status, bool(answer["failing"])) == (code, bool(code))
    assert answer["verdict"] == "different"
    if code:
        assert answer["failing"]["clip"].endswith("(step 1, rank 1, head.weight)")


def test_value_that_is_no_number_fails_at_any_threshold(runs: Path) -> None:
    status, said = told("diff", "--fail-on", "clip>=1e9", runs / "a", runs / "nan")
    assert status == 1
    assert "Fails: clip: different, fails from 1e+09 (step 1, rank 1, head.weight)" in said


def test_equal_runs_pass(runs: Path) -> None:
    assert told("diff", "--fail-on", "any>=0", runs / "a", runs / "a")[0] == 0


def junit(path: Path) -> ElementTree.Element:
    """The document, held against what the readers of CI systems require of JUnit's XML."""
    root = ElementTree.parse(path).getroot()
    assert root.tag == "testsuites" and [child.tag for child in root] == ["testsuite"]
    suite = root[0]
    assert {"name", "tests", "failures", "errors", "skipped", "time"} <= set(suite.attrib)
    cases = suite.findall("testcase")
    assert {child.tag for child in suite} <= {"testcase", "system-out", "system-err", "properties"}
    for case in cases:
        assert case.attrib["name"] and case.attrib["classname"]
        float(case.attrib["time"])
        assert [child.tag for child in case] in ([], ["failure"], ["error"], ["skipped"])
        for child in case:
            assert child.attrib["message"]
    for tag, name in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        found = sum(case.find(tag) is not None for case in cases)
        assert int(suite.attrib[name]) == int(root.attrib[name]) == found
    assert int(suite.attrib["tests"]) == int(root.attrib["tests"]) == len(cases)
    return root


def test_junit_has_a_case_for_each_link_and_says_what_failed(runs: Path) -> None:
    path = runs / "diff.xml"
    assert told("diff", "--junit", path, runs / "a", runs / "b")[0] == 1
    cases = {case.attrib["name"]: case for case in junit(path).iter("testcase")}
    assert list(cases) == list(LINKS)
    failed = {name for name, case in cases.items() if case.find("failure") is not None}
    assert failed == {"clip"}
    failure = cases["clip"].find("failure")
    assert failure is not None
    assert "step 1, rank 1, head.weight" in failure.attrib["message"]
    assert "Step 1, rank 1: head.weight (clip) differs by" in (failure.text or "")


def test_junit_of_gates_skips_the_links_that_none_speaks_of(runs: Path) -> None:
    path = runs / "diff.xml"
    assert told("diff", "--fail-on", "loss>=0", "--junit", path, runs / "a", runs / "b")[0] == 0
    skipped = {c.attrib["name"] for c in junit(path).iter("testcase") if len(c)}
    assert skipped == set(LINKS) - {"loss"}


def test_junit_holds_names_that_xml_cannot(runs: Path) -> None:
    odd = build_run(runs / "odd\x07<&>", rows([1.0, 1.5]), world_size=2)
    path = runs / "diff.xml"
    told("diff", "--junit", path, runs / "a", odd)
    assert "odd<&>" in junit(path)[0].attrib["name"]
