"""`analyzer timing` without options: the parts of a step by rank, and the headline of the buckets."""

import csv
import json
from pathlib import Path

from support.synthetic_runs.bucket_times import MS, TimedJob, timing
from support.synthetic_runs.builder import build_run


def late(rank: int, step: int, bucket: int) -> float:
    return 30 * ((rank, bucket) == (1, 1))


def test_parts_of_a_step_are_told_by_rank(tmp_path: Path) -> None:
    steps = [
        {"rank": rank, "step": n, "start_ns": 0, "end_ns": (n + 1) * 10 * MS, "forward_ns": 2 * MS}
        | {"backward_ns": (n + 1) * MS, "optimizer_ns": 0, "recorder_ns": (rank + 1) * MS}
        for rank in range(2)
        for n in range(3)
    ]
    path = build_run(tmp_path / "a", {"steps": steps}, world_size=2)
    lines = timing(path).stdout.splitlines()
    assert lines[0].split()[:6] == ["rank", "steps", "step", "forward", "backward", "optimizer"]
    assert " ".join(lines[2].split()) == (
        "0 3 20.0 ms 2.00 ms 2.00 ms 0.00 ms 60.0 ms 6.00 ms 6.00 ms 0.00 ms 5.0%"
    )
    assert lines[3].split()[-1] == "10%"
    ranks = json.loads(timing(path, "--format", "json").stdout)["summary"]["ranks"]
    assert ranks[0]["median_step_ns"] == 20 * MS and ranks[0]["total_step_ns"] == 60 * MS
    assert ranks[1]["recorder_share"] == 0.1
    [_, row] = csv.DictReader(timing(path, "--format", "csv").stdout.splitlines())
    assert (row["rank"], row["total_backward_ns"]) == ("1", str(6 * MS))


def test_steps_can_be_chosen(tmp_path: Path) -> None:
    path = TimedJob(late=late).write(tmp_path / "a")
    answer = json.loads(timing(path, "--format", "json", "--step", "1:").stdout)
    assert answer["steps"] == "1:"
    assert [own["step_count"] for own in answer["summary"]["ranks"]] == [3, 3]
    assert "in 6 of 9 reductions" in answer["summary"]["headlines"][0]


def test_straggler_and_exposed_time_are_the_headline(tmp_path: Path) -> None:
    lines = timing(TimedJob(late=late).write(tmp_path / "a")).stdout.splitlines()
    assert lines[-3].startswith("Rank 1 launches last in 8 of 12 reductions of group 0, 30.0 ms")
    assert lines[-2] == (
        "Reductions that no computing hides take 32.0 ms in a step of rank 0 (32% of its time), the most of "
        "2 ranks; 30.0 ms of that is waiting for the last rank."
    )


def test_run_without_buckets_has_a_summary_still(tmp_path: Path) -> None:
    rows = TimedJob().rows()
    del rows["buckets"]
    path = TimedJob().write(tmp_path / "a", rows)
    assert "reduction" not in timing(path).stdout
    assert json.loads(timing(path, "--format", "json").stdout)["summary"]["headlines"] == []


def test_run_without_a_closed_step_says_so(tmp_path: Path) -> None:
    assert timing(build_run(tmp_path / "a")).stdout == "No step was closed.\n"


def test_attempt_can_be_chosen(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a", {"steps": [{"start_ns": 0, "end_ns": 5 * MS}]})
    build_run(path, {"steps": [{"start_ns": 0, "end_ns": 7 * MS}]}, attempt=1)
    for attempt, ns in ((0, 5 * MS), (1, 7 * MS)):
        answer = json.loads(timing(path, "--format", "json", "--attempt", attempt).stdout)
        assert (answer["attempt"], answer["summary"]["ranks"][0]["median_step_ns"]) == (attempt, ns)
