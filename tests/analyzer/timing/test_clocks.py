"""`analyzer timing --buckets` over several hosts, whose clocks have nothing in common."""

from pathlib import Path

from support.synthetic_runs.bucket_times import MS, TimedJob, bucket_json, timing

HOURS = 3 * 3600 * 1000


def late(rank: int, step: int, bucket: int) -> float:
    return 30 * ((rank, bucket) == (3, 1))


def test_hosts_are_laid_over_each_other_by_the_moments_of_leaving(tmp_path: Path) -> None:
    job = TimedJob(
        rank_count=4, late=late, hosts=("a", "a", "b", "b"), ahead={"a": 5, "b": HOURS + 0.25}
    )
    path = job.write(tmp_path / "a")
    answer = bucket_json(path)
    [group] = answer["groups"]
    assert group["straggler"] == 3
    assert {lag["rank"]: lag["pass_lag_ns"] for lag in group["lags"]} == {
        0: 0, 1: 0, 2: 0, 3: 30 * MS,
    }  # fmt: skip
    [clock] = answer["clocks"]
    assert (clock["host"], clock["reference"], clock["reduction_count"]) == ("b", "a", 12)
    assert clock["offset_ns"] == round((HOURS - 4.75) * MS)
    assert (
        "The clock of b was laid over that of a by the moments at which they left 12 reductions"
        in (timing(path, "--buckets").stdout)
    )


def test_spread_of_the_moments_is_told(tmp_path: Path) -> None:
    job = TimedJob(
        rank_count=2, hosts=("a", "b"), leaves=lambda rank, step, _: 2 * step * (rank == 1)
    )
    [clock] = bucket_json(job.write(tmp_path / "a"))["clocks"]
    assert clock["offset_ns"] == 3 * MS
    assert clock["spread_ns"] == 3 * MS  # quartiles of 0, 2, 4, 6, each three times


def test_one_host_needs_no_laying_over(tmp_path: Path) -> None:
    assert bucket_json(TimedJob().write(tmp_path / "a"))["clocks"] == []


def test_host_that_shares_no_reduction_with_the_first_goes_by_one_that_does(tmp_path: Path) -> None:
    hosts, ahead = ("a", "c", "b"), {"a": 0.0, "c": 1000.0, "b": 5000.0}
    job = TimedJob(rank_count=3, hosts=hosts, ahead=ahead)
    rows = job.rows()
    both = []
    for name, ranks in (("1", (0, 1)), ("2", (1, 2))):
        both += [{**row, "group": name} for row in rows["buckets"] if row["rank"] in ranks]
    rows["buckets"], rows["groups"] = both, []
    clocks = bucket_json(job.write(tmp_path / "a", rows))["clocks"]
    assert [(c["host"], c["reference"], c["offset_ns"] // MS) for c in clocks] == [
        ("c", "a", 1000),
        ("b", "a", 5000),
    ]
