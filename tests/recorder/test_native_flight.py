"""Flight mode with the native observer: the same steps, rows, counts and triggers as with the Python one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradtrace_recorder.journal.writer import JournalWriter
from gradtrace_schemas import ALL_TABLES, layout
from support.environment import native_observer
from support.models.autograd_functions import Raises, applied
from support.recordings.both_observers import assert_same, comparable
from support.recordings.in_process import recording

STEPS = 3


pytestmark = pytest.mark.usefixtures("native_library")


def few_places(monkeypatch: pytest.MonkeyPatch, half_records: int) -> None:
    defaults = JournalWriter.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "half_records", half_records)


def triggers(run: Path) -> list[dict[str, Any]]:
    """Those whose parts are written."""
    said = json.loads((run / "ranks" / "rank=00000-0.json").read_text())
    found: list[dict[str, Any]] = said["flight"]["triggers"]
    return found


def wait_for(run: Path, count: int) -> None:
    until = time.monotonic() + 60
    while len(triggers(run)) < count:
        assert time.monotonic() < until
        time.sleep(0.01)


def train(
    run: Path, odd: dict[int, str], expected: Collection[int], steps: int = 30
) -> list[float]:
    """Steps, some of which fail, have an infinity in a gradient, or a loss that is NaN. After those that are expected
    to trigger it waits for their parts: which steps are let go of depends on that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(steps):
        optimizer.zero_grad()
        what = odd.get(step)
        out = model(torch.randn(3, 4))
        if step - 1 in expected:
            wait_for(run, sum(one < step for one in expected))
        if what == "raise":
            out = applied(Raises, out)
        if what == "infinity":
            out.register_hook(lambda gradient: gradient / 0)
        loss = out.square().sum() * (float("nan") if what == "nan" else 1)
        with contextlib.suppress(ValueError):
            loss.backward()
        if what in ("infinity", "nan"):
            optimizer.zero_grad()
        optimizer.step()
    return [float(p.detach().sum()) for p in model.parameters()]


def flown(
    folder: Path, odd: dict[int, str], expected: Collection[int], **settings: Any
) -> tuple[dict[str, Any], Any]:
    """The rank's account with each observer, and the tables; both must be the same."""
    said: dict[str, dict[str, Any]] = {}
    found, given = {}, {}
    for observer in ("python", "native"):
        run = folder / observer
        with recording(run, observer=observer, mode="flight", flight_steps=STEPS, **settings):
            given[observer] = train(run, odd, expected)
        said[observer] = json.loads((run / "ranks" / "rank=00000-0.json").read_text())
        names = [table.name for table in ALL_TABLES if table.journalled]
        found[observer] = comparable(run, names)
    assert given["native"] == given["python"]
    assert said["python"]["observer"] == {"kind": "python"}
    assert said["native"]["observer"]["kind"] == "native"
    assert not said["native"]["observer"]["python_passes"]
    for key in ("recorded", "overwritten", "dropped", "dropped_steps", "problems", "complete"):
        assert said["native"][key] == said["python"][key], key
    for account in said.values():
        for trigger in account["flight"]["triggers"]:
            del trigger["wall_ns"]
    assert said["native"]["flight"] == said["python"]["flight"]
    assert_same(found["native"], found["python"])
    return said["native"], found["native"]


@pytest.mark.parametrize("summary", ["off", "full"])
def test_the_same_steps_are_kept_and_the_same_triggers_fire(tmp_path: Path, summary: str) -> None:
    odd = {6: "raise", 14: "infinity", 22: "nan"}
    expected = {6: "ValueError", 14: "a value", 22: "a loss"}
    if summary == "off":
        del expected[14]
    said, tables = flown(tmp_path, odd, expected, summary=summary)
    fired = {t["step"]: t["reason"] for t in said["flight"]["triggers"]}
    assert fired.keys() == expected.keys()
    assert all(fired[step].startswith(reason) for step, reason in expected.items())
    there = [
        {3, 4, 5, 6},
        *([{11, 12, 13, 14}] if summary == "full" else []),
        {19, 20, 21, 22, 27, 28, 29},
    ]
    assert {row["step"] for row in tables["steps"]} == set().union(*there)


