"""`analyzer timing --stages`: which stage is slow and in which half, who is idle, the chart of a step."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradtrace_analyzer.timing.gantt import Bar, Lane, drawn
from support.synthetic_runs.bucket_times import MS, timing
from support.synthetic_runs.builder import build_run
from support.synthetic_runs.stage_times import USUAL, StagedJob


def stages_of(path: Path, *options: object) -> dict[str, Any]:
    answer = json.loads(timing(path, "--stages", "--format", "json", *options).stdout)["stages"]
    assert isinstance(answer, dict)
    return answer


def slow_in(stage: int, kind: str, ms: float = 20) -> StagedJob:
    return StagedJob(took=lambda s, _, k, __: ms if (s, k) == (stage, kind) else USUAL[k])


def test_kinds_have_count_median_95th_percentile_and_total(tmp_path: Path) -> None:
    def took(stage: int, step: int, kind: str, microbatch: int) -> float:
        return 2 + (stage == 1) * microbatch if kind == "forward" else USUAL[kind]

    answer = stages_of(StagedJob(stages=2, took=took).write(tmp_path / "a"))
    forward = next(k for k in answer["kinds"] if (k["stage_index"], k["kind"]) == (1, "forward"))
    assert (forward["count"], forward["ranks"]) == (20, [1])  # 5 steps of 4: the first is left out
    assert (forward["median_ns"], forward["p95_ns"]) == (3.5 * MS, 5 * MS)
    assert forward["total_ns"] == 5 * (2 + 3 + 4 + 5) * MS
    assert (answer["warm_up_step"], answer["steps"]) == (0, [1, 2, 3, 4, 5])


@pytest.mark.parametrize(
    "stage, kind, half",
    [
        (2, "forward", "Its forward makes it so: 20.0 ms, against 2.00 ms in the others."),
        (1, "backward_input", "Its input half makes it so: 20.0 ms, against 3.00 ms"),
        (3, "backward_weight", "Its weight half makes it so: 20.0 ms, against 3.00 ms"),
    ],
)
def test_slow_stage_is_named_with_the_part_that_makes_it_so(
    stage: int, kind: str, half: str, tmp_path: Path
) -> None:
    path = slow_in(stage, kind).write(tmp_path / "a")
    slow = stages_of(path)["slowest"]
    assert (slow["stage_index"], slow["kind"], slow["reason"]) == (stage, kind, None)
    assert (slow["sample_count"], slow["slower_count"]) == (20, 20)
    said = timing(path, "--stages").stdout
    assert f"Stage {stage} (rank {stage}) is the slowest" in said
    assert half in said


def test_first_stage_that_runs_whole_backwards_is_held_against_both_halves_of_the_others(
    tmp_path: Path,
) -> None:
    path = slow_in(0, "backward_full").write(tmp_path / "a")
    slow = stages_of(path)["slowest"]
    assert (slow["stage_index"], slow["kind"]) == (0, "backward")
    assert (slow["parts"][0]["own_ns"], slow["parts"][0]["other_ns"]) == (20 * MS, 6 * MS)


def test_node_and_module_that_take_the_time_are_named(tmp_path: Path) -> None:
    place = stages_of(slow_in(1, "backward_weight").write(tmp_path / "a"))["slowest"]["place"]
    assert (place["what"], place["name"], place["module_fqn"]) == ("node", "AddmmBackward0", "mlp")
    assert (place["own_ns"], place["other_ns"]) == (pytest.approx(19.2 * MS), 2.88 * MS)
    place = stages_of(slow_in(1, "forward").write(tmp_path / "b"))["slowest"]["place"]
    # Not the module around it, whose own time is little.
    assert (place["what"], place["name"], place["module_fqn"]) == ("module", "Mlp", "mlp")


def test_stage_whose_time_lies_between_its_nodes_is_named_without_one(tmp_path: Path) -> None:
    rows = slow_in(1, "backward_weight").rows()
    for row in rows["node_events"]:
        row["end_ns"] = row["start_ns"] + MS // 10
    path = StagedJob().write(tmp_path / "a", rows)
    assert stages_of(path)["slowest"]["place"] is None
    assert "No single module or Node explains it" in timing(path, "--stages").stdout


@pytest.mark.parametrize("ms, named", [(2.7, False), (2.9, True)])
def test_stage_that_takes_less_than_a_tenth_longer_is_not_named(
    ms: float, named: bool, tmp_path: Path
) -> None:
    slow = stages_of(slow_in(2, "forward", ms).write(tmp_path / "a"))["slowest"]
    assert (slow["is_slow"], slow["reason"]) == (named, None if named else "even")


def test_stage_that_is_slow_now_and_then_is_not_named(tmp_path: Path) -> None:
    # Every stage is slow in its turn; stage 1 in more than half of the steps.
    def took(stage: int, step: int, kind: str, microbatch: int) -> float:
        slow = 1 if step % 5 < 3 else 3
        return USUAL[kind] * (3 if stage == slow else 1)

    path = StagedJob(took=took, steps=11).write(tmp_path / "a")
    slow = stages_of(path)["slowest"]
    assert (slow["stage_index"], slow["is_slow"], slow["reason"]) == (1, False, "unsure")
    assert "may be chance" in timing(path, "--stages").stdout


def test_machine_that_is_slow_for_a_while_makes_no_slow_stage(tmp_path: Path) -> None:
    def took(stage: int, step: int, kind: str, microbatch: int) -> float:
        return USUAL[kind] * (10 if step > 3 else 1)

    assert not stages_of(StagedJob(took=took).write(tmp_path / "a"))["slowest"]["is_slow"]


def test_few_microbatches_name_nobody(tmp_path: Path) -> None:
    path = slow_in(1, "forward").write(tmp_path / "a")
    slow = stages_of(path, "--step", "2")["slowest"]
    assert (slow["is_slow"], slow["reason"], slow["sample_count"]) == (False, "few", 4)
    assert "4 microbatches is too few" in timing(path, "--stages", "--step", "2").stdout


def test_bubble_is_told_by_what_was_waited_for(tmp_path: Path) -> None:
    answer = stages_of(slow_in(1, "forward").write(tmp_path / "a"))
    idle = {own["rank"]: own for own in answer["idle"]}
    for own in idle.values():
        told = sum(wait["wait_ns"] for wait in own["waits"]) + own["early_ns"] + own["other_ns"]
        assert told == pytest.approx(own["bubble_ns"], abs=10)
        assert own["busy_ns"] + own["bubble_ns"] == pytest.approx(own["window_ns"], abs=10)
        assert own["other_ns"] < 0.01 * own["window_ns"]
    assert idle[1]["bubble_share"] < 0.4 < idle[3]["bubble_share"]
    longest = idle[2]["waits"][0]
    assert (longest["kind"], longest["other_stage"]) == ("receive_activations", 1)
    assert idle[0]["waits"][0]["kind"] == "receive_gradients"
    assert idle[3]["early_ns"] > 0


def test_slow_link_is_told_apart_from_a_slow_sender(tmp_path: Path) -> None:
    bad = StagedJob(transfer=lambda a, b, _: 15 if (a, b) == (1, 2) else 0.1)
    answer = stages_of(bad.write(tmp_path / "a"))
    link = answer["slow_link"]
    assert (link["what"], link["from_stage"], link["to_stage"]) == ("activations", 1, 2)
    # A receive that began before the sender had made it takes all of the transfer.
    assert 12 * MS < link["transfer_ns"] <= 15 * MS
    assert not answer["slowest"]["is_slow"]
    answer = stages_of(slow_in(1, "forward").write(tmp_path / "b"))
    assert answer["slow_link"] is None
    late = next(h for h in answer["hand_overs"] if (h["from_stage"], h["to_stage"]) == (1, 2))
    assert late["late_ns"] > 15 * MS > late["transfer_ns"]


def test_clocks_of_hosts_are_laid_over_each_other_by_what_stages_send(tmp_path: Path) -> None:
    job = StagedJob(transfer=lambda *_: 2)
    alone = stages_of(job.write(tmp_path / "a"))
    apart = replace(job, hosts=("a", "a", "b", "b"), ahead={"b": 400.0}).write(tmp_path / "b")
    answer = stages_of(apart)
    [clock] = answer["clocks"]
    assert (clock["host"], clock["reference"]) == ("b", "a")
    assert clock["offset_ns"] == pytest.approx(400 * MS, abs=0.2 * MS)
    assert clock["error_ns"] == pytest.approx(2 * MS, abs=0.2 * MS)
    assert answer["window_ns"] == pytest.approx(alone["window_ns"], abs=0.3 * MS)
    assert "The clock of b was laid over that of a" in timing(apart, "--stages").stdout


def test_replicas_of_a_pipeline_are_told_apart(tmp_path: Path) -> None:
    one = StagedJob(stages=3).rows()
    two = StagedJob(stages=3, replicas=2)
    answer = stages_of(two.write(tmp_path / "a"))
    assert answer["pipelines"] == 2
    assert answer["kinds"][0]["ranks"] == [0, 1]
    assert answer["window_ns"] == stages_of(StagedJob(stages=3).write(tmp_path / "b", one))["window_ns"]  # fmt: skip
    assert [own["stages"] for own in answer["idle"]] == [[0], [0], [1], [1], [2], [2]]
    assert {h["count"] for h in answer["hand_overs"]} == {2 * 5 * 4}
    assert "of the first of 2 pipelines" in timing(two.write(tmp_path / "c"), "--stages").stdout


def test_chart_shows_a_typical_step_as_wide_as_asked(tmp_path: Path) -> None:
    job = StagedJob(took=lambda _, step, k, __: USUAL[k] * (5 if step == 3 else 1))
    said = timing(job.write(tmp_path / "a"), "--stages").stdout.splitlines()
    at = next(n for n, line in enumerate(said) if line.startswith("Step "))
    assert said[at].startswith("Step 1, ")
    lanes = said[at + 1 : at + 5]
    assert [line.split(" |")[0] for line in lanes] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert {len(line) for line in lanes} == {80}
    assert lanes[0].split("|")[1].startswith("F0")
    assert lanes[1].split("|")[1].startswith("..")
    assert set("FBIW") <= set("".join(line.split("|")[1] for line in lanes))
    assert max(map(len, said[at + 5 : at + 8])) <= 80  # the legend
    chosen = timing(job.write(tmp_path / "b"), "--stages", "--step", "3").stdout
    assert "Step 3, " in chosen


def test_chart_has_a_line_per_stage_where_a_rank_has_several(tmp_path: Path) -> None:
    rows = StagedJob(stages=4).rows()
    for table in rows.values():
        for row in table:
            row["rank"] = row["rank"] % 2 if "stage_index" in row else row["rank"]
    rows["module_calls"], rows["steps"] = [], [r for r in rows["steps"] if r["rank"] < 2]
    said = timing(StagedJob(stages=2).write(tmp_path / "a", rows), "--stages").stdout
    for label in ("rank 0 stage 0", "rank 0 stage 2", "rank 1 stage 1", "rank 1 stage 3"):
        assert f"\n{label} |" in said


@pytest.mark.parametrize(
    "bars, text",
    [
        ([("forward", 0, 0, 50), ("backward_full", 0, 50, 100)], "F0========B0========"),
        ([("forward", 12, 0, 10), ("receive_gradients", 0, 10, 100)], "F" + "=" + ":" * 18),
        ([("backward_weight", 1, 0, 3), ("backward_input", 1, 3, 10)], "WI" + " " * 18),
        ([("receive_activations", 3, 0, 100), ("forward", 3, 46, 48)], "........." + "F" + "." * 10),
        ([("forward", n, n, n + 1) for n in range(5)], "F" + " " * 19),
    ],
    ids=["side by side", "no room for the number", "short", "inside a wait", "several in a column"],
)  # fmt: skip
def test_letters_of_a_line(bars: list[tuple[str, int, int, int]], text: str) -> None:
    [line] = drawn([Lane(0, 0, tuple(Bar(*bar) for bar in bars))], 100, 20)
    assert line == text


def test_csv_has_a_row_per_stage_and_kind(tmp_path: Path) -> None:
    path = StagedJob(stages=2).write(tmp_path / "a")
    rows = list(csv.DictReader(timing(path, "--stages", "--format", "csv").stdout.splitlines()))
    assert [(row["stage_index"], row["kind"], row["count"]) for row in rows] == [
        ("0", "forward", "20"),
        ("0", "backward_full", "20"),
        ("1", "forward", "20"),
        ("1", "backward_input", "20"),
        ("1", "backward_weight", "20"),
    ]


def test_action_that_raised_or_never_ended_is_told_and_not_counted(tmp_path: Path) -> None:
    rows = StagedJob(stages=2).rows()
    forwards = [r for r in rows["stage_events"] if r["kind"] == "forward" and r["step"] == 5]
    forwards[0]["error"], forwards[1]["end_ns"] = "ValueError: no luck", None
    path = StagedJob(stages=2).write(tmp_path / "a", rows)
    answer = stages_of(path)
    assert answer["notes"] == ["actions that raised: 1", "actions that were never seen to end: 1"]
    assert sum(k["count"] for k in answer["kinds"] if k["kind"] == "forward") == 38


def test_recorders_own_share_is_told_where_it_matters(tmp_path: Path) -> None:
    rows = StagedJob(stages=2).rows()
    for row in rows["steps"]:
        row["recorder_ns"] = (row["end_ns"] - row["start_ns"]) // 4
    said = timing(StagedJob(stages=2).write(tmp_path / "a", rows), "--stages").stdout
    assert "The recorder itself took 25% of the steps" in said


def test_summary_has_the_headlines_of_the_stages(tmp_path: Path) -> None:
    said = timing(slow_in(2, "forward").write(tmp_path / "a")).stdout
    assert "Stage 2 (rank 2) is the slowest" in said
    assert "More of this: --stages." in said


def test_run_without_stages_is_one_sentence(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a", {"steps": [{"start_ns": 0, "end_ns": MS}]})
    result = timing(path, "--stages", exit_code=2)
    assert result.stdout == ""
    assert "holds no action of a pipeline stage" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    path = StagedJob(stages=2).write(tmp_path / "b")
    said = timing(path, "--stages", "--step", "90:", exit_code=2).stderr
    assert "of steps 90:; it holds those of steps 0-" in said and "GRADTRACE_DETAIL" not in said


def test_two_questions_at_a_time_are_refused(tmp_path: Path) -> None:
    path = StagedJob(stages=2).write(tmp_path / "a")
    assert "one at a time" in timing(path, "--stages", "--buckets", exit_code=2).stderr
