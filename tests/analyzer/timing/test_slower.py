"""`analyzer diff --timing`: what got slower, judged against the spread within the two runs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gradtrace_analyzer.cli import analyzer
from gradtrace_analyzer.timing.series import RunSeries, Samples, TimedPlace
from gradtrace_analyzer.timing.slower import Compared, compared_times
from support.synthetic_runs.bucket_times import MS, TimedJob
from support.synthetic_runs.builder import build_run
from support.synthetic_runs.stage_times import USUAL, StagedJob


def diff(*arguments: object) -> Result:
    return CliRunner().invoke(analyzer, ["diff", "--timing", *map(str, arguments)])


def timing_of(baseline: Path, candidate: Path, *options: object) -> dict[str, Any]:
    result = diff(baseline, candidate, "--format", "json", *options)
    answer = json.loads(result.stdout)["timing"]
    print(answer["explanation"])
    assert isinstance(answer, dict)
    return answer


def noisy(slow: Callable[[int, str], float] = lambda *_: 0, seed: int = 0) -> StagedJob:
    """Times with 10% of noise, and what `slow(stage, kind)` adds, in milliseconds."""
    chance = random.Random(seed)

    def took(stage: int, step: int, kind: str, microbatch: int) -> float:
        first = 4 if step == 0 else 1  # it warms up
        return (USUAL[kind] * chance.uniform(0.9, 1.1) + slow(stage, kind)) * first

    return StagedJob(took=took, steps=12)


def weight_half_of_1(stage: int, kind: str) -> float:
    return 29.0 * ((stage, kind) == (1, "backward_weight"))


def samples(*values: float) -> RunSeries:
    """A run in which the optimizer of rank 0 took so many milliseconds, step by step."""
    place = {TimedPlace("optimizer", 0): Samples(tuple(ms * MS for ms in values), 1)}
    return RunSeries(place, tuple(range(1, len(values) + 1)), 0, False)


def judged(baseline: RunSeries, candidate: RunSeries) -> tuple[Compared, str]:
    found = compared_times(baseline, candidate)
    [change] = found.changes
    return found, change.verdict


def test_stage_kind_module_and_node_that_got_slower_are_named(tmp_path: Path) -> None:
    baseline = noisy().write(tmp_path / "a")
    candidate = noisy(weight_half_of_1, seed=1).write(tmp_path / "b")
    answer = timing_of(baseline, candidate)
    assert answer["verdict"] == "slower"
    [cause] = answer["slower"]
    assert (cause["what"], cause["stage_index"], cause["kind"]) == ("stage", 1, "backward_weight")
    assert (cause["baseline_count"], cause["candidate_count"]) == (11, 11)
    assert cause["difference_ns"] == pytest.approx(29 * MS, rel=0.02)
    assert 0 < cause["spread_ns"] < 0.5 * MS
    inside = cause["inside"]
    assert (inside["what"], inside["module_fqn"], inside["name"]) == ("node", "mlp", "AddmmBackward0")  # fmt: skip
    said = diff(baseline, candidate).stdout
    assert "Stage 1's weight half takes 32.0 ms a microbatch, 2.9" in said
    assert "module mlp, AddmmBackward0 (30." in said
    assert "Step 0 of both, the first recorded, is left out" in said


def test_what_got_faster_is_told_as_well(tmp_path: Path) -> None:
    baseline = noisy(weight_half_of_1).write(tmp_path / "a")
    answer = timing_of(baseline, noisy(seed=1).write(tmp_path / "b"))
    assert (answer["verdict"], answer["slower"]) == ("faster", [])
    assert [cause["kind"] for cause in answer["faster"]] == ["backward_weight"]


def test_two_runs_of_one_job_differ_in_nothing(tmp_path: Path) -> None:
    answer = timing_of(noisy().write(tmp_path / "a"), noisy(seed=1).write(tmp_path / "b"))
    assert answer["verdict"] == "same"
    assert (answer["slower"], answer["faster"]) == ([], [])
    assert "No place takes longer or shorter itself, beyond the spread." in answer["explanation"]


def test_slow_transfer_is_a_cause_and_waiting_for_a_slow_stage_is_none(tmp_path: Path) -> None:
    usual = StagedJob(steps=10).write(tmp_path / "a")
    bad = StagedJob(steps=10, transfer=lambda a, b, _: 15 if (a, b) == (1, 2) else 0.1)
    [cause] = timing_of(usual, bad.write(tmp_path / "b"))["slower"]
    assert (cause["what"], cause["kind"]) == ("transfer", "activations")
    assert (cause["other_stage"], cause["stage_index"]) == (1, 2)
    late = StagedJob(steps=10, took=lambda s, _, k, __: 20.0 if (s, k) == (1, "forward") else USUAL[k])  # fmt: skip
    answer = timing_of(usual, late.write(tmp_path / "c"))
    [cause] = answer["slower"]
    assert (cause["what"], cause["kind"], cause["inside"]["name"]) == ("stage", "forward", "Mlp")
    waiting = [r for r in answer["rows"] if (r["what"], r["verdict"]) == ("receive", "slower")]
    assert {(row["other_stage"], row["stage_index"]) for row in waiting} >= {(1, 2)}


def test_job_without_stages_names_rank_module_and_node(tmp_path: Path) -> None:
    def write(path: Path, slow: float) -> Path:
        chance = random.Random(str(path.name))
        rows = TimedJob(step_count=12).rows()
        rows["node_events"], rows["module_calls"] = [], []
        for step in range(12):
            for rank in range(2):
                at = {"rank": rank, "step": step, "root": 0, "module_fqn": "body.1.fc", "call_index": 0}  # fmt: skip
                start = 1_000_000_000 + 100 * MS * step
                took = round((3 * chance.uniform(0.9, 1.1) + slow * (rank == 1)) * MS)
                times = {"start_ns": start, "end_ns": start + took}
                rows["node_events"].append(
                    {**at, **times, "backward_index": 0, "event_index": 0, "node_name": "DragBackward"}
                    | {"occurrence": 0, "phase": "backward", "outcome": "ok"}
                )  # fmt: skip
                rows["module_calls"].append(
                    {**at, "start_ns": start, "end_ns": start + 2 * MS, "phase": "forward", "depth": 0}
                    | {"module_class": "Linear"}
                )  # fmt: skip
        return TimedJob(step_count=12).write(path, rows)

    baseline, candidate = write(tmp_path / "a", 0), write(tmp_path / "b", 30)
    [cause] = timing_of(baseline, candidate)["slower"]
    assert (cause["what"], cause["name"], cause["module_fqn"]) == ("node", "DragBackward", "body.1.fc")  # fmt: skip
    assert (cause["ranks"], cause["stage_index"]) == ([1], None)
    assert (
        "DragBackward of module body.1.fc on rank 1 takes 33." in diff(baseline, candidate).stdout
    )


def test_wait_for_a_bucket_is_told_and_its_transport_is_a_cause(tmp_path: Path) -> None:
    usual = TimedJob(step_count=10).write(tmp_path / "a")
    late = TimedJob(step_count=10, late=lambda rank, _, bucket: 30 * ((rank, bucket) == (1, 1)))
    rows = timing_of(usual, late.write(tmp_path / "b"))["rows"]
    waits = [r for r in rows if (r["what"], r["verdict"]) == ("bucket_wait", "slower")]
    assert {(row["name"], *row["ranks"]) for row in waits} == {
        ("body.1.fc.weight", 0),
        ("body.0.fc.weight", 0),
    }
    slow = TimedJob(step_count=10).rows()
    for row in slow["buckets"]:
        row["done_ns"] += 9 * MS * (row["bucket_index"] == 2)
    causes = timing_of(usual, TimedJob(step_count=10).write(tmp_path / "c", slow))["slower"]
    assert [(c["what"], c["name"]) for c in causes] == [("bucket_transport", "body.0.fc.weight")]


def test_time_between_steps_is_told(tmp_path: Path) -> None:
    def write(path: Path, gap: int) -> Path:
        steps = [
            {"step": n, "start_ns": n * (50 + gap) * MS, "end_ns": (n * (50 + gap) + 50) * MS}
            | {"forward_ns": 10 * MS, "backward_ns": 20 * MS, "optimizer_ns": 5 * MS}
            for n in range(10)
        ]
        return build_run(path, {"steps": steps})

    [cause] = timing_of(write(tmp_path / "a", 1), write(tmp_path / "b", 30))["slower"]
    assert (cause["what"], cause["baseline_ns"], cause["candidate_ns"]) == ("between", MS, 30 * MS)


@pytest.mark.parametrize(
    "baseline, candidate, verdict",
    [
        ([10], [50], "no_verdict"),
        ([10, 10], [50, 50, 50], "no_verdict"),
        ([10, 11, 10], [50, 52, 51], "slower"),
        ([10, 11, 10], [11.5, 12, 12.5], "same"),  # within three ranges
        ([10, 11, 10, 60], [50, 52, 51, 53], "same"),  # one step lies beyond the others
        ([10, 11] * 8, [12, 12.5] * 8, "slower"),
        ([10, 11] * 8, [10.4, 11] * 8, "same"),
        ([10] * 16, [10.4] * 16, "same"),  # steadily so, but 4%
        ([10, 20] * 8, [11, 21] * 8, "same"),  # 7%, in a spread of 50%
        ([50] * 16, [20] * 16, "faster"),
        ([0.01] * 16, [0.09] * 16, "same"),  # not worth a word
        ([10] * 15 + [300], [12] * 15 + [13], "slower"),  # whatever one step did
    ],
)
def test_verdict_follows_from_the_spread(
    baseline: list[float], candidate: list[float], verdict: str
) -> None:
    assert judged(samples(*baseline), samples(*candidate))[1] == verdict


def test_noise_alone_is_hardly_ever_a_verdict() -> None:
    chance = random.Random(3)
    found = 0
    for _ in range(400):
        a, b = ([10 * chance.gauss(1, 0.2) for _ in range(10)] for _ in range(2))
        found += judged(samples(*a), samples(*b))[1] != "same"
    assert found <= 2


def test_too_few_steps_are_said_to_be_so(tmp_path: Path) -> None:
    one = StagedJob(steps=1).write(tmp_path / "a")
    answer = timing_of(one, StagedJob(steps=9).write(tmp_path / "b"))
    assert answer["verdict"] == "no_verdict"
    assert "the baseline has 1 step and the candidate 8 steps" in answer["explanation"]
    alone = timing_of(one, StagedJob(steps=1).write(tmp_path / "again"))
    assert alone["explanation"].startswith("No verdict on times: the baseline has 1 step and")
    few = timing_of(StagedJob(steps=5).write(tmp_path / "c"), StagedJob(steps=5).write(tmp_path / "d"))  # fmt: skip
    assert "With fewer than 8 steps (4 and 4)" in few["explanation"]


def test_machine_that_is_slower_altogether_is_said_to_be_so(tmp_path: Path) -> None:
    slower = StagedJob(steps=10, took=lambda _, __, kind, ___: 1.5 * USUAL[kind])
    answer = timing_of(StagedJob(steps=10).write(tmp_path / "a"), slower.write(tmp_path / "b"))
    assert answer["common_ratio"] == pytest.approx(1.5)
    assert "Nearly everything takes longer (median 1.50 times)" in answer["explanation"]


def test_recording_in_another_way_is_told(tmp_path: Path) -> None:
    job = StagedJob(stages=2, steps=9)
    other = job.write(tmp_path / "b", settings={"detail": "nodes", "summary": "off", "ranks": []})
    answer = timing_of(job.write(tmp_path / "a"), other)
    assert "different GRADTRACE_SUMMARY" in answer["explanation"]


def test_exit_status_and_verdict_are_about_values_alone(tmp_path: Path) -> None:
    baseline, slow = noisy().write(tmp_path / "a"), noisy(weight_half_of_1).write(tmp_path / "b")
    alone = CliRunner().invoke(analyzer, ["diff", str(baseline), str(slow), "--format", "json"])
    both = diff(baseline, slow, "--format", "json")
    answer = json.loads(both.stdout)
    assert answer.pop("timing")["verdict"] == "slower"
    assert (both.exit_code, answer) == (alone.exit_code, json.loads(alone.stdout))


def test_long_table_is_cut_to_the_top(tmp_path: Path) -> None:
    slower = StagedJob(steps=10, took=lambda _, __, kind, ___: 3 * USUAL[kind])
    runs = StagedJob(steps=10).write(tmp_path / "a"), slower.write(tmp_path / "b")
    whole, cut = diff(*runs, "--top", 100).stdout, diff(*runs, "--top", 2).stdout
    assert "(--top)" in cut and "(--top)" not in whole
    assert len(whole.splitlines()) > len(cut.splitlines()) + 5


def test_rank_that_one_run_lacks_is_no_other_schedule(tmp_path: Path) -> None:
    whole = StagedJob().write(tmp_path / "a")
    lacking = StagedJob().write(tmp_path / "b", absent=(1,))
    said = CliRunner().invoke(analyzer, ["diff", str(whole), str(lacking)]).output
    assert "lacks rank 1 of 4" in said
    assert "scheduled otherwise" not in said