def test_a_ring_too_small_for_its_steps_keeps_fewer_with_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_places(monkeypatch, 40)  # a step takes 30 to 40 rows
    said, tables = flown(tmp_path, {}, (), summary="norms")
    assert said["flight"]["shortened"] > 20 and said["dropped"] == {}
    assert {row["step"] for row in tables["steps"]} <= {28, 29}


def test_steps_are_written_for_another_shell_while_threads_run_passes(tmp_path: Path) -> None:
    """The ring turns, and is asked for its parts, while hooks of several threads write without the GIL."""
    run = tmp_path / "run"
    weight = nn.Parameter(torch.ones(3, 3))
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            (torch.ones(3, 3) @ weight).tanh().sum().backward()

    with recording(run, observer="native", mode="flight", flight_steps=STEPS):
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            optimizer = torch.optim.SGD([weight], 0.0)
            file = layout.trigger_file(run)
            until, step = time.monotonic() + 60, 0
            while step < 6 or not triggers(run):
                assert time.monotonic() < until
                (torch.ones(3, 3) @ weight).tanh().sum().backward()
                optimizer.step()
                step += 1
                if step == 6:
                    file.write_text(json.dumps({"token": "now"}))
        finally:
            ended.set()
            for thread in threads:
                thread.join()
    (trigger,) = triggers(run)
    assert (trigger["reason"], trigger["token"]) == ("analyzer trigger", "now")
    tables = comparable(run, ("steps", "backward_passes", "node_events"))
    steps = [row["step"] for row in tables["steps"]]
    assert set(steps) >= set(range(trigger["first_step"], trigger["last_step"] + 1))
    nodes = Counter((row["step"], row["backward_index"]) for row in tables["node_events"])
    # Passes of other threads may run while a step ends: those of a step between others are there from begin to end.
    between = {step for step in steps if {step - 1, step + 1} <= set(steps)}
    assert between and {step for step, _ in nodes} >= between
    assert all(count == 4 for (step, _), count in nodes.items() if step in between)


# Dies while a Node of its backward pass runs: in a Function, which the pass has come to.
DYING = """
import os, signal, sys, torch
from torch import nn

class Dies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "kill" else os._exit(3)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(20):
    optimizer.zero_grad()
    hidden = model[0](torch.randn(3, 4))
    out = model[2](model[1](Dies.apply(hidden) if step == 19 else hidden))
    out.square().sum().backward()
    optimizer.step()
"""


def test_steps_and_the_running_node_are_there_however_the_job_dies(tmp_path: Path) -> None:
    cache = str(native_observer.build_or_skip().parents[2])
    ways = [("python", "kill"), ("native", "kill"), ("native", "exit")]
    dying = []
    for observer, way in ways:
        environment = os.environ | {
            "GRADTRACE_DIR": str(tmp_path / (observer + way)),
            "GRADTRACE_MODE": "flight",
            "GRADTRACE_FLIGHT_STEPS": str(STEPS),
            "GRADTRACE_OBSERVER": observer,
            "GRADTRACE_NATIVE_CACHE": cache,
            "OMP_NUM_THREADS": "1",
        }
        dying.append(subprocess.Popen([sys.executable, "-c", DYING, way], env=environment))
    assert [process.wait(120) for process in dying] == [-signal.SIGKILL, -signal.SIGKILL, 3]
    names = [table.name for table in ALL_TABLES if table.journalled]
    expected, *others = [comparable(tmp_path / (o + w), names) for o, w in ways]
    for found in others:
        assert_same(found, expected)
    assert {row["step"] for row in expected["backward_passes"]} == {16, 17, 18}
    assert expected["node_events"][-1]["node_name"] == "DiesBackward"
    assert [row["outcome"] for row in expected["node_events"]].count("running") == 1
