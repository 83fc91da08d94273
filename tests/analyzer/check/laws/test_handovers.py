"""`handovers_equal`: what a pipeline stage receives is what its neighbour sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradtrace_analyzer.check.law import Findings
from gradtrace_analyzer.check.laws.handovers import handovers_equal
from support.synthetic_runs.bucket_times import timing
from support.synthetic_runs.builder import summary_columns
from support.synthetic_runs.data_parallel import Job, Rows, checked, findings
from support.synthetic_runs.pipeline import MICROBATCHES, STEPS, handed, pipeline, row_of


def found_in(
    tmp_path: Path, rows: Rows, law: str = "handovers_equal", **more: Any
) -> list[dict[str, Any]]:
    answer = checked(tmp_path, rows, **more)
    assert law in answer["judged"]
    return [v for v in answer["violations"] if v["law"] == law]


@pytest.mark.parametrize("equal_copies", [False, True])
def test_each_copy_of_a_pipeline_has_its_own_neighbours(tmp_path: Path, equal_copies: bool) -> None:
    rows = pipeline(copies=2, stages=3, equal_copies=equal_copies)
    assert found_in(tmp_path / "good", rows, rank_count=6) == []
    # Rank 3 is stage 1 of the second copy, rank 5 its next.
    row = row_of(rows, rank=3, step=1, microbatch=2, kind="backward_full")
    row |= summary_columns(3 * handed("back", 0 if equal_copies else 1, 1, 1, 2), "received_")
    (found,) = found_in(tmp_path / "bad", rows, rank_count=6)
    assert (found["ranks"], found["stage_index"], found["microbatch"]) == ([3, 5], 1, 2)
    assert found["factor"] == pytest.approx(3)


def test_schedule_that_runs_twice_in_a_step_is_held_to_each_run(tmp_path: Path) -> None:
    rows = pipeline(runs=2)
    assert found_in(tmp_path / "good", rows) == []
    assert found_in(tmp_path / "good again", rows, "actions_complete") == []
    row = row_of(rows, rank=1, step=0, microbatch=1, kind="forward", occurrence=1)
    row |= summary_columns(handed("forth", 0, 0, 0, 1), "received_")  # that of the first run
    (found,) = found_in(tmp_path / "bad", rows)
    assert "they are what was sent for microbatch 1" in found["explanation"]


def test_what_was_sent_twice_is_no_lost_send(tmp_path: Path) -> None:
    rows = pipeline()
    row = row_of(rows, rank=1, step=1, microbatch=1, kind="forward")
    # What belongs there never came, and what was sent after it came early; but where it belongs it came too.
    row |= summary_columns(handed("forth", 0, 0, 1, 2), "received_")
    (found,) = found_in(tmp_path, rows)
    assert "they are what was sent for microbatch 2" in found["explanation"]


def test_own_stages_that_do_not_say_what_they_handed_on_are_not_judged(tmp_path: Path) -> None:
    rows = pipeline()
    for row in rows["stage_events"]:
        for name in [name for name in row if name.startswith(("sent_", "received_"))]:
            del row[name]
    answer = checked(tmp_path, rows)
    assert "`received` and `sent`" in answer["not_judged"]["handovers_equal"]
    assert "actions_complete" in answer["judged"]


def test_value_that_became_nan_on_the_way_is_said_so(tmp_path: Path) -> None:
    rows = pipeline()
    values = handed("forth", 0, 0, 1, 1)
    values[3] = np.nan
    row = row_of(rows, rank=1, step=1, microbatch=1, kind="forward")
    row |= summary_columns(values, "received_")
    (found,) = found_in(tmp_path, rows)
    assert found["explanation"] == (
        "Step 1, microbatch 1: the activations that stage 1 (rank 1) received from stage 0 (rank 0) are not what was "
        "sent: it has 1 NaN element, and had 0 when it was sent."
    )


def test_handing_on_in_another_dtype_may_round(tmp_path: Path) -> None:
    rows = pipeline()
    for row in rows["stage_events"]:
        if "received_norm" in row and row["kind"] == "forward":
            values = handed("forth", 0, 0, row["step"], row["microbatch"]).astype(np.float16)
            row |= summary_columns(values, "received_")
    assert found_in(tmp_path, rows) == []


def test_rank_without_an_optimizer_is_not_held_against_steps_of_others(tmp_path: Path) -> None:
    """All that it does counts as its first step."""
    rows = pipeline(stages=3)
    rows["steps"] = [
        {"rank": rank, "step": step, "optimizer_ns": 5} for rank in (1, 2) for step in range(STEPS)
    ] + [{"rank": 0, "step": 0, "optimizer_ns": 0}]
    for row in [row for table in rows.values() for row in table if row["rank"] == 0]:
        row |= {"occurrence": row["step"]} if "stage_index" in row else {}
        row["step"] = 0
    answer = checked(tmp_path, rows, rank_count=3)
    assert answer["violations"] == []
    assert any("Rank 0 ran no optimizer" in note for note in answer["cover"]["notes"])
    # Between ranks 1 and 2: two things for each microbatch.
    assert answer["judged"]["handovers_equal"] == 2 * STEPS * MICROBATCHES
    assert answer["judged"]["actions_complete"] == 2 * STEPS * MICROBATCHES
    assert "rank 0 ran no optimizer" in timing(tmp_path / "run", "--stages").stdout


def test_activations_that_are_a_multiple_of_what_was_sent_are_told_with_their_place(
    tmp_path: Path,
) -> None:
    rows = pipeline(stages=3)
    row = row_of(rows, rank=1, step=1, microbatch=1, kind="forward")
    row |= summary_columns(2 * handed("forth", 0, 0, 1, 1), "received_")
    found = findings(tmp_path, handovers_equal, rows, rank_count=3)
    (v,) = found.violations
    assert (v.law, v.severity, v.step, v.rank) == (handovers_equal, "error", 1, 1)
    assert (v.ranks, v.stage_index, v.microbatch, v.phase) == ((1, 0), 1, 1, "forward")
    assert v.factor == pytest.approx(2) and v.count == 1
    assert v.explanation == (
        "Step 1, microbatch 1: the activations that stage 1 (rank 1) received from stage 0 (rank 0) are not what was "
        "sent, but 2 times that."
    )
    assert found.compared == 2 * 2 * STEPS * MICROBATCHES


def test_what_was_never_sent_is_told_of_the_rank_that_made_it(tmp_path: Path) -> None:
    """As of a `send` that was forgotten: what came in its place is what was sent after it."""
    rows = pipeline()
    for microbatch in range(1, MICROBATCHES):
        row = row_of(rows, rank=1, step=1, microbatch=microbatch - 1, kind="forward")
        row |= summary_columns(handed("forth", 0, 0, 1, microbatch), "received_")
    last = row_of(rows, rank=1, step=1, microbatch=MICROBATCHES - 1, kind="forward")
    last |= {name: None for name in last if name.startswith("received_")}
    (v,) = findings(tmp_path, handovers_equal, rows).violations
    assert (v.step, v.rank, v.ranks, v.stage_index, v.microbatch) == (1, 0, (0, 1), 0, 0)
    assert v.explanation == (
        "Step 1, microbatch 0: the activations that stage 0 (rank 0) made for stage 1 (rank 1) never came there: the "
        "send is missing. What rank 0 sent after it came in the place of other things."
    )


def test_pipeline_without_fingerprints_is_not_judged(tmp_path: Path) -> None:
    rows = pipeline()
    for row in rows["stage_events"]:
        row |= {name: None for name in row if name.endswith("_fingerprint")}
    found = findings(tmp_path / "norms", handovers_equal, rows)
    assert (list(found.violations), found.compared) == ([], 0)
    assert (found.not_judged or "").startswith("of no tensor was a fingerprint recorded both where")
    none = findings(tmp_path / "none", handovers_equal, {})
    assert none.not_judged == "no pipeline stage was recorded"


def test_job_without_stages_has_no_handovers_to_lack(tmp_path: Path) -> None:
    assert findings(tmp_path, handovers_equal, Job().made()) == Findings()
