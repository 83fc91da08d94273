"""Runs that crashed are never called identical, or clean, without saying that they crashed."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradtrace_analyzer.check.check import check
from gradtrace_analyzer.diff.answer import Answer
from gradtrace_analyzer.diff.compare import compare
from gradtrace_analyzer.reports import check as check_report
from gradtrace_analyzer.reports.diff.json_object import as_object
from gradtrace_analyzer.reports.diff.text import lines
from gradtrace_analyzer.runs.opening import open_run
from support.launching.launcher import run_job

JOB = """
import os, signal, sys
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
how, at = sys.argv[1], int(sys.argv[2])
for step in range(3):
    loss = net(torch.randn(3, 4)).square().mean()
    if step == at and how == "raise":
        raise ValueError("boom")
    if step == at and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if how == "late":
    raise RuntimeError("after the last step")
"""

JOBS = {
    "whole": ("end", 0),
    "first": ("raise", 0),
    "first again": ("raise", 0),
    "second": ("raise", 1),
    "killed": ("kill", 1),
    "killed again": ("kill", 1),
    "late": ("late", 0),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recordings, by name."""
    place = tmp_path_factory.mktemp("crashed")
    script = place / "job.py"
    script.write_text(JOB)
    for name, (how, at) in JOBS.items():
        done = run_job(script, how, at, recorded=place / name, forked=True)
        assert (done.returncode == 0) == (how == "end"), name
    return place


def diffed(runs: Path, a: str, b: str) -> tuple[Answer, str, str]:
    """The answer, its first line and its explanation."""
    answer = compare(open_run(runs / a), open_run(runs / b))
    return answer, next(lines(answer, (a, b))), as_object(answer)["explanation"]


def test_two_runs_that_crashed_alike_are_identical_until_then(runs: Path) -> None:
    answer, first, said = diffed(runs, "first", "first again")
    assert answer.verdict == "identical"
    assert first.startswith("identical until they crashed: ")
    assert said.startswith(
        "Both crashed: rank 0 was ended by ValueError: boom, in step 0. Identical, "
    )
    crashes = as_object(answer)["cover"]["crashes"]
    told = [{"rank": 0, "step": 0, "ended": "was ended by ValueError: boom"}]
    assert crashes == {"baseline": told, "candidate": told}


def test_two_runs_that_were_killed_alike_are_identical_until_then(runs: Path) -> None:
    answer, first, said = diffed(runs, "killed", "killed again")
    assert answer.verdict == "identical"
    assert first.startswith("identical until they were cut off: ")
    assert said.startswith("Both were cut off: rank 0 died in step 1"), said


def test_run_that_crashed_after_its_last_step_cannot_be_called_the_same(runs: Path) -> None:
    for a, b, side in (("whole", "late", "candidate"), ("late", "whole", "baseline")):
        answer, first, said = diffed(runs, a, b)
        assert answer.verdict == "incomparable" and first.startswith("incomparable: ")
        assert f"the {side} crashed (rank 0 was ended by RuntimeError: after the last step" in said
        assert "What can be compared is identical (rank 0, steps 0-2)." in said


def test_crash_is_told_beside_what_it_left_undone(runs: Path) -> None:
    for a, b, side in (("whole", "second", "candidate"), ("second", "whole", "baseline")):
        answer, _, said = diffed(runs, a, b)
        assert answer.verdict == "different"
        assert f"The {side} crashed: rank 0 was ended by ValueError: boom, in step 1." in said


def test_clean_is_no_headline_over_a_run_that_did_not_end(runs: Path) -> None:
    said = {
        name: next(check_report.lines(check(open_run(runs / name)), name))
        for name in ("whole", "second", "killed")
    }
    assert said == {
        "whole": "clean: whole",
        "second": "clean until it crashed: second",
        "killed": "clean until it was cut off: killed",
    }
    explained = check_report.explanation(check(open_run(runs / "second")))
    assert explained.startswith(
        "The run crashed: rank 0 was ended by ValueError: boom, in step 1. Until then: "
    )
