"""Passes on several threads over the same parameters: none loses its own hooks to the end of another's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.environment import native_observer
from support.recordings.in_process import recording, rows

_THREADS, _TIMES = 4, 150


@pytest.fixture
def impatient() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(2) for _ in range(8))

    def forward(self, x: float) -> Any:
        return sum((w * x).sum() for w in self.weights)


@pytest.mark.parametrize("observer", ["python", "native"])
def test_every_pass_beside_others_is_recorded(
    tmp_path: Path, observer: str, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADTRACE_NATIVE_CACHE", str(native_observer.NOWHERE))
    if observer == "native":
        native_observer.build_or_skip()
    model = Sum()
    with (
        recording(tmp_path / "run", observer=observer),
        ThreadPoolExecutor(_THREADS) as pool,
    ):
        for _ in range(_TIMES):
            losses = [model(1.0) for _ in range(_THREADS)]
            for done in [pool.submit(loss.backward) for loss in losses]:
                done.result()
    assert rows(tmp_path / "run", "SELECT count(*), count(error) FROM backward_passes") == [
        (_THREADS * _TIMES, 0)
    ]
    # Torch (2.13) keeps hooks of a parameter from working after a swap where an empty table is left behind.
    model(1.0).backward()
    with recording(tmp_path / "after", observer=observer):
        model(1.0).backward()
    assert all(w._post_accumulate_grad_hooks is None for w in model.parameters())


FREE = """
import sys, threading, time
import torch
weight, ended = torch.nn.Parameter(torch.ones(3, 3)), threading.Event()

def work():
    while not ended.is_set():
        (torch.ones(3, 3) @ weight).tanh().sum().backward()

threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
optimizer, until = torch.optim.SGD([weight], 0.0), time.monotonic() + 4
while time.monotonic() < until:
    (torch.ones(3, 3) @ weight).tanh().sum().backward()
    optimizer.step()
ended.set()
for thread in threads:
    thread.join()
print("fine")
"""


@pytest.mark.parametrize("observer", ["python", "native"])
def test_steps_that_end_on_one_thread_do_not_hide_passes_of_others(
    tmp_path: Path, observer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step counts its passes anew, so passes of two threads can have one number. The engine reads a Node's hooks
    unlocked: taken off while a pass runs that is not known of, they end the process."""
    monkeypatch.setenv("GRADTRACE_NATIVE_CACHE", str(native_observer.NOWHERE))
    if observer == "native":
        native_observer.build_or_skip()
    given = {"GRADTRACE_DIR": str(tmp_path / "run"), "GRADTRACE_OBSERVER": observer}
    job = subprocess.run(
        [sys.executable, "-c", FREE],
        env=os.environ | given | {"GRADTRACE_SUMMARY": "off", "GRADTRACE_STRICT": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (job.returncode, job.stdout, job.stderr) == (0, "fine\n", "")
    watched = "SELECT count(*) FROM backward_passes WHERE node_count = 4"
    ((passes,),) = rows(tmp_path / "run", watched)
    assert passes > 100 and rows(tmp_path / "run", "SELECT count(*) FROM node_events") >= [
        (4 * passes,)
    ]
