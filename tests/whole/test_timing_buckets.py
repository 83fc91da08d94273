"""A real job of two ranks, one of which loses time in the backward of one module: the answer names rank and place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.launching.launcher import run_job

JOB = Path(__file__).resolve().parents[1] / "support" / "jobs" / "straggling.py"


def recorded(directory: Path, variant: str) -> Path:
    run_job(JOB, variant, ranks=2, recorded=directory, timeout=90, forked=True).must_succeed()
    return directory


def timing(directory: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "gradtrace_analyzer.cli", "timing", "--buckets"]
    done = subprocess.run(
        [*command, "--format", "json", str(directory)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)["buckets"]
    print(answer["explanation"])
    assert isinstance(answer, dict)
    return answer


def test_rank_that_loses_time_in_a_modules_backward_is_named_with_its_place(tmp_path: Path) -> None:
    answer = timing(recorded(tmp_path / "bad", "bad"))
    [group] = answer["groups"]
    assert group["straggler"] == 1, group["explanation"]
    onset = group["onset"]
    assert onset["place"] == "bucket"
    assert set(onset["bucket"]["parameter_fqns"]) == {"1.fc.weight", "1.fc.bias"}
    assert set(onset["previous"]["parameter_fqns"]) == {"2.weight", "2.bias"}
    assert onset["modules"] == ["1.fc"]
    assert (onset["node"]["node_name"], onset["node"]["module_fqn"]) == ("DragBackward", "1")
    assert group["reduction_count"] == 10
    by_rank = {lag["rank"]: lag for lag in group["lags"]}
    # Of 3 passes in three buckets the first bucket comes in time, and the pass before has but one.
    assert by_rank[1]["late_count"] == 7
    assert 50e6 < by_rank[1]["median_late_ns"] < 120e6
    waits, late = (total["waiting_ns"] for total in answer["totals"])
    assert waits > 4 * 50e6 > late
    assert answer["notes"] == []


def test_job_without_a_straggler_names_nobody(tmp_path: Path) -> None:
    [group] = timing(recorded(tmp_path / "good", "good"))["groups"]
    assert group["straggler"] is None, group["explanation"]
    assert group["explanation"].startswith("No straggler in group 0")
    assert (group["reduction_count"], group["pass_count"]) == (10, 4)
