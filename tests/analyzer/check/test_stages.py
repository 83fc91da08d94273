"""Laws of pipeline stages on made rows: what real jobs on a few ranks cannot show, or not cheaply."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.synthetic_runs.bucket_times import timing
from support.synthetic_runs.builder import summary_columns
from support.synthetic_runs.data_parallel import Rows, checked

MICROBATCHES, STEPS = 3, 2


def handed(what: str, copy: int, stage: int, step: int, microbatch: int) -> Any:
    """What crosses the boundary behind a stage, one way or the other."""
    seed = [len(what), copy, stage, step, microbatch]
    return np.random.default_rng(seed).standard_normal(12).astype(np.float32)


def pipeline(
    copies: int = 1, stages: int = 2, *, equal_copies: bool = False, runs: int = 1
) -> Rows:
    """The actions of so many copies of a pipeline; stage s of copy c is on rank s * copies + c."""
    found = [
        {**row, "rank": stage * copies + copy}
        for copy in range(copies)
        for stage in range(stages)
        for row in actions(0 if equal_copies else copy, stage, stages, runs)
    ]
    passes = [
        {"rank": rank, "step": step, "backward_index": 0, "kind": "backward"}
        for rank in range(copies * stages)
        for step in range(STEPS)
    ]
    # That they exist says that the optimizer was reached.
    final = [{**row, "root": 0, "parameter_fqn": "weight", "point": "final"} for row in passes]
    for row in final:
        del row["kind"]
    return {"stage_events": found, "backward_passes": passes, "gradients": final}


def actions(copy: int, stage: int, stages: int, runs: int) -> Iterator[dict[str, Any]]:
    for step in range(STEPS):
        for run in range(runs):
            for microbatch in range(MICROBATCHES):
                place = (copy, stage, step, microbatch + 10 * run)
                before = (copy, stage - 1, *place[2:])
                same = {
                    "step": step,
                    "microbatch": microbatch,
                    "stage_index": stage,
                    "occurrence": run,
                    "start_ns": 100 * step + microbatch,
                    "end_ns": 100 * step + microbatch,
                }
                forward: dict[str, Any] = {**same, "kind": "forward"}
                backward: dict[str, Any] = {**same, "kind": "backward_full"}
                if stage > 0:
                    forward |= summary_columns(handed("forth", *before), "received_")
                    backward |= summary_columns(handed("back", *before), "sent_")
                if stage < stages - 1:
                    forward |= summary_columns(handed("forth", *place), "sent_")
                    backward |= summary_columns(handed("back", *place), "received_")
                yield forward
                yield backward


def row_of(rows: Rows, **place: Any) -> dict[str, Any]:
    (row,) = [r for r in rows["stage_events"] if all(r[k] == v for k, v in place.items())]
    return row


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


def without(rows: Rows, **place: Any) -> Rows:
    gone = row_of(rows, **place)
    return {**rows, "stage_events": [row for row in rows["stage_events"] if row is not gone]}


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


def test_step_that_was_left_by_an_exception_is_not_judged(tmp_path: Path) -> None:
    rows = without(pipeline(stages=3), rank=1, step=1, microbatch=2, kind="backward_full")
    row_of(rows, rank=0, step=1, microbatch=2, kind="backward_full")["error"] = "RuntimeError: no"
    assert found_in(tmp_path, rows, "actions_complete", rank_count=3) == []


def test_rank_whose_stage_received_a_nan_inherits_it(tmp_path: Path) -> None:
    values = handed("forth", 0, 0, 0, 0)
    values[3] = np.nan
    born = {"step": 0, "root": 0, "module_fqn": "", "phase": "forward", "call_index": 0, "depth": 0}
    given = summary_columns(handed("forth", 9, 0, 0, 0), "input_")
    calls = [
        {**born, "rank": 0, **given, **summary_columns(values, "output_")},
        {
            **born,
            "rank": 1,
            **summary_columns(values, "input_"),
            **summary_columns(values, "output_"),
        },
    ]
    rows = {"module_calls": calls, **pipeline()}
    row_of(rows, rank=0, step=0, microbatch=0, kind="forward").update(
        summary_columns(values, "sent_")
    )
    row_of(rows, rank=1, step=0, microbatch=0, kind="forward").update(
        summary_columns(values, "received_")
    )
    (found,) = found_in(tmp_path, rows, "values_finite")
    assert (found["rank"], found["stage_index"], found["phase"]) == (0, 0, "forward")
    assert found["explanation"] == (
        "Step 0, rank 0 (stage 0, microbatch 0, forward): the first NaN is born in the root module, whose input is "
        "finite. Rank 1 got it through what its stages received."
    )


def test_step_that_was_broken_off_is_not_judged(tmp_path: Path) -> None:
    """Its rank ended, by an exception outside any action, before the optimizer saw a gradient."""
    rows = without(pipeline(stages=3), rank=1, step=1, microbatch=2, kind="backward_full")
    rows["gradients"] = [row for row in rows["gradients"] if (row["rank"], row["step"]) != (1, 1)]
    assert found_in(tmp_path, rows, "actions_complete", rank_count=3) == []
