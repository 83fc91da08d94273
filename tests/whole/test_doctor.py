"""`analyzer doctor` with its trial: a real job, started as a user's is, bare and recorded in turn."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from support.answers.commands import asked

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
]  # four jobs and more, each of which imports torch


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory to ask in, and nothing set but what a test sets."""
    for name in [name for name in os.environ if name.startswith("GRADTRACE_")]:
        if name != "GRADTRACE_NATIVE_CACHE":
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def doctor() -> tuple[int, dict[str, Any], dict[str, str]]:
    """Exit status, answer, and what was found by name, mark first."""
    code, answer = asked("doctor", "--format", "json")
    return code, answer, {f["name"]: f"{f['mark']}: {f['said']}" for f in answer["findings"]}


def test_trial_shows_that_a_job_is_recorded_and_at_what_cost(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADTRACE_DIR", "runs/a")
    monkeypatch.setenv("GRADTRACE_SUMMARY", "norms")
    monkeypatch.setenv(
        "GRADTRACE_STEPS", "1000:"
    )  # the job's own choice: the trial is recorded even so
    monkeypatch.setenv("GRADTRACE_RANKS", "1")
    code, answer, found = doctor()
    assert (code, answer["verdict"]) == (0, "well"), found
    assert answer["explanation"] == "A job that is started here is recorded."
    trial = answer["trial"]
    assert trial["observer"] == "python" and trial["steps"] >= 8
    assert 0.9 < trial["ratio"] == trial["recorded_ns"] / trial["bare_ns"] < 30
    assert found["trial"].startswith(
        "ok: a small job was recorded, by the Python observer: a step of a Transformer"
    )
    assert found["directory"].startswith(f"ok: {place / 'runs' / 'a'} can be made, on ")
    assert found["self-test"].startswith("ok: all ")
    assert not list(place.iterdir()), "it leaves nothing behind"


def test_trial_that_is_not_recorded_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    code, answer, found = doctor()
    assert (code, answer["verdict"], answer["trial"]) == (1, "wrong", None)
    assert (
        found["trial"] == "wrong: a small job was run with GRADTRACE_DIR, and nothing was recorded"
    )
    assert found["start"].startswith("wrong: TORCH_DEVICE_BACKEND_AUTOLOAD=0")
