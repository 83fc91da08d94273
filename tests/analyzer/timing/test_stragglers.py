"""`analyzer timing --buckets`: the rank that the others wait for, and where it falls behind."""

from pathlib import Path
from typing import Any

import pytest

from support.synthetic_runs.bucket_times import MS, TimedJob, bucket_json, timing


def group_of(path: Path, *options: object) -> dict[str, Any]:
    [group] = bucket_json(path, *options)["groups"]
    assert isinstance(group, dict)
    return group


def late_from_bucket_1(rank: int, step: int, bucket: int) -> float:
    return 30 + step if (rank, bucket) == (1, 1) else 0


def test_late_rank_is_named_with_its_lag_and_the_place_where_it_falls_behind(
    tmp_path: Path,
) -> None:
    text = timing(TimedJob(late=late_from_bucket_1).write(tmp_path / "a"), "--buckets").stdout
    assert text.splitlines()[0] == (
        "Rank 1 launches last in 8 of 12 reductions of group 0, 31.5 ms after the first rank "
        "(median; largest 33.0 ms). It falls behind between bucket 0 (head.weight and 1 more) and bucket 1 "
        "(body.1.fc.weight and 1 more): look at the backward of body.1.fc, and of what runs between the two. "
        "Rank 0 waits for it 31.5 ms in a step, 32% of its time."
    )


def test_recordings_that_began_at_different_times_are_compared_on_one_clock(tmp_path: Path) -> None:
    group = group_of(TimedJob(late=late_from_bucket_1).write(tmp_path / "a"))
    by_rank = {lag["rank"]: lag for lag in group["lags"]}
    assert by_rank[0]["pass_lag_ns"] == 0
    assert by_rank[1]["largest_late_ns"] == 33 * MS
    assert by_rank[1]["largest_step"] == 3


def test_lags_that_are_too_small_to_judge_are_in_no_median(tmp_path: Path) -> None:
    job = TimedJob(late=lambda rank, _, bucket: {0: 0.5, 1: 30}.get(bucket, 0) * (rank == 1))
    lag = group_of(job.write(tmp_path / "a"))["lags"][1]
    assert (lag["last_count"], lag["late_count"]) == (12, 8)
    assert lag["median_late_ns"] == 30.5 * MS


def test_rank_that_is_late_for_the_last_bucket_alone_is_found(tmp_path: Path) -> None:
    buckets = [[f"body.{n}.weight"] for n in range(10)]
    job = TimedJob(
        buckets=buckets, late=lambda rank, _, bucket: 40 * ((rank, bucket) == (1, 9)), step_count=3
    )
    group = group_of(job.write(tmp_path / "a"))
    assert group["straggler"] == 1
    assert group["lags"][1]["late_count"] == 3 and group["reduction_count"] == 30
    assert group["onset"]["bucket"]["bucket_index"] == 9
    assert group["onset"]["previous"]["bucket_index"] == 8


def test_rank_that_enters_backward_late_is_sent_to_its_forward(tmp_path: Path) -> None:
    job = TimedJob(late=lambda rank, _, bucket: 25 * ((rank, bucket) == (0, -1)))
    path = job.write(tmp_path / "a")
    group = group_of(path)
    assert (group["straggler"], group["onset"]["place"]) == (0, "begin")
    assert "enters the backward pass 25.0 ms after the first rank already" in group["explanation"]


def test_rank_that_falls_behind_in_the_first_bucket_is_late_since_the_start_of_the_pass(
    tmp_path: Path,
) -> None:
    job = TimedJob(late=lambda rank, _, bucket: 25 * ((rank, bucket) == (0, 0)))
    group = group_of(job.write(tmp_path / "a"))
    assert (group["straggler"], group["onset"]["place"]) == (0, "bucket")
    assert (
        "between the start of the backward pass and bucket 0 (head.weight" in group["explanation"]
    )


def test_rank_that_is_slower_everywhere_falls_behind_little_by_little(tmp_path: Path) -> None:
    job = TimedJob(late=lambda rank, *_: 8 * (rank == 1), step_count=8)
    group = group_of(job.write(tmp_path / "a"))
    assert (group["straggler"], group["onset"]["place"]) == (1, "gradual")
    assert "little by little" in group["explanation"]


