"""`analyzer failures` of real jobs: raised, killed, hung, each rank's Node named, who waits for whom."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gradtrace_schemas import layout
from support.launching.launcher import run_job

DYING = Path(__file__).resolve().parents[1] / "support" / "jobs" / "dying.py"


def analyzer(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradtrace_analyzer.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def told(directory: Path, *options: object) -> dict[str, Any]:
    """The answer as JSON; its exit status is checked against its verdict."""
    done = analyzer("failures", directory, "--format", "json", *options)
    answer: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == {"well": 0, "found": 1, "unknown": 2}[answer["verdict"]], done.stderr
    return answer


@contextlib.contextmanager
def started(
    directory: Path, *arguments: object, ranks: int = 2
) -> Iterator[subprocess.Popen[bytes]]:
    """The job under torch's launcher; nothing of it is left afterwards."""
    module = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
    ]
    command = [*module, "--nproc-per-node", str(ranks), str(DYING), *map(str, arguments)]
    process = subprocess.Popen(
        command,
        env=os.environ | {"GRADTRACE_DIR": str(directory), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
        process.wait(30)


def wait_for(directory: Path, *states: str) -> dict[str, Any]:
    """The answer once the ranks are in these states."""
    deadline = time.monotonic() + 60
    answer: dict[str, Any] = {}
    while time.monotonic() < deadline:
        if (directory / layout.RANKS).exists():
            answer = told(directory, "--stuck-after", 1.5)
            if [rank["state"] for rank in answer["ranks"]] == list(states):
                return answer
        time.sleep(0.3)
    pytest.fail(f"never {states}: {json.dumps(answer, indent=1)}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "where", "doing"),
    [
        ("hang", "node", {"doing": "node", "node_name": "WoundBackward", "module_fqn": "1"}),
        ("hang", "forward", {"doing": "module", "module_fqn": "1"}),
        ("recv", "code", {"doing": "after_backward", "backward_index": 0}),
    ],
)
def test_hang_is_told_live_and_then_who_was_killed_and_who_waited(
    how: str, where: str, doing: dict[str, Any], tmp_path: Path
) -> None:
    step = 2
    with started(tmp_path / "run", how, where, step, 1) as job:
        answer = wait_for(tmp_path / "run", "waits", "stuck")
        before = (tmp_path / "run").stat().st_mtime_ns
        waiting, stuck = answer["ranks"]
        assert stuck["doing"] | doing | {"step": step} == stuck["doing"]
        # Who hangs after backward lets the others go on to the next step's bucket.
        assert waiting["doing"]["step"] == waiting["waits"]["step"] == step + (where == "code")
        assert waiting["waits"]["for_ranks"] == [1] == waiting["waits"]["absent"]
        assert 1.5 <= stuck["idle_seconds"] <= stuck["doing"]["for_seconds"] + 0.5 < 60
        assert (tmp_path / "run").stat().st_mtime_ns == before and job.poll() is None
        os.kill(stuck["pid"], signal.SIGKILL)
        job.wait(60)
    dead = told(tmp_path / "run")
    # Either gloo's error ends the other one, or the SIGTERM that torch's launcher sends it: whichever is there first.
    other, killed = dead["ranks"]
    assert killed["state"] == "died" and other["state"] in ("died", "raised")
    assert killed["doing"] == stuck["doing"] | {"for_seconds": None}
    assert other["waits"] == waiting["waits"]
    assert dead["explanation"] in (
        "ranks 0-1 died; rank 0 waited for rank 1.",
        "rank 0 raised an exception; rank 1 died; rank 0 waited for rank 1.",
    )
    began = stuck["doing"]["since_unix_ns"]
    assert 0 < began < dead["ranks"][1]["last_seen_unix_ns"] < time.time_ns()


@pytest.mark.parametrize(
    ("how", "status"), [("kill", -signal.SIGKILL), ("exit", 7), ("segv", -signal.SIGSEGV)]
)
def test_rank_that_dies_in_a_node_is_named_with_it(how: str, status: int, tmp_path: Path) -> None:
    done = run_job(DYING, how, "node", 3, 0, recorded=tmp_path / "run")
    assert done.returncode == status
    [rank] = told(tmp_path / "run")["ranks"]
    assert (rank["state"], rank["doing"]["node_name"], rank["doing"]["step"]) == (
        "died",
        "WoundBackward",
        3,
    )
    assert rank["sentence"].startswith(
        "Rank 0 died in step 3, in WoundBackward of module 1, which began "
    )


def test_exception_in_a_node_reaches_the_job_and_is_told_with_all_that_made_it(
    tmp_path: Path,
) -> None:
    plain = run_job(DYING, "raise", "node", 2, 0)
    done = run_job(DYING, "raise", "node", 2, 0, recorded=tmp_path / "run")
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout) == (1, "running\n")
    assert done.stderr.splitlines()[-1] == plain.stderr.splitlines()[-1] == "ValueError: no luck"
    [rank] = told(tmp_path / "run")["ranks"]
    raised = rank["exception"]
    expected = {
        "node_name": "WoundBackward", "module_fqn": "1", "step": 2, "microbatch": 0, "backward_index": 0,
        "exception_type": "ValueError", "exception_text": "no luck", "grad_outputs": ["float32[3, 4]"],
        "call_index": 0, "call_step": 2, "call_microbatch": 0, "call_phase": "forward",
        "changed_between": None,
    }  # fmt: skip
    assert raised | expected == raised and rank["state"] == "raised"
    assert rank["uncaught"] == ["ValueError", "no luck"]


def test_job_that_ends_well_is_said_to(tmp_path: Path) -> None:
    run_job(DYING, "no", "grief", 1, 0, recorded=tmp_path / "run").must_succeed()
    done = analyzer("failures", tmp_path / "run")
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == "run (attempt 0): rank 0 ended without an exception."
    assert done.stdout.splitlines()[-1] == (
        "Rank 0 ended by itself after step 2, without an exception that was seen."
    )


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "raise",
            "Rank 0 was ended by ValueError: no luck. It came from outside any backward pass; the rank was last seen "
            "in step 1, in the forward of module 1.",
        ),
        (
            "leave",
            "Rank 0 ended by itself after step 1, without an exception that was seen. It was last seen in step 1, in "
            "the forward of module 1, which an exception or sys.exit left.",
        ),
    ],
)
def test_rank_that_ends_inside_a_forward_is_not_said_to_have_ended_well(
    how: str, said: str, tmp_path: Path
) -> None:
    run_job(DYING, how, "forward", 1, 0, recorded=tmp_path / "run")
    done = analyzer("failures", tmp_path / "run")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == said
