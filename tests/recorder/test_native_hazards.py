"""What the C++ of the observer could do to a process, and does not: docs/internals/native.md, "Hazards".

Each is tried in a process of its own, which would die of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("native_library")


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A job in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "GRADTRACE_DIR": "", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# The thread comes for the GIL while Python goes down: CPython ends it there, which C++ must survive.
_SUMMARISES = """
import threading, time, torch
from gradtrace_recorder.observers.native.build import library
summary, tensor, began = library().summary, torch.ones(1_000_000), threading.Event()
def work():
    while True:
        summary(tensor, True)  # so many elements that the GIL is let go of
        began.set()
threading.Thread(target=work, daemon=True).start()
began.wait()
"""
_ASKS_PYTHON = """
import threading, time, torch
from gradtrace_recorder.summaries.summariser import Summariser
from gradtrace_recorder.summaries.values import NOTHING
began = threading.Event()
def slow(self, gradient):
    began.set()
    for _ in range(300):
        time.sleep(0.01)
    return NOTHING
Summariser.of_gradient = slow
class Model(torch.nn.Module):
    def forward(self, x):
        return (x * 1j).abs().sum()
x = torch.ones(3, dtype=torch.complex64, requires_grad=True)
def work():
    Model()(x).backward()  # C++ reads no complex gradients
threading.Thread(target=work, daemon=True).start()
assert began.wait(30)
"""
_WAITS_FOR_THE_DRAIN = """
import threading
from gradtrace_recorder.observers.native.build import library
event, began = library().Journal().half_is_full, threading.Event()
def work():
    began.set()
    while True:
        event.wait(0.001)
threading.Thread(target=work, daemon=True).start()
began.wait()
"""


@pytest.mark.parametrize("script", [_SUMMARISES, _ASKS_PYTHON, _WAITS_FOR_THE_DRAIN])
def test_a_daemon_thread_that_comes_for_the_gil_at_the_end_takes_nothing_along(
    tmp_path: Path, script: str
) -> None:
    done = run(script, GRADTRACE_DIR=str(tmp_path / "run"), GRADTRACE_OBSERVER="native")
    assert (done.returncode, "terminate" in done.stderr, "FATAL" in done.stderr) == (
        0,
        False,
        False,
    ), done.stderr
