"""Flight mode in real jobs: what a healthy run costs, what triggers, what is there after a kill and while it runs."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gradtrace_analyzer.runs.opening import open_run
from gradtrace_analyzer.sql.views import connect
from gradtrace_schemas import ALL_TABLES
from support.environment import native_observer
from support.launching.launcher import run_job

ROOT = Path(__file__).resolve().parents[2]
FLIGHT = {"GRADTRACE_MODE": "flight", "GRADTRACE_FLIGHT_STEPS": "4"}

# A row in the list `odd` makes what its step is to show; sizes on disk are printed while the job runs.
JOB = """
import hashlib, os, sys, torch
from pathlib import Path
steps, run = int(sys.argv[1]), os.environ.get("GRADTRACE_DIR")
odd = dict(s.split("=") for s in sys.argv[2].split(",") if s)
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", enabled=os.environ.get("SCALER") == "1", init_scale=1.0)
for step in range(steps):
    what = odd.get(str(step))
    opt.zero_grad()
    loss = net(torch.randn(4, 8)).square().sum()
    if what == "raise":
        loss.register_hook(lambda gradient: 1 / 0)
    if what == "inf":
        loss.register_hook(lambda gradient: gradient * float("inf"))
    try:
        scaler.scale(loss).backward()
    except ZeroDivisionError:
        opt.step()
        continue
    if what == "inf" and not scaler.is_enabled():
        opt.zero_grad()
    scaler.step(opt)
    scaler.update()
    if run and step in (20, 199):
        print("size", sum(p.stat().st_blocks * 512 for p in Path(run).rglob("*") if p.is_file()))
print("bits", hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest())
"""

# Few records fit into the ring, so that it turns all the time.
ENDLESS = """
import sys, torch
from gradtrace_recorder.journal import writer as journal
journal.JournalWriter.__init__.__kwdefaults__["half_records"] = int(sys.argv[1])
torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(int(sys.argv[2])):
    opt.zero_grad()
    net(torch.randn(4, 8)).sum().backward()
    opt.step()
    if step == 40:
        print("running", flush=True)
