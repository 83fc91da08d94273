"""Forks of a recorded job: Python warns of them no more than bare, and every row is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.recordings.in_process import rows

# 12 steps with a fork after each, then the workers of a DataLoader.
JOB = """
import os, sys, threading, torch
from torch.utils.data import DataLoader
if "threads" in sys.argv:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
torch.manual_seed(0)
net = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
def step(n):
    optimizer.zero_grad()
    net(torch.full((4, 8), float(n))).sum().backward()
    optimizer.step()
for n in range(4):
    step(n)
    child = os.fork()
    if child == 0:
        os._exit(7)
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
for batch in DataLoader(list(range(4)), num_workers=2, multiprocessing_context="fork"):
    step(int(batch))
print(net.weight.sum().item())
"""


def said(directory: Path | None, *arguments: str, observer: str = "python") -> tuple[str, str]:
    """What the job printed on its two streams, every warning among it."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GRADTRACE_")}
    environment |= {"OMP_NUM_THREADS": "1", "GRADTRACE_QUIET": "1"}
    if directory is not None:
        environment |= {"GRADTRACE_DIR": str(directory), "GRADTRACE_OBSERVER": observer}
        environment["GRADTRACE_NATIVE_CACHE"] = os.environ["GRADTRACE_NATIVE_CACHE"]
    done = subprocess.run(
        [sys.executable, "-W", "always::DeprecationWarning", "-c", JOB, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("observer", ["python", "native"])
def test_a_fork_warns_of_no_threads_of_ours(
    tmp_path: Path, observer: str, request: pytest.FixtureRequest
) -> None:
    if observer == "native":
        request.getfixturevalue("native_library")
    run = tmp_path / "run"
    bare, recorded = said(None), said(run, observer=observer)
    assert recorded[0] == bare[0]
    assert bare[1].count("multi-threaded") == recorded[1].count("multi-threaded") == 0, recorded[1]
    steps = rows(run, "SELECT count(*), count(DISTINCT step) FROM backward_passes")
    assert steps == [(8, 8)]


def test_a_fork_beside_threads_of_the_job_warns_as_bare(tmp_path: Path) -> None:
    bare, recorded = said(None, "threads"), said(tmp_path / "run", "threads")
    assert recorded[0] == bare[0]
    assert recorded[1].count("multi-threaded") == bare[1].count("multi-threaded")
    assert ("multi-threaded" in bare[1]) == (sys.version_info >= (3, 12))
