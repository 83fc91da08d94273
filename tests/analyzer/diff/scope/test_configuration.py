"""What differs between the configurations of two runs is told first; what cannot be compared, in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradtrace_analyzer.diff.compare import compare
from gradtrace_analyzer.diff.scope.configuration import apart_in_configuration, changes_numbers
from gradtrace_analyzer.errors import GradtraceError
from gradtrace_analyzer.reports.diff.json_object import as_object
from gradtrace_analyzer.reports.diff.text import lines
from gradtrace_analyzer.runs.opening import open_run
from gradtrace_schemas import layout
from support.synthetic_runs.builder import build_run, summary_columns


def run(path: Path, steps: range = range(2), ranks: int = 1, **facts: Any) -> Path:
    rows = [
        {"rank": r, "step": s, "root": 0, "parameter_fqn": "w", "point": "before"} | summary_columns([1.0])
        for r in range(ranks)
        for s in steps
    ]  # fmt: skip
    return build_run(path, {"parameters": rows}, world_size=ranks, rank_facts=facts)


def apart(a: Path, b: Path) -> list[tuple[Any, ...]]:
    entries = apart_in_configuration({"baseline": open_run(a), "candidate": open_run(b)})
    return [tuple(entry.values()) for entry in entries]


def test_switches_versions_commit_and_command_are_told_apart(tmp_path: Path) -> None:
    old = {"torch": "2.12.0", "python": "3.11.7", "gradtrace": "1"}
    a = run(
        tmp_path / "a",
        versions=old,
        environment={"num_threads": 1, "NCCL_ALGO": "Ring", "cublas_allow_tf32": False},
        git_commit="a" * 40,
        command=["python", "train.py", "--lr", "0.1", "--seed", "1"],
    )
    b = run(
        tmp_path / "b",
        versions=old | {"torch": "2.13.0", "gradtrace": "2"},
        environment={"num_threads": 1, "cublas_allow_tf32": True},
        git_commit="b" * 40,
        command=["python", "train.py", "--lr", "0.2", "--seed", "1", "--fast"],
    )
    assert apart(a, b) == [
        ("torch", "2.12.0", "2.13.0", True),
        ("NCCL_ALGO", "Ring", None, True),
        ("cublas_allow_tf32", False, True, True),
        ("git_commit", "a" * 40, "b" * 40, False),
        ("command", "--lr 0.1", "--lr 0.2 --fast", False),
    ]


def test_rank_that_is_configured_otherwise_is_named(tmp_path: Path) -> None:
    a = run(tmp_path / "a", ranks=3, environment={"num_threads": 1})
    b = run(tmp_path / "b", ranks=3, environment={"num_threads": 1})
    path = layout.rank_file(b, 2, 0)
    path.write_text(path.read_text().replace('"num_threads": 1', '"num_threads": 4'))
    assert apart(a, b) == [("num_threads", 1, "1 (ranks 0-1), 4 (rank 2)", True)]
    assert apart(a, a) == []


def test_other_command_alone_takes_no_witness_away(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a"), run(tmp_path / "b", command=["train.py", "--fault"])
    found = apart_in_configuration({"baseline": open_run(a), "candidate": open_run(b)})
    assert [entry["name"] for entry in found] == ["command"] and not changes_numbers(found)


def test_what_an_older_recorder_did_not_write_down_is_no_difference(tmp_path: Path) -> None:
    a = run(tmp_path / "a")
    environment = {"num_threads": 1, "flash_sdp": True}
    b = run(tmp_path / "b", git_commit="b" * 40, environment=environment)
    for path in (a / layout.RUN_FILE, layout.attempt_file(a, 0)):
        about = json.loads(path.read_text())
        path.write_text(json.dumps(about | {"schema_version": 3}))
    assert apart(a, b) == []


def test_configuration_stands_first_in_text_and_json(tmp_path: Path) -> None:
    a = run(tmp_path / "a", environment={"num_threads": 1})
    b = run(tmp_path / "b", environment={"num_threads": 8}, git_commit="b" * 40)
    answer = compare(open_run(a), open_run(b))
    assert list(as_object(answer))[:2] == ["verdict", "configuration"]
    said = list(lines(answer, ("a", "b")))
    assert said[2:7] == [
        "The configurations differ:",
        "             baseline  candidate",
        "-----------  --------  ------------",
        "num_threads  1         8",
        "git_commit   -         bbbbbbbbbbbb",
    ]
    assert said[7] == "(Of a commit, changes that are not committed are not seen.)"


def test_what_cannot_be_compared_is_one_sentence(tmp_path: Path) -> None:
    whole = open_run(run(tmp_path / "whole"))
    late = compare(whole, open_run(run(tmp_path / "late", range(4, 6))))
    assert late.verdict == "incomparable"
    assert late.reason.startswith("no step was recorded on both sides: steps 0-1 against steps 4-5")
    begun = compare(whole, open_run(build_run(tmp_path / "begun")))
    assert begun.verdict == "incomparable"
    assert begun.reason.startswith("the candidate holds no step yet")
    (tmp_path / "empty").mkdir()
    newer = run(tmp_path / "newer")
    (newer / layout.RUN_FILE).write_text('{"schema_version": 99}')
    for path, said in (
        (tmp_path / "empty", "is empty; nothing was recorded there yet"),
        (newer, "was written with schema 99, this gradtrace reads up to"),
        (tmp_path / "nowhere", "does not exist"),
    ):
        with pytest.raises(GradtraceError, match=said):
            open_run(path)
