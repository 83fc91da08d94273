"""Every command that README and site show is run, in the order in which a reader meets it.

A page shows commands in blocks of `sh`. Jobs are recorded by the page's own lines, with a small `train.py` and
`train_new.py`; what a page takes for granted (the runs `a`, `b` and so on) is recorded before. What cannot run stands
in NOT_RUN with its reason.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradtrace_analyzer.cli import analyzer
from support.launching.launcher import run_job

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
LANGUAGES = {"sh", "text", "python"}
JOBS = Path(__file__).resolve().parent / "jobs"
PIPELINE = ROOT / "tests" / "support" / "jobs" / "slow_stages.py"

NOT_RUN = {
    "pip install": "it changes the environment",
    "python -m gradtrace_recorder build": "it compiles for half a minute; tests/recorder/test_native_build.py does it",
    "mkdocs build": "scripts/check does it",
    "scripts/demo": "it makes an environment",
    "scripts/test": "it makes an environment, and runs this very test",
    "scripts/check": "it makes an environment, and runs this very test",
    "scripts/reference": "it writes into the checkout; scripts/check runs it with --check",
    "scripts/regold": "it writes into the checkout",
    "scripts/pictures": "it writes into the checkout",
    "scripts/kills": "it takes minutes",
    "scripts/fuzz": "it takes a minute",
    "scripts/bench": "it takes minutes, on a machine that has nothing else to do",
    "scripts/accuracy": "it takes minutes, and writes into the checkout",
    "scripts/rejudge": "it takes minutes; scripts/check --all does it",
    "scripts/sanitize": "it takes minutes, and needs a compiler's sanitizers",
    "scripts/gpu-check": "it needs a device",
    "scripts/torch-tests": "it takes PyTorch's source tree",
    "scripts/matrix": "it fetches gigabytes; scripts/check --all runs its row of this environment",
    "python -m pytest tests/whole": "it takes minutes, and is run in a checkout",
    "analyzer trigger": "it asks a job that runs; tests/whole/test_flight.py does it",
}


def blocks(path: Path) -> list[tuple[str, str]]:
    """(language, text) of each block of a page."""
    found = re.findall(r"^( *)```(\w*)\n(.*?)^\1```$", path.read_text(), re.MULTILINE | re.DOTALL)
    return [(language, text) for _, language, text in found]


def commands(path: Path) -> list[str]:
    """The lines of a page that a reader would type, without comments; continued lines as one."""
    lines = []
    for language, text in blocks(path):
        if language == "sh":
            for line in text.replace("\\\n", " ").splitlines():
                if shlex.split(line, comments=True):
                    lines.append(line.strip())
    return lines


def why_not_run(command: str) -> str | None:
    """The entry of NOT_RUN that the command falls under."""
    return next((start for start in NOT_RUN if re.match(rf"{re.escape(start)}\b", command)), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands are run: jobs to record, and the runs that pages take for granted."""
    place = tmp_path_factory.mktemp("commands")
    for script in JOBS.glob("*.py"):
        (place / script.name).write_text(script.read_text())
    for run, job in (
        ("a", "train.py"), ("a2", "train.py"), ("b", "train_new.py"), ("renamed", "train_renamed.py"),
    ):  # fmt: skip
        run_line(place, f"GRADTRACE_DIR=runs/{run} torchrun --nproc-per-node 2 {job}")
    run_job(PIPELINE, place / "runs", 4, "even", ranks=4, timeout=200)
    (place / "runs" / "even").rename(place / "runs" / "pipe")
    return place


def run_line(place: Path, line: str) -> None:
    """Run a line of a shell. A command that cannot tell (status 2), or any other error, fails."""
    words = shlex.split(line, comments=True)
    variables = dict(word.split("=", 1) for word in itertools.takewhile(is_assignment, words))
    if words[len(variables)] == "analyzer":
        with pytest.MonkeyPatch.context() as environment:
            for name, value in variables.items():
                environment.setenv(name, value)
            run_analyzer(place, words[len(variables) + 1 :])
        return
    recorded = re.search(r"GRADTRACE_DIR=(\S+)", line)
    if recorded is not None and (place / recorded[1]).exists():
        return  # by another page, or before: a second time would be another attempt
    shims = place / "bin"
    if not shims.exists():
        shims.mkdir()
        for name, module in (("python", ""), ("torchrun", "-m torch.distributed.run --standalone")):
            (shims / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
            (shims / name).chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=place,
        env={**os.environ, "PATH": f"{shims}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    if recorded is not None:
        assert (place / recorded[1] / "run.json").exists(), f"{line} recorded nothing"


def is_assignment(word: str) -> bool:
    return re.match(r"[A-Z_]+=", word) is not None


def run_analyzer(place: Path, arguments: list[str]) -> None:
    """The command in this process: a new one costs most of its time."""
    out, err = io.StringIO(), io.StringIO()
    with (
        inside(place),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as left,
    ):
        analyzer(arguments)
    assert left.value.code in (0, 1), f"analyzer {arguments}: {err.getvalue()}{out.getvalue()}"
    wrote = any(
        word in ("--perfetto", "--duckdb", "--parquet", "-o", "--output") for word in arguments
    )
    assert out.getvalue() or wrote, f"analyzer {arguments} says nothing"


@contextlib.contextmanager
def inside(place: Path) -> Iterator[None]:
    """The process's folder is another meanwhile."""
    before = Path.cwd()
    os.chdir(place)
    try:
        yield
    finally:
        os.chdir(before)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.timeout(600)  # some fourteen jobs of two ranks, on a machine that may be busy
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name_of)
def test_commands_of_a_page_run(page: Path, folder: Path) -> None:
    for command in commands(page):
        if why_not_run(command) is None:
            run_line(folder, command)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_say_what_they_are(page: Path) -> None:
    assert [language for language, _ in blocks(page) if language not in LANGUAGES] == []
    outside = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    typed = r"^ {4}(?:\$ |analyzer |scripts/|python |pip |torchrun |GRADTRACE_\w+=)"
    assert re.findall(typed, outside, re.MULTILINE) == [], "commands stand in blocks of `sh`"


def test_every_exception_is_used_and_has_a_reason() -> None:
    used = {why_not_run(command) for page in PAGES for command in commands(page)}
    assert sorted(set(NOT_RUN) - used) == []
    assert all(NOT_RUN.values())


def test_pages_show_commands_at_all() -> None:
    shown = [command for page in PAGES for command in commands(page)]
    assert sum(command.startswith("analyzer ") for command in shown) > 30
    assert sum("GRADTRACE_DIR=" in command for command in shown) > 5