"""


def job(place: Path, steps: int, odd: str = "", *, name: str = "run", env: Any = None) -> Any:
    script = place / "job.py"
    script.write_text(JOB)
    return run_job(
        script, steps, odd, recorded=place / name, env={**FLIGHT, **(env or {})}, forked=True
    ).must_succeed()


def steps_of(run: Path, table: str = "steps") -> list[int]:
    with connect([open_run(run)]) as connection:
        found = connection.execute(f"SELECT DISTINCT step FROM {table} ORDER BY 1").fetchall()
    return [step for (step,) in found]


def facts(run: Path, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "ranks" / f"rank={rank:05d}-0.json").read_text())
    return found


def analyzer(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradtrace_analyzer.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_healthy_run_costs_the_same_after_any_number_of_steps_and_leaves_the_last_ones(
    tmp_path: Path,
) -> None:
    seen = job(tmp_path, 200)
    sizes = [int(line.split()[1]) for line in seen.stdout.splitlines() if line.startswith("size")]
    assert sizes[0] == sizes[1], "the recording grew on disk"
    bare = run_job(tmp_path / "job.py", 200, "").must_succeed()
    assert bare.stdout.splitlines()[-1] == seen.stdout.splitlines()[-1]
    run = tmp_path / "run"
    assert steps_of(run) == steps_of(run, "node_events") == [196, 197, 198, 199]
    left = sum(p.stat().st_size for p in run.rglob("*") if p.is_file())
    assert left < 200_000 and not list((run / "journals").iterdir())
    said = facts(run)
    assert said["complete"] and said["dropped"] == {} and said["flight"]["triggers"] == []
    with connect([open_run(run)]) as connection:
        for table, count in said["recorded"].items():
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (count,)
            assert said["overwritten"][table] == count * 49  # 4 steps are there of 200
        # Parts have digests, though the first steps of all are gone.
        (count,) = connection.execute("SELECT count(digest_backward) FROM steps").fetchone() or ()
        assert count == 4


def test_exceptions_and_values_that_are_not_finite_write_the_steps_before_them(
    tmp_path: Path,
) -> None:
    odd = ["30=raise", *(f"{step}=inf" for step in range(60, 70))]
    job(tmp_path, 120, ",".join(odd))
    run = tmp_path / "run"
    # The ten steps with an infinity are one trigger; what comes right after it is not written again.
    assert steps_of(run, "backward_passes") == [*range(26, 31), *range(56, 61), *range(116, 120)]
    triggers = facts(run)["flight"]["triggers"]
    assert [(t["step"], t["reason"]) for t in triggers] == [
        (30, "ZeroDivisionError left a backward pass"),
        (60, "a value that is not finite in a gradient"),
    ]
    told = analyzer("info", run).stdout
    assert "the last 4 steps are kept, and those before a trigger: 26-30,56-60,116-119\n" in told
    assert (
        "  trigger       rank 0, step 30: ZeroDivisionError left a backward pass (steps 26-30 written)\n"
        in told
    )
    run_job(tmp_path / "job.py", 120, ",".join(odd), recorded=tmp_path / "whole").must_succeed()
    code, answer = checked("diff", tmp_path / "whole", run)
    assert (code, answer["verdict"]) == (0, "identical")
    assert answer["cover"]["flights"] == {
        "candidate": [*range(26, 31), *range(56, 61), *range(116, 120)]
    }
    _, answer = checked("check", run)
    assert answer["cover"]["flight_steps"] == 4
    assert {(v["law"], v["step"]) for v in answer["violations"]} >= {
        ("passes_complete", 30),
        ("values_finite", 60),
    }


def checked(command: str, *runs: Path) -> tuple[int, dict[str, Any]]:
    done = analyzer(command, "--format", "json", *runs)
    assert "is a flight recording: of each rank its last steps (4 at most) are there" in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found


def test_skipped_step_triggers_nothing_and_a_job_that_fails_on_and_on_does_not_fill_the_disk(
    tmp_path: Path,
) -> None:
    odd = ["4=inf", *(f"{step}=raise" for step in range(16, 200, 8))]
    job(tmp_path, 200, ",".join(odd), env={"SCALER": "1"})
    triggers = facts(tmp_path / "run")["flight"]["triggers"]
    assert [t["step"] for t in triggers] == list(range(16, 16 + 16 * 8, 8))


def rows_by_step(run: Path) -> dict[int, Counter[str]]:
    """How many rows each table has, by step."""
    found: dict[int, Counter[str]] = {}
    with connect([open_run(run)]) as connection:
        for table in ALL_TABLES:
            if table.journalled:
                query = f"SELECT step, count(*) FROM {table.name} GROUP BY 1"
                for step, count in connection.execute(query).fetchall():
                    found.setdefault(step, Counter())[table.name] = count
    return found


def endless(run: Path, half_records: int, steps: int = 10**9, **more: str) -> subprocess.Popen[str]:
    environment = os.environ | {"GRADTRACE_DIR": str(run), "OMP_NUM_THREADS": "1", **FLIGHT, **more}
    command = [sys.executable, "-c", ENDLESS, str(half_records), str(steps)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "running\n"
    return process


def test_killed_or_alive_only_whole_steps_are_shown(tmp_path: Path) -> None:
    """Steps end to end, each with all its rows, but for the one in which the rank was caught."""
    for observer in ("python", "native"):
        run = tmp_path / observer
        cache = str(native_observer.build_or_skip().parents[2]) if observer == "native" else ""
        process = endless(run, 130, GRADTRACE_OBSERVER=observer, GRADTRACE_NATIVE_CACHE=cache)
        try:
            for _ in range(6):
                assert_whole(rows_by_step(run))
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(random.uniform(0, 0.1))
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        found = rows_by_step(run)
        assert_whole(found)
        assert 4 <= len(found) <= 6 and min(found) > 30


def assert_whole(found: dict[int, Counter[str]]) -> None:
    steps = sorted(found)
    assert steps == list(range(steps[0], steps[-1] + 1)), steps
    finished = [found[step] for step in steps[:-1]]
    assert all(of_step == finished[0] for of_step in finished), found
    assert finished[0]["node_events"] == 10 and finished[0]["steps"] == 1


def test_ring_that_is_too_small_keeps_fewer_steps_and_says_so(tmp_path: Path) -> None:
    process = endless(tmp_path / "run", 55, steps=60)  # 110 places; a step takes 39 rows
    process.communicate(timeout=60)
    said = facts(tmp_path / "run")
    assert said["flight"]["shortened"] > 50 and said["dropped"] == {} and said["complete"]
    assert steps_of(tmp_path / "run") == [58, 59]
    assert "the journal had no room for all of them" in analyzer("info", tmp_path / "run").stdout


def test_trigger_from_another_shell_writes_the_steps_of_a_job_that_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = endless(run, 4096)
    try:
        written: list[int] = []
        for _ in range(2):
            done = analyzer("trigger", run)
            assert done.returncode == 0 and done.stdout.startswith("rank 0 wrote steps "), done
            first, last = map(int, done.stdout.split()[-1].split("-"))
            written += range(first, last + 1)
            assert last - first in (3, 4)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    found = rows_by_step(run)
    assert set(written) < set(found) and all(found[s] == found[written[0]] for s in written)
    done = analyzer("trigger", "--wait", "0.5", run)
    assert done.returncode == 2 and "rank 0 has not answered in 0.5 s: it was killed" in done.stdout


def test_ranks_of_a_flight_recording_are_judged_and_compared(tmp_path: Path) -> None:
    """Rows of groups, written in the first step, outlive it."""
    script = ROOT / "examples" / "train.py"
    arguments = ("--steps", "14", "--layers", "1")
    run_job(script, *arguments, ranks=2, recorded=tmp_path / "run", env=FLIGHT).must_succeed()
    run_job(script, *arguments, ranks=2, recorded=tmp_path / "whole").must_succeed()
    code, answer = checked("check", tmp_path / "run")
    assert (code, answer["verdict"]) == (0, "clean")
    assert answer["judged"]["reduction_is_mean"] >= 4 and answer["judged"]["parameters_equal"] > 0
    code, answer = checked("diff", tmp_path / "whole", tmp_path / "run")
    assert (code, answer["verdict"]) == (0, "identical")
    assert answer["cover"]["steps"] == [10, 11, 12, 13]
    done = analyzer("trigger", tmp_path / "whole")
    assert done.returncode == 2 and "is no flight recording" in done.stderr