def test_first_bucket_that_is_late_in_most_passes_counts_not_that_of_one(tmp_path: Path) -> None:
    def late(rank: int, step: int, bucket: int) -> float:
        return 30 * (rank == 1 and bucket == (0 if step == 0 else 2))

    group = group_of(TimedJob(late=late, step_count=5).write(tmp_path / "a"))
    assert group["onset"]["bucket"]["bucket_index"] == 2


def test_layout_of_most_late_passes_says_where(tmp_path: Path) -> None:
    rows = TimedJob(late=late_from_bucket_1, step_count=4).rows()
    for row in rows["buckets"]:
        if row["step"] == 0:  # before the rebuild the parameters lay elsewhere
            row["parameter_fqns"] = ["all.of.them"]
        else:
            row["layout_index"] = 1
    group = group_of(TimedJob(step_count=4).write(tmp_path / "a", rows))
    assert group["onset"]["bucket"]["layout_index"] == 1
    assert group["onset"]["modules"] == ["body.1.fc"]
    assert group["onset"]["pass_count"] == 3


@pytest.mark.parametrize("lag_ms, named", [(4.9, False), (5.1, True)])
def test_lag_under_5_percent_of_the_step_is_not_judged(
    lag_ms: float, named: bool, tmp_path: Path
) -> None:
    job = TimedJob(late=lambda rank, _, bucket: lag_ms * ((rank, bucket) == (1, 1)), step_count=8)
    group = group_of(job.write(tmp_path / "a"))
    assert group["straggler"] == (1 if named else None)
    if not named:
        assert group["reason"] == "small"
        assert "beyond 5.00 ms (5% of the median step, 100.0 ms)" in group["explanation"]


@pytest.mark.parametrize("lag_ms, named", [(0.9, False), (1.1, True)])
def test_lag_under_a_millisecond_is_not_judged(lag_ms: float, named: bool, tmp_path: Path) -> None:
    job = TimedJob(late=lambda rank, _, bucket: lag_ms * ((rank, bucket) == (1, 1)), step_count=8)
    rows = job.rows()
    for row in rows["steps"]:
        row["end_ns"] = row["start_ns"] + 2 * MS
    group = group_of(job.write(tmp_path / "a", rows))
    assert group["straggler"] == (1 if named else None)


@pytest.mark.parametrize("step_count, named", [(7, False), (8, True)])
def test_few_passes_name_nobody_for_a_lag_that_may_be_chance(
    step_count: int, named: bool, tmp_path: Path
) -> None:
    job = TimedJob(
        late=lambda rank, _, bucket: 24 * ((rank, bucket) == (1, 1)), step_count=step_count
    )
    group = group_of(job.write(tmp_path / "a"))
    assert group["straggler"] == (1 if named else None)
    if not named:
        assert "beyond 25.0 ms (in fewer than 8 passes less may be chance)" in group["explanation"]


@pytest.mark.parametrize("apart_ms, named", [(9.0, True), (11.0, False)])
def test_lag_within_three_times_what_lies_between_leaving_ranks_is_not_judged(
    apart_ms: float, named: bool, tmp_path: Path
) -> None:
    job = TimedJob(
        late=lambda rank, _, bucket: 30 * ((rank, bucket) == (1, 1)),
        leaves=lambda rank, *_: apart_ms * (rank == 0),
    )
    group = group_of(job.write(tmp_path / "a"))
    assert group["leaving_ns"] == apart_ms * MS
    assert group["straggler"] == (1 if named else None)
    if not named:
        assert "33.0 ms (3 times the 11.0 ms between ranks" in group["explanation"]


def test_lags_that_are_split_between_ranks_name_nobody(tmp_path: Path) -> None:
    job = TimedJob(late=lambda rank, step, bucket: 30 * (bucket == 1 and step % 2 == rank))
    group = group_of(job.write(tmp_path / "a"))
    assert (group["straggler"], group["reason"]) == (None, "split")
    assert "split between ranks" in group["explanation"]
    assert "rank 0 in 2, rank 1 in 2" in group["explanation"]


def test_slight_majority_is_a_split_too(tmp_path: Path) -> None:
    job = TimedJob(
        step_count=9, late=lambda rank, step, bucket: 30 * (bucket == 1 and step % 2 == rank)
    )
    group = group_of(job.write(tmp_path / "a"))
    assert (group["straggler"], group["reason"]) == (None, "split")


