"""Children, second jobs and restarts that share one directory: nothing is mixed or overwritten."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradtrace_analyzer.failures.endings import endings
from gradtrace_analyzer.runs.opening import open_run
from gradtrace_analyzer.sql.views import connect

TRAIN = """
import os, sys, time, torch
torch.set_num_threads(1)
def train(steps=1):
    net = torch.nn.Linear(3, 3)
    for _ in range(steps):
        net(torch.ones(2, 3)).sum().backward()
"""


def started(directory: Path, source: str, *arguments: object) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GRADTRACE_")}
    script = directory.parent / f"job-{time.monotonic_ns()}.py"
    script.write_text(TRAIN + source)
    return subprocess.Popen(
        [sys.executable, str(script), *map(str, arguments)],
        env=environment
        | {"GRADTRACE_DIR": str(directory), "OMP_NUM_THREADS": "1", "GRADTRACE_QUIET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, said = process.communicate(timeout=100)
    assert process.returncode == 0, said
    return out, said


def passes(directory: Path, attempt: int) -> list[tuple[int, int]]:
    """(rank, backward passes) of an attempt."""
    with contextlib.closing(connect([open_run(directory, attempt)])) as connection:
        query = "SELECT rank, count(*) FROM backward_passes GROUP BY rank ORDER BY rank"
        return connection.execute(query).fetchall()


FORKS = """
class Forks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.view_as(x)
    @staticmethod
    def backward(ctx, g):
        global child
        child = os.fork()
        return g
train(3)
net = torch.nn.Linear(3, 3)
Forks.apply(net(torch.ones(2, 3))).sum().backward()    # the child comes out of it too
train(5)
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
train(2)
"""


def test_child_forked_in_the_middle_of_a_pass_writes_nothing_and_says_so_once(
    tmp_path: Path,
) -> None:
    _, said = ended(started(tmp_path / "run", FORKS))
    assert said.count("\n") == 1 and "it is not recorded itself" in said
    assert passes(tmp_path / "run", 0) == [(0, 11)]
    [rank] = endings(open_run(tmp_path / "run")).ranks
    assert rank.state == "ended" and not rank.dropped


HELPERS = """
import subprocess
import torch.multiprocessing as mp
def helper(rank):
    train()
def as_rank(rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_PORT="1")
    train(4)
if __name__ == "__main__":
    train(2)
    mp.spawn(helper, nprocs=1)
    second = "import torch; torch.ones(1, requires_grad=True).sum().backward()"
    subprocess.run([sys.executable, "-c", second], check=True)
    mp.spawn(as_rank, nprocs=2)
    train(1)
"""


def test_helpers_of_a_recorded_job_are_not_recorded_and_ranks_that_it_spawns_are_an_attempt(
    tmp_path: Path,
) -> None:
    _, said = ended(started(tmp_path / "run", HELPERS))
    lines = said.splitlines()
    assert sum("nothing of this process is recorded" in line for line in lines) == 2, said
    assert (
        sum("as attempt 0; this one is attempt 1" in line for line in lines) == 1 == len(lines) - 2
    )
    assert passes(tmp_path / "run", 0) == [(0, 3)]
    assert passes(tmp_path / "run", 1) == [(0, 4), (1, 4)]


WAITS = """
train(int(sys.argv[1]))
print("recording", flush=True)
sys.stdin.readline() if False else time.sleep(float(sys.argv[2]))
train(1)
"""


def test_two_jobs_in_one_directory_at_once_are_two_attempts_and_the_second_says_so(
    tmp_path: Path,
) -> None:
    first = started(tmp_path / "run", WAITS, 2, 8)
    assert first.stdout is not None and first.stdout.readline() == "recording\n"
    _, said = ended(started(tmp_path / "run", WAITS, 5, 0))
    assert said == (
        f"gradtrace: process {first.pid} is recording rank 0 into {tmp_path / 'run'} too, as attempt 0; this one is "
        "attempt 1, nothing of the two is mixed\n"
    )
    assert ended(first)[1] == ""
    assert passes(tmp_path / "run", 0) == [(0, 3)] and passes(tmp_path / "run", 1) == [(0, 6)]


@pytest.mark.slow
def test_elastic_restarts_are_attempts_of_which_one_is_chosen(tmp_path: Path) -> None:
    dying = Path(__file__).resolve().parents[1] / "support" / "jobs" / "dying.py"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
    ]
    done = subprocess.run(
        [
            *command,
            "--nproc-per-node",
            "2",
            "--max-restarts",
            "1",
            str(dying),
            "raise",
            "node",
            "2",
            "1",
        ],
        # Without a process group: gloo now and then meets the addresses of the attempt before.
        env=os.environ
        | {"GRADTRACE_DIR": str(tmp_path / "run"), "OMP_NUM_THREADS": "1", "ALONE": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    newest, first = open_run(tmp_path / "run"), open_run(tmp_path / "run", 0)
    assert newest.attempts == (0, 1) == (first.attempt, newest.attempt)
    assert [ending.state for ending in endings(newest).ranks] == ["ended", "ended"]
    found = endings(first)
    assert found.verdict == "found" and found.ranks[1].last_failure is not None
    assert found.ranks[1].last_failure.row["exception_text"] == "no luck"
