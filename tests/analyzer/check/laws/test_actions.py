"""`actions_complete`: each stage does for each microbatch all that it must, and nothing twice."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from gradtrace_analyzer.check.law import Findings
from gradtrace_analyzer.check.laws.actions import actions_complete
from support.synthetic_runs.data_parallel import Job, Rows, checked, findings
from support.synthetic_runs.pipeline import MICROBATCHES, STEPS, pipeline, row_of, without


def found_in(
    tmp_path: Path, rows: Rows, law: str = "handovers_equal", **more: Any
) -> list[dict[str, Any]]:
    answer = checked(tmp_path, rows, **more)
    assert law in answer["judged"]
    return [v for v in answer["violations"] if v["law"] == law]


@pytest.mark.parametrize(("kind", "phase"), [("forward", "forward"), ("backward_full", "backward")])
def test_action_that_is_missing_is_named(tmp_path: Path, kind: str, phase: str) -> None:
    rows = without(pipeline(stages=3), rank=1, step=1, microbatch=2, kind=kind)
    (found,) = found_in(tmp_path, rows, "actions_complete", rank_count=3)
    assert (found["rank"], found["stage_index"], found["microbatch"]) == (1, 1, 2)
    if kind == "backward_full":
        assert found["phase"] == phase
        assert "ran 1 forward and no backward" in found["explanation"]
    else:
        assert "ran no forward and 1 backward" in found["explanation"]


@pytest.mark.parametrize("unclosed", [(1,), (0, 1, 2)])
def test_end_of_a_rank_that_was_cut_off_breaks_no_law(
    tmp_path: Path, unclosed: Collection[int]
) -> None:
    rows = pipeline(stages=3)
    for microbatch in (1, 2):
        for kind in ("forward", "backward_full"):
            rows = without(rows, rank=1, step=1, microbatch=microbatch, kind=kind)
    assert found_in(tmp_path, rows, rank_count=3, unclosed=unclosed) == []
    again = found_in(tmp_path / "again", rows, "actions_complete", rank_count=3, unclosed=unclosed)
    assert again == []


def test_rank_that_is_not_there_is_no_broken_law(tmp_path: Path) -> None:
    rows = pipeline(stages=3)
    assert found_in(tmp_path, rows, rank_count=3, absent=(1,), law="actions_complete") == []


def test_step_that_was_left_by_an_exception_is_not_judged(tmp_path: Path) -> None:
    rows = without(pipeline(stages=3), rank=1, step=1, microbatch=2, kind="backward_full")
    row_of(rows, rank=0, step=1, microbatch=2, kind="backward_full")["error"] = "RuntimeError: no"
    assert found_in(tmp_path, rows, "actions_complete", rank_count=3) == []


def test_step_that_was_broken_off_is_not_judged(tmp_path: Path) -> None:
    """Its rank ended, by an exception outside any action, before the optimizer saw a gradient."""
    rows = without(pipeline(stages=3), rank=1, step=1, microbatch=2, kind="backward_full")
    rows["gradients"] = [row for row in rows["gradients"] if (row["rank"], row["step"]) != (1, 1)]
    assert found_in(tmp_path, rows, "actions_complete", rank_count=3) == []


def test_stages_that_did_all_are_judged_by_the_microbatch(tmp_path: Path) -> None:
    found = findings(tmp_path, actions_complete, pipeline(stages=3), rank_count=3)
    assert (found.violations, found.compared) == ([], 3 * STEPS * MICROBATCHES)


def halved(rows: Rows) -> Rows:
    """The rows with each whole backward as an input half and a weight half."""
    events: list[dict[str, Any]] = []
    for row in rows["stage_events"]:
        kinds = ["backward_input", "backward_weight"] if row["kind"] != "forward" else ["forward"]
        events += [{**row, "kind": kind} for kind in kinds]
    return {**rows, "stage_events": events}


@pytest.mark.parametrize(
    ("kind", "times", "phase", "said"),
    [
        ("backward_weight", 0, "weight", "1 input half and no weight half: the gradients of its"),
        (
            "backward_weight",
            2,
            "weight",
            "1 input half and 2 weight halves: that microbatch counts",
        ),
        ("backward_input", 2, "weight", "2 input halves and 1 weight half: the gradients of its"),
        ("forward", 2, "forward", "2 forwards and 1 backward."),
    ],
)
def test_half_that_is_missing_or_ran_twice_is_told(
    tmp_path: Path, kind: str, times: int, phase: str, said: str
) -> None:
    rows = halved(pipeline(stages=3))
    assert findings(tmp_path / "whole", actions_complete, rows, rank_count=3).violations == []
    place = {"rank": 2, "step": 1, "microbatch": 1, "kind": kind}
    rows = {**rows, "stage_events": without(rows, **place)["stage_events"]
            + [row_of(rows, **place)] * times}  # fmt: skip
    (v,) = findings(tmp_path, actions_complete, rows, rank_count=3).violations
    assert (v.law, v.severity, v.step, v.rank) == (actions_complete, "error", 1, 2)
    assert (v.ranks, v.stage_index, v.microbatch, v.phase, v.count) == ((2,), 2, 1, phase, 1)
    assert v.explanation.startswith(f"Step 1, microbatch 1: stage 2 (rank 2) ran {said}")


def test_stages_of_which_rows_are_lost_are_not_judged(tmp_path: Path) -> None:
    lost = {"dropped": {"stage_events": 1}}
    found = findings(tmp_path / "lost", actions_complete, pipeline(), rank_facts=lost)
    assert found.not_judged == "no step was recorded whole of any stage"
    none = findings(tmp_path / "none", actions_complete, {})
    assert none.not_judged == "no pipeline stage was recorded"


def test_job_without_stages_has_no_actions_to_lack(tmp_path: Path) -> None:
    assert findings(tmp_path, actions_complete, Job().made()) == Findings()
