"""Ctrl-C, a reader that stops, a disk that is full: a command ends in one line and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.synthetic_runs.large import Sizes, build_large

CLI = [sys.executable, "-m", "gradtrace_analyzer"]
ENDLESS = (
    "SELECT count(*) FROM range(10000000) a, range(10000000) b WHERE a.range % 7 = b.range % 11"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs that differ in their last bits everywhere: seconds of work for every command."""
    folder = tmp_path_factory.mktemp("large")
    sizes = Sizes(ranks=3, steps=60, nodes=1500)
    a = build_large(folder / "a", sizes)
    return a, build_large(folder / "b", sizes, "noise", like=a)


@pytest.fixture(autouse=True)
def heeds_interrupts() -> Iterator[None]:
    """A process that a shell has put into its background ignores SIGINT, and so would all that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(
    arguments: list[object], cwd: Path, has_begun: Callable[[], bool]
) -> subprocess.CompletedProcess[str]:
    """The command, sent SIGINT when it has begun."""
    spill = cwd / "spill"
    spill.mkdir()
    with subprocess.Popen(
        [*CLI, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "TMPDIR": str(spill)},
    ) as process:
        until = time.monotonic() + 60
        while not has_begun() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert list(spill.iterdir()) == []
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def writes(folder: Path) -> Callable[[], bool]:
    """Whether the command writes its file already."""
    return lambda: any(".writing" in path.name for path in folder.iterdir())


def after(seconds: float) -> Callable[[], bool]:
    """Whether so long has passed since the first look: a query shows nothing of itself."""
    began: list[float] = []

    def look() -> bool:
        began.append(time.monotonic())
        return began[-1] - began[0] > seconds

    return look


def test_query_that_is_interrupted_ends_in_one_line(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    done = interrupted(["sql", ENDLESS, runs[0]], tmp_path, after(2.0))
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "analyzer: interrupted")


def test_export_that_is_interrupted_leaves_no_file(runs: tuple[Path, Path], tmp_path: Path) -> None:
    for option in ("--duckdb", "--perfetto"):
        folder = tmp_path / option[2:]
        folder.mkdir()
        done = interrupted(["export", runs[0], option, "out"], folder, writes(folder))
        assert (done.returncode, done.stderr.strip()) == (130, "analyzer: interrupted")
        assert [path.name for path in folder.iterdir()] == ["spill"]


def test_answer_that_is_interrupted_leaves_no_file(runs: tuple[Path, Path], tmp_path: Path) -> None:
    query = "SELECT a.step, b.module_fqn FROM node_events a, node_events b"
    for name in ("out.parquet", "out.csv"):
        folder = tmp_path / name[4:]
        folder.mkdir()
        done = interrupted(["sql", query, runs[0], "-o", name], folder, writes(folder))
        assert (done.returncode, done.stderr.strip()) == (130, "analyzer: interrupted")
        assert [path.name for path in folder.iterdir()] == ["spill"]


def test_diff_that_is_interrupted_ends_in_one_line(runs: tuple[Path, Path], tmp_path: Path) -> None:
    began = after(0.9)
    done = interrupted(["diff", *runs], tmp_path, began)
    assert done.returncode in (130, 0, 1)  # on a quick machine it was done before
    if done.returncode == 130:
        assert (done.stdout, done.stderr.strip()) == ("", "analyzer: interrupted")


def test_file_that_cannot_be_written_is_a_sentence(runs: tuple[Path, Path], tmp_path: Path) -> None:
    for arguments in (
        ["export", runs[0], "--perfetto", tmp_path / "no" / "out"],
        ["export", runs[0], "--duckdb", tmp_path / "no" / "out"],
        ["sql", "SELECT 1", runs[0], "-o", tmp_path / "no" / "out.csv"],
    ):
        done = subprocess.run(
            [*CLI, *map(str, arguments)], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert "no/out" in done.stderr and "Traceback" not in done.stderr
