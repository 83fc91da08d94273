"""`analyzer timing --buckets`: what each bucket costs, what hides behind backward, and what is missing."""

import csv
import time
from pathlib import Path
from typing import Any

import pytest

from support.synthetic_runs.bucket_times import MS, Rows, TimedJob, bucket_json, timing
from support.synthetic_runs.builder import build_run


def late(rank: int, step: int, bucket: int) -> float:
    return 30 * ((rank, bucket) == (1, 1))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return TimedJob(late=late).write(tmp_path / "a")


def test_wait_transport_and_ready_to_launch_of_a_bucket(path: Path) -> None:
    _, second, _ = bucket_json(path)["buckets"]
    assert (second["bucket_index"], second["parameter_count"]) == (1, 2)
    assert (second["size_bytes"], second["reduction_count"]) == (8000, 4)
    assert second["transport_ns"] == 2 * MS
    assert second["ready_to_launch_ns"] == MS
    assert [rank["wait_ns"] for rank in second["ranks"]] == [30 * MS, 0]
    assert [rank["own_ns"] for rank in second["ranks"]] == [32 * MS, 2 * MS]


def test_what_lies_before_the_last_launch_of_the_pass_is_hidden_and_the_rest_exposed(
    path: Path,
) -> None:
    # Launches of rank 0 at 10, 20, 30 ms, of rank 1 at 10, 50, 60; ends at 12, 52, 62.
    first, second, third = bucket_json(path)["buckets"]
    assert [rank["hidden_share"] for rank in first["ranks"]] == [1, 1]
    assert [rank["exposed_ns"] for rank in first["ranks"]] == [0, 0]
    assert [rank["hidden_share"] for rank in second["ranks"]] == [10 / 32, 1]
    assert [rank["exposed_ns"] for rank in second["ranks"]] == [22 * MS, 0]
    assert second["hidden_share"] == 12 / 34
    assert [rank["exposed_ns"] for rank in third["ranks"]] == [32 * MS, 2 * MS]


def test_overlapping_reductions_are_exposed_once_in_a_step(path: Path) -> None:
    own, other = bucket_json(path)["totals"]
    assert (own["exposed_ns"], own["waiting_ns"]) == (32 * MS, 30 * MS)
    assert (own["exposed_share"], own["waiting_share"]) == (0.32, 0.3)
    assert (other["exposed_ns"], other["waiting_ns"]) == (2 * MS, 0)


def test_passes_of_a_step_add_up(tmp_path: Path) -> None:
    job = TimedJob(late=late)
    rows = job.rows()
    for table in ("buckets", "backward_passes"):  # steps 0 and 1 become two passes of step 0
        for row in rows[table]:
            if row["step"] == 1:
                row |= {"step": 0, "backward_index": 1}
    own = bucket_json(job.write(tmp_path / "a", rows))["totals"][0]
    assert (own["step_count"], own["largest_ns"], own["largest_step"]) == (3, 64 * MS, 0)
    assert own["exposed_share"] == 4 * 32 / 300


def test_step_that_was_not_closed_counts_in_no_share(tmp_path: Path) -> None:
    job = TimedJob(late=late)
    rows = job.rows()
    rows["steps"] = [row for row in rows["steps"] if row["step"] != 3]
    own = bucket_json(job.write(tmp_path / "a", rows))["totals"][0]
    assert (own["step_count"], own["exposed_share"]) == (4, 0.32)
    rows["steps"] = []
    answer = bucket_json(job.write(tmp_path / "b", rows))
    assert answer["totals"][0]["exposed_share"] is None
    assert answer["groups"][0]["straggler"] == 1


def test_gradients_whose_time_is_not_known_leave_one_answer_out(tmp_path: Path) -> None:
    job = TimedJob(late=late)
    rows = job.rows()
    for row in rows["buckets"]:
        row["ready_ns"] = None
    answer = bucket_json(job.write(tmp_path / "a", rows))
    assert answer["buckets"][0]["ready_to_launch_ns"] is None
    assert answer["buckets"][0]["transport_ns"] == 2 * MS


def changed(rows: Rows, rank: int, step: int, **columns: Any) -> Rows:
    for row in rows["buckets"]:
        if (row["rank"], row["step"]) == (rank, step):
            row |= columns
    return rows


def last_line(path: Path) -> str:
    return timing(path, "--buckets").stdout.splitlines()[-1]


def test_whole_recording_has_no_last_line(path: Path) -> None:
    assert "Not whole" not in timing(path, "--buckets").stdout
    assert bucket_json(path)["notes"] == []


