"""Reruns are told at the end of a session, also of one in several processes, and too many fail it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
CONFTEST = """
from support.launching.counted_reruns import Reruns

def pytest_configure(config):
    config.pluginmanager.register(Reruns())
"""
TEST = """
from support.launching.counted_reruns import reruns_of

def test_{name}(request):
    reruns_of(request.config).count("job {name}", because="it aborted")
"""


def session(folder: Path, tests: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A session of pytest with one file for each letter: its test runs a job again."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    for name in tests:
        (folder / f"test_{name}.py").write_text(TEST.format(name=name))
    (folder / "test_sound.py").write_text("def test_sound(): pass\n")
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, "."],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_session_without_reruns_says_nothing_of_them(tmp_path: Path) -> None:
    done = session(tmp_path, "")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run again" not in done.stdout


@pytest.mark.parametrize("options", [(), ("-n", "2", "--dist", "loadfile")])
def test_reruns_are_told_at_the_end(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = session(tmp_path, "ab", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "jobs that were run again" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if "made again because" in line]
    assert line.startswith(
        "2 runs of jobs were not counted and made again because of 'it aborted': job "
    )
    assert sorted(line.split("': ")[1].split(", ")) == ["job a", "job b"]


def test_one_rerun_too_many_fails_the_test_that_asks_for_it(tmp_path: Path) -> None:
    done = session(tmp_path, "abc")
    assert done.returncode == 1
    assert "1 failed, 3 passed" in done.stdout
    assert "TooManyReruns: 3 reruns in one session, of which 2 are borne" in done.stdout


def test_too_many_reruns_in_all_workers_together_fail_the_session(tmp_path: Path) -> None:
    """Each of the two runs all tests, and bears its own two reruns."""
    done = session(tmp_path, "ab", "--dist", "each", "-n", "2")
    assert done.returncode == 1, done.stdout
    assert "6 passed" in done.stdout and "failed" not in done.stdout.splitlines()[-1]
    assert "4 reruns in one session, of which 2 are borne: the session fails" in done.stdout
