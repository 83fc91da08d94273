"""However a job dies, what it recorded is in the answer: every record, once, and the Node that was running."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradtrace_analyzer.runs.opening import open_run
from gradtrace_analyzer.sql.views import connect
from gradtrace_schemas.journal_reader import text_of
from support.answers.commands import told
from support.environment import native_observer
from support.environment.small_disk import small_disk
from support.stress.killing import MODELS, Killer


def started(directory: Path, source: str) -> subprocess.Popen[str]:
    environment = os.environ | {"GRADTRACE_DIR": str(directory), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", source], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "running\n"
    return process


@pytest.mark.parametrize(
    ("kills", "models"),
    [
        pytest.param(3, ("lists",), id="3"),
        pytest.param(12, MODELS, id="12", marks=pytest.mark.slow),
    ],
)
def test_kill_at_a_random_moment_loses_no_record_and_invents_none(
    kills: int, models: tuple[str, ...], tmp_path: Path
) -> None:
    with Killer(tmp_path, seed=kills) as killer:
        for number in range(kills):
            killer.kill_one(number, models)
    assert killer.records > 500 * kills and killer.dropping < kills


STEPS = """
import os, signal, sys, torch
one, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
made = {
    "one": [torch.optim.AdamW([*one.parameters(), *other.parameters()])],
    "two": [torch.optim.SGD(one.parameters(), 0.1), torch.optim.AdamW(other.parameters())],
    "inside": [torch.optim.SGD(one.parameters(), 0.1)],
}[sys.argv[1]]
if sys.argv[1] == "inside":
    one.weight.register_post_accumulate_grad_hook(lambda _: made[0].step())
for step in range(3):
    other(one(torch.ones(2, 3))).sum().backward()
    for optimizer in made if sys.argv[1] != "inside" else ():
        optimizer.step()
        optimizer.zero_grad()
    if step == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("observer", ["python", "native"])
@pytest.mark.parametrize("optimizers", ["one", "two", "inside"])
def test_step_that_was_over_when_the_job_was_killed_has_its_row(
    optimizers: str, observer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADTRACE_NATIVE_CACHE", str(native_observer.NOWHERE))
    if observer == "native":
        native_observer.build_or_skip()
    environment = os.environ | {
        "GRADTRACE_DIR": str(tmp_path / "run"), "GRADTRACE_OBSERVER": observer, "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    job = subprocess.run(
        [sys.executable, "-c", STEPS, optimizers, "2"], env=environment, timeout=100, check=False
    )
    assert job.returncode == -9
    run = open_run(tmp_path / "run")
    with contextlib.closing(connect([run])) as connection:
        rows = connection.execute(
            "SELECT step, backward_count, ended_by, end_ns > start_ns FROM steps ORDER BY step"
        ).fetchall()
    assert rows == [(step, 1, "optimizer", True) for step in range(3)]


HANGS = """
import os, time, torch
class Stuck(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.view_as(x)
    @staticmethod
    def backward(ctx, g):
        print("running", flush=True)
        time.sleep(600)
class Holds(torch.nn.Module):
    def forward(self, x): return Stuck.apply(x)
net = torch.nn.Sequential(torch.nn.Linear(3, 3), Holds())
net(torch.ones(2, 3)).sum().backward()
"""


def test_node_that_was_running_is_named_live_and_after_the_kill(tmp_path: Path) -> None:
    process = started(tmp_path / "run", HANGS)
    try:
        live = running_node(tmp_path / "run")
    finally:
        process.kill()
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()
    assert live == running_node(tmp_path / "run") == ("StuckBackward", "1")
    # It is a row of its table too, and stays one when the journal becomes parts.
    query = (
        "SELECT node_name, module_fqn, end_ns IS NULL, grad_output_norm FROM node_events "
        "WHERE outcome = 'running'"
    )
    assert asked_rows(query, tmp_path / "run") == [("StuckBackward", "1", True, None)]
    assert told("repair", tmp_path / "run")[0] == 0
    assert asked_rows(query, tmp_path / "run") == [("StuckBackward", "1", True, None)]
    run = open_run(tmp_path / "run")
    assert run.incomplete_ranks == (0,) and any("rank 0" in notice for notice in run.notices)


def asked_rows(query: str, run: Path) -> list[tuple[object, ...]]:
    with contextlib.closing(connect([open_run(run)])) as connection:
        return connection.execute(query).fetchall()


def running_node(directory: Path) -> tuple[str | None, str | None]:
    contents = open_run(directory).journals[0]
    threads = contents.running[contents.running["depth"] > 0]
    assert len(threads) == 1
    entry = threads[0]["entries"][threads[0]["depth"] - 1]
    return (
        text_of(contents.strings, int(entry["node_name"])),
        text_of(contents.strings, int(entry["module_fqn"])),
    )


FULL = """
import sys, torch
net = torch.nn.Linear(64, 64)
for step in range(3):
    net(torch.ones(2, 64)).sum().backward()
print("running", flush=True)
"""


def test_disk_that_is_full_at_the_start_is_one_line_and_the_job_goes_on(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "1m") as place:
        environment = os.environ | {"GRADTRACE_DIR": str(place / "run")}
        done = subprocess.run(
            [sys.executable, "-c", FULL], env=environment, capture_output=True, text=True
        )
    assert (done.returncode, done.stdout) == (0, "running\n")
    assert done.stderr.count("\n") == 1 and "No space left on device" in done.stderr
