"""An interrupt that comes just as a pass begins is the job's: it may go on, and what follows is recorded as ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gradtrace_recorder.journal.writer import JournalWriter
from gradtrace_recorder.observers.native.journal import NativeJournal
from support.environment import native_observer
from support.recordings.in_process import recording, rows


@pytest.mark.parametrize("observer", ["python", "native"])
def test_interrupt_at_the_beginning_of_a_pass_leaves_nothing_behind(
    tmp_path: Path, observer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADTRACE_NATIVE_CACHE", str(native_observer.NOWHERE))
    if observer == "native":
        native_observer.build_or_skip()

    def interrupted(self: Any, thread: int) -> Any:
        raise KeyboardInterrupt

    net = torch.nn.Linear(2, 2)
    with recording(tmp_path / "run", observer=observer):
        loss = net(torch.ones(1, 2)).sum()
        loss.backward(retain_graph=True)
        with monkeypatch.context() as patched:
            patched.setattr(JournalWriter, "place_of", interrupted)
            patched.setattr(NativeJournal, "place_of", interrupted)
            with pytest.raises(KeyboardInterrupt):
                loss.backward(retain_graph=True)
        loss.backward()
    run = tmp_path / "run"
    assert rows(run, "SELECT count(*), count(parent_backward_index) FROM backward_passes") == [
        (2, 0)
    ]
    per_pass = "SELECT count(*) FROM node_events GROUP BY backward_index ORDER BY backward_index"
    first, second = rows(run, per_pass)
    assert first == second
    told = json.loads((run / "ranks" / "rank=00000-0.json").read_text())["observer"]
    assert told.get("python_passes", {}) == {}


# The alarm comes while what the recorder needs is being loaded, which takes the longest.
EARLY = """
import signal, sys, torch

class Alarm(KIND):
    pass

def alarm(*_):
    raise Alarm

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "pyarrow":
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGALRM)

signal.signal(signal.SIGALRM, alarm)
sys.meta_path.insert(0, Finder())
net = torch.nn.Linear(2, 2)
for _ in range(3):
    try:
        net(torch.ones(1, 2)).sum().backward()
        print("fine")
    except Alarm:
        print("interrupted")
"""


@pytest.mark.parametrize("kind", ["BaseException", "Exception"])
def test_interrupt_while_the_recording_starts_delays_it(tmp_path: Path, kind: str) -> None:
    environment = os.environ | {"GRADTRACE_DIR": str(tmp_path / "run"), "OMP_NUM_THREADS": "1"}
    job = subprocess.run(
        [sys.executable, "-c", EARLY.replace("KIND", kind)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (job.stdout.split(), job.stderr) == (["interrupted", "fine", "fine"], "")
    assert rows(tmp_path / "run", "SELECT count(*) FROM backward_passes") == [(2,)]