def test_reductions_that_never_ended_are_counted_and_judged_by_their_launches(
    tmp_path: Path,
) -> None:
    job = TimedJob(late=late)
    path = job.write(tmp_path / "a", changed(job.rows(), 1, 3, done_ns=None))
    assert last_line(path) == "Not whole: launches whose end was never seen: 3."
    answer = bucket_json(path)
    assert answer["groups"][0]["straggler"] == 1
    assert answer["groups"][0]["reduction_count"] == 12
    assert [total["step_count"] for total in answer["totals"]] == [4, 3]


def test_launches_without_a_number_are_counted(tmp_path: Path) -> None:
    job = TimedJob(late=late)
    path = job.write(tmp_path / "a", changed(job.rows(), 1, 3, collective_seq=None))
    assert last_line(path) == (
        "Not whole: launches without the number of their collective, not paired: 3; "
        "launches that no other recorded rank joined, not paired: 3."
    )
    assert bucket_json(path)["groups"][0]["reduction_count"] == 9


def test_rank_that_was_not_recorded_is_told(tmp_path: Path) -> None:
    job = TimedJob(rank_count=3, late=late)
    path = job.write(tmp_path / "a", absent=(2,))
    assert last_line(path) == "Not whole: rank 2 of group 0 left no reduction."
    [group] = bucket_json(path)["groups"]
    assert (group["straggler"], group["missing_ranks"]) == (1, [2])


def test_reductions_that_a_rank_did_not_record_are_told(tmp_path: Path) -> None:
    job = TimedJob(rank_count=3, late=late)
    rows = job.rows()
    rows["buckets"] = [r for r in rows["buckets"] if (r["rank"], r["step"]) != (2, 0)]
    assert last_line(job.write(tmp_path / "a", rows)) == (
        "Not whole: reductions that some recorded rank took no part in, judged without it: 3."
    )


def test_group_of_which_one_rank_was_recorded_cannot_be_judged(tmp_path: Path) -> None:
    path = TimedJob().write(tmp_path / "a", absent=(1,))
    text = timing(path, "--buckets").stdout
    assert text.startswith("Nothing to judge in group 0")
    assert "rank 1 of group 0 left no reduction" in text


def test_rank_without_a_clock_is_told(tmp_path: Path) -> None:
    path = TimedJob(late=late).write(tmp_path / "a", monotonic_start_ns=None)
    assert "launches of ranks whose clock is not known, not paired: 24" in last_line(path)


def test_times_of_a_device_are_said_to_be_the_hosts(tmp_path: Path) -> None:
    path = TimedJob(late=late).write(tmp_path / "a", device="cuda")
    assert "times are the host's" in last_line(path)


def test_shadows_and_reduce_scatters_are_listed_apart(tmp_path: Path) -> None:
    job = TimedJob(late=late)
    rows = changed(job.rows(), 1, 3, kind="shadow")
    rows["buckets"] += [
        {**row, "kind": "reduce_scatter", "collective_seq": 100 + row["collective_seq"]}
        for row in rows["buckets"]
        if row["step"] == 0 and row["bucket_index"] == 0
    ]
    path = job.write(tmp_path / "a", rows)
    answer = bucket_json(path)
    assert [(o["kind"], o["bucket_index"], o["launch_count"]) for o in answer["other_buckets"]] == [
        ("reduce_scatter", 0, 2),
        ("shadow", 0, 1),
        ("shadow", 1, 1),
        ("shadow", 2, 1),
    ]
    assert answer["groups"][0]["reduction_count"] == 9
    assert "Not in the answers above" in timing(path, "--buckets").stdout


def test_shadows_of_a_rank_that_has_joined_lie_in_no_pass_of_its_own(tmp_path: Path) -> None:
    job = TimedJob(late=late)
    rows = job.rows()
    last = next(row for row in rows["buckets"] if (row["rank"], row["step"]) == (0, 3))
    later = {name: last[name] + 50 * MS for name in ("launched_ns", "done_ns")}
    rows["buckets"].append({**last, **later, "kind": "shadow", "collective_seq": 90})
    own = bucket_json(job.write(tmp_path / "a", rows))["totals"][0]
    assert own["exposed_share"] == 0.32


