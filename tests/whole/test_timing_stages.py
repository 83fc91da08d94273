"""A real pipeline of four ranks that is slow in one place, or dies in one: stage, half, module and Node are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradtrace_analyzer.runs.opening import open_run
from gradtrace_analyzer.sql.views import connect
from support.answers.commands import asked, told
from support.launching.launcher import run_job
from support.recordings.in_process import rows

JOB = Path(__file__).resolve().parents[1] / "support" / "jobs" / "slow_stages.py"
STEPS, MICROBATCHES = 11, 8
RECORDED = [step for step in range(STEPS) if step != 4]
SLOW_MS = 20


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all variants' runs, which one job has left."""
    folder = tmp_path_factory.mktemp("slow")
    variants = ("even", "weight", "forward", "receive", "killed")
    done = run_job(JOB, folder, STEPS, *variants, ranks=4, timeout=280)
    assert "Signal 9" in done.stderr, done.tails()
    return folder


def stages_of(run: Path) -> dict[str, Any]:
    answer = asked("timing", "--stages", run, "--format", "json", is_quiet=True)[1]["stages"]
    print(answer["explanation"])
    assert isinstance(answer, dict)
    return answer


def timing_of(runs: Path, candidate: str) -> dict[str, Any]:
    answer = asked("diff", "--timing", runs / "even", runs / candidate, "--format", "json")[1]
    print(answer["timing"]["explanation"])
    assert answer["verdict"] == "identical", answer["explanation"]
    timing = answer["timing"]
    assert isinstance(timing, dict)
    return timing


def test_stage_that_is_slow_in_its_weight_half_only_is_named_with_half_and_node(runs: Path) -> None:
    slow = stages_of(runs / "weight")["slowest"]
    assert (slow["is_slow"], slow["stage_index"], slow["ranks"]) == (True, 1, [1])
    assert slow["kind"] == "backward_weight"
    [part] = slow["parts"]
    assert part["own_ns"] > SLOW_MS * 1e6 > part["other_ns"]
    place = slow["place"]
    assert (place["what"], place["name"], place["module_fqn"]) == ("node", "ScaledBackward", "2")


def test_stage_that_is_slow_in_its_forward_is_named_with_the_module(runs: Path) -> None:
    slow = stages_of(runs / "forward")["slowest"]
    assert (slow["is_slow"], slow["stage_index"], slow["kind"]) == (True, 2, "forward")
    place = slow["place"]
    assert (place["what"], place["name"], place["module_fqn"]) == ("module", "Layer", "2")


def test_slow_receive_is_no_slow_stage(runs: Path) -> None:
    answer = stages_of(runs / "receive")
    link = answer["slow_link"]
    assert (link["what"], link["from_stage"], link["to_stage"]) == ("activations", 1, 2)
    assert link["transfer_ns"] > SLOW_MS * 1e6
    assert not answer["slowest"]["is_slow"] or answer["slowest"]["parts"][0]["own_ns"] < 20e6


def test_even_pipeline_has_no_slow_link(runs: Path) -> None:
    answer = stages_of(runs / "even")
    assert answer["slow_link"] is None
    assert answer["steps"] == RECORDED[1:]
    assert {kind["count"] for kind in answer["kinds"]} == {len(RECORDED[1:]) * MICROBATCHES}


def test_waits_of_a_step_that_is_not_recorded_leave_no_row(runs: Path) -> None:
    every = len(RECORDED) * MICROBATCHES
    assert rows(
        runs / "even",
        "SELECT kind, count(*), max(occurrence), count(end_ns) FROM stage_events WHERE kind LIKE 'receive%' "
        "GROUP BY 1 ORDER BY 1",
    ) == [("receive_activations", 3 * every, 0, 3 * every), ("receive_gradients", 3 * every, 0, 3 * every)]  # fmt: skip


@pytest.mark.parametrize(
    "candidate, stage, kind, inside",
    [
        ("weight", 1, "backward_weight", ("node", "2", "ScaledBackward")),
        ("forward", 2, "forward", ("module", "2", "Layer")),
    ],
)
def test_diff_names_the_stage_that_got_slower_its_half_and_the_place(
    candidate: str, stage: int, kind: str, inside: tuple[str, str, str], runs: Path
) -> None:
    timing = timing_of(runs, candidate)
    assert timing["verdict"] == "slower"
    [first, *_] = timing["slower"]
    assert (first["what"], first["stage_index"], first["kind"]) == ("stage", stage, kind)
    assert first["difference_ns"] > 0.8 * SLOW_MS * 1e6 > first["spread_ns"]
    place = first["inside"]
    assert (place["what"], place["module_fqn"], place["name"]) == inside


def test_diff_names_the_receive_that_got_slower(runs: Path) -> None:
    [first, *_] = timing_of(runs, "receive")["slower"]
    assert (first["what"], first["kind"]) == ("transfer", "activations")
    assert (first["other_stage"], first["stage_index"]) == (1, 2)


def test_the_way_back_is_faster(runs: Path) -> None:
    code, answer = asked("diff", "--timing", runs / "weight", runs / "even", "--format", "json")
    [first, *_] = answer["timing"]["faster"]
    assert (code, first["stage_index"], first["kind"]) == (0, 1, "backward_weight")


def test_rank_that_was_killed_in_a_stage_says_where_and_who_waited_for_it(runs: Path) -> None:
    code, answer = asked("failures", runs / "killed", "--format", "json")
    killed = answer["ranks"][2]["stage"]
    assert (code, killed["kind"], killed["error"]) == (1, "backward_weight", None)
    assert (killed["stage_index"], killed["microbatch"], killed["step"]) == (2, 3, 1)
    waits = [rank["stage"] for rank in answer["ranks"] if rank["rank"] != 2 and rank["stage"]]
    assert any(stage["for_ranks"] == [2] for stage in waits), answer["explanation"]
    assert "in stage 2's weight half of microbatch 3" in told("failures", runs / "killed")[1]


def test_rank_that_died_after_it_had_received_waited_for_nobody(tmp_path: Path) -> None:
    job = JOB.with_name("dying_stage.py")
    run_job(job, ranks=2, recorded=tmp_path / "run", forked=True)
    died = asked("failures", tmp_path / "run", "--format", "json")[1]["ranks"][0]
    print(died["sentence"])
    assert died["state"] == "died" and not died["stage"]
    waits = "SELECT microbatch, end_ns IS NULL FROM stage_events WHERE rank = 0 AND kind = 'receive_gradients'"
    with connect([open_run(tmp_path / "run")]) as connection:
        assert sorted(connection.execute(waits).fetchall()) == [(0, False), (1, False)]