def test_lag_of_one_step_names_nobody_and_is_told(tmp_path: Path) -> None:
    job = TimedJob(late=lambda rank, step, bucket: 40 * ((rank, step, bucket) == (0, 2, 1)))
    group = group_of(job.write(tmp_path / "a"))
    assert (group["straggler"], group["reason"]) == (None, "small")
    assert "Beyond it: rank 0 in 1 of 4 passes (largest 40.0 ms, step 2)." in group["explanation"]


def test_one_backward_pass_is_too_few(tmp_path: Path) -> None:
    path = TimedJob(late=late_from_bucket_1).write(tmp_path / "a")
    group = group_of(path, "--step", "2")
    assert (group["straggler"], group["reason"]) == (None, "few")
    assert "1 backward pass is too few" in group["explanation"]


def test_two_late_ranks_of_eight_are_both_told(tmp_path: Path) -> None:
    job = TimedJob(
        rank_count=8,
        step_count=8,
        late=lambda rank, _, bucket: {3: 30, 5: 20}.get(rank, 0) * (bucket == 1),
    )
    group = group_of(job.write(tmp_path / "a"))
    assert (group["straggler"], group["also_late"]) == (3, [5])
    assert "Rank 5 is late as well." in group["explanation"]
    assert (
        "The others wait for it 30.0 ms in a step (median of 7 ranks; most on rank 0: 30.0 ms"
        in (group["explanation"])
    )


def test_rank_ahead_of_all_others_makes_no_stragglers_of_them(tmp_path: Path) -> None:
    job = TimedJob(rank_count=4, late=lambda rank, _, bucket: 30 * (rank != 2 and bucket == -1))
    group = group_of(job.write(tmp_path / "a"))
    assert (group["straggler"], group["reason"]) == (None, "most")
    assert (
        "3 of 4 ranks are late, by 30.0 ms (median): rank 2 launches ahead."
        in (group["explanation"])
    )


def test_each_group_has_its_own_answer(tmp_path: Path) -> None:
    rows = TimedJob(late=late_from_bucket_1).rows()
    for table, name in (("buckets", "group"), ("groups", "name")):
        rows[table] += [{**row, name: "7"} for row in TimedJob().rows()[table]]
    answer = bucket_json(TimedJob().write(tmp_path / "a", rows))
    assert [(g["group"], g["straggler"]) for g in answer["groups"]] == [("0", 1), ("7", None)]
    # A pass is exposed once, however many groups reduce in it.
    assert answer["totals"][0]["exposed_ns"] == 33.5 * MS


def test_groups_of_one_name_but_different_ranks_are_told_apart(tmp_path: Path) -> None:
    def late(rank: int, step: int, bucket: int) -> float:
        return 30 * (bucket == 1 and rank in (1, 2, 3))

    job = TimedJob(rank_count=4, late=late)
    rows = job.rows()
    for row in rows["groups"]:
        row["ranks"] = "[0, 1]" if row["rank"] < 2 else "[2, 3]"
    groups = bucket_json(job.write(tmp_path / "a", rows))["groups"]
    # Ranks 2 and 3 are late together, and nobody of their group waits for them.
    assert [(g["ranks"], g["straggler"]) for g in groups] == [([0, 1], 1), ([2, 3], None)]


def test_node_that_takes_the_time_is_named(tmp_path: Path) -> None:
    job = TimedJob(late=late_from_bucket_1)
    rows = job.rows()
    rows["node_events"] = [
        {"rank": rank, "step": step, "backward_index": 0, "event_index": n, "node_name": name}
        | {"root": 0, "module_fqn": "body.1", "call_index": 0, "occurrence": 0}
        | {"start_ns": job.own(rank, 1050 + 100 * step + n), "end_ns": 0}
        for rank in range(2)
        for step in range(4)
        for n, name in enumerate(("ReluBackward0", "DragBackward", "AddmmBackward0"))
    ]
    for row in rows["node_events"]:
        took = 30 if row["rank"] == 1 and row["node_name"] == "DragBackward" else 1
        row["end_ns"] = row["start_ns"] + took * MS
    node = group_of(job.write(tmp_path / "a", rows))["onset"]["node"]
    assert (node["node_name"], node["module_fqn"]) == ("DragBackward", "body.1")
    assert (node["own_ns"], node["other_rank"], node["other_ns"]) == (30 * MS, 0, MS)