def test_hook_that_chains_collectives_is_paired_by_place(tmp_path: Path) -> None:
    job = TimedJob(late=late)
    rows = job.rows()
    for row in rows["buckets"]:
        row["hook_name"] = "powerSGD_hook.powerSGD_hook"
        row["collective_seq"] += 100 * row["rank"]
    path = job.write(tmp_path / "a", rows)
    assert bucket_json(path)["groups"][0]["straggler"] == 1
    assert "group 0 are paired by step and bucket" in last_line(path)


def test_bucket_with_very_many_parameters_keeps_its_count(tmp_path: Path) -> None:
    job = TimedJob(buckets=[["a.weight", "b.weight", "... and 5 more"]])
    [bucket] = bucket_json(job.write(tmp_path / "a"))["buckets"]
    assert (bucket["parameter_count"], bucket["parameter_fqns"]) == (7, ["a.weight", "b.weight"])


def test_csv_has_a_row_per_bucket_and_rank(path: Path) -> None:
    rows = list(csv.DictReader(timing(path, "--buckets", "--format", "csv").stdout.splitlines()))
    assert len(rows) == 6
    row = rows[2]
    assert (row["bucket_index"], row["rank"], row["first_parameter_fqn"]) == (
        "1",
        "0",
        "body.1.fc.weight",
    )
    assert (row["wait_ns"], row["transport_ns"]) == (str(30 * MS), str(2 * MS))


def test_table_has_a_line_per_bucket(path: Path) -> None:
    lines = timing(path, "--buckets").stdout.splitlines()
    [line] = [line for line in lines if "body.1.fc.weight and 1 more  " in line]
    assert " ".join(line.split()).endswith("1.00 ms 30.0 ms (rank 0) 2.00 ms 35% 22.0 ms")


def test_buckets_of_two_models_in_one_group_are_told_apart(path: Path, tmp_path: Path) -> None:
    job = TimedJob(late=late)
    rows = job.rows()
    rows["buckets"] += [
        {**row, "root": 1, "module_fqn": "trunk", "collective_seq": 100 + row["collective_seq"]}
        for row in TimedJob().rows()["buckets"]
    ]
    both = job.write(tmp_path / "b", rows)
    assert [(b["root"], b["ranks"][0]["wait_ns"]) for b in bucket_json(both)["buckets"]] == [
        (0, 0), (0, 30 * MS), (0, 30 * MS), (1, 0), (1, 0), (1, 0),
    ]  # fmt: skip
    assert "\nroot 1, trunk  0 " in timing(both, "--buckets").stdout
    assert "root 0" not in timing(path, "--buckets").stdout


def test_steps_can_be_chosen(path: Path) -> None:
    assert bucket_json(path, "--step", "1:3")["groups"][0]["reduction_count"] == 6
    assert bucket_json(path, "--step", "::2,1")["groups"][0]["reduction_count"] == 9
    assert (
        "holds no bucket of steps 9" in timing(path, "--buckets", "--step", "9", exit_code=2).stderr
    )


@pytest.mark.parametrize("text", ["x", "1:2:3:4", "::0", "-1", ""])
def test_text_that_is_no_slice_is_refused(text: str, path: Path) -> None:
    assert "is no slice" in timing(path, "--buckets", f"--step={text}", exit_code=2).stderr


def test_run_without_buckets_is_one_sentence(tmp_path: Path) -> None:
    result = timing(build_run(tmp_path / "a", {"steps": [{}]}), "--buckets", exit_code=2)
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert "holds no bucket; buckets come from DDP or FSDP2 models" in result.stderr


def test_reason_for_which_nothing_was_recorded_is_told(tmp_path: Path) -> None:
    groups = [{"name": "0", "unobserved": "its gradients are on a device"}]
    result = timing(build_run(tmp_path / "a", {"groups": groups}), "--buckets", exit_code=2)
    assert result.stderr.endswith("holds no bucket; its gradients are on a device\n")


def test_order_of_rows_changes_nothing(path: Path, tmp_path: Path) -> None:
    rows = {table: of_table[::-1] for table, of_table in TimedJob(late=late).rows().items()}
    assert bucket_json(TimedJob().write(tmp_path / "b", rows)) == bucket_json(path)


@pytest.mark.slow
def test_large_run_is_answered_at_once(tmp_path: Path) -> None:
    buckets = [[f"body.{n}.weight"] for n in range(10)]
    job = TimedJob(rank_count=64, step_count=200, buckets=buckets, late=late)
    path = job.write(tmp_path / "a")
    began = time.monotonic()
    [group] = bucket_json(path)["groups"]
    assert time.monotonic() - began < 20
    assert (group["straggler"], group["reduction_count"]) == (1, 2000)
