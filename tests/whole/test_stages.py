"""Pipelines of torch on two real ranks: equal bits with every schedule, and a row for each action that is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gradtrace_schemas.catalogue import TABLES
from support.launching.launcher import run_job
from support.recordings.in_process import rows
from whole.test_unchanged import same

JOB = Path(__file__).resolve().parents[1] / "support" / "jobs" / "pipelines.py"

# The order of the job, which trains two steps with each, and how many stages there are.
SCHEDULES = {
    "GPipe": 2,
    "1F1B": 2,
    "Interleaved1F1B": 4,
    "LoopedBFS": 4,
    "InterleavedZeroBubble": 4,
    "ZBVZeroBubble": 4,
    "DualPipeV": 4,
}
# What follows in the job: no schedules, but what stages may hold.
WAYS = {"DDP": 2, "FSDP": 4, "own weight half": 4, "unused outputs": 4, "twice a step": 4}
OF_SCHEDULES = f"step < {2 * len(SCHEDULES)}"
# Those that split every backward of every stage but the first.
ALL_SPLIT = {"InterleavedZeroBubble", "ZBVZeroBubble"}
MICROBATCHES = range(4)

Recorded = tuple[Path, list[dict[str, Any]]]


def left_by(folder: Path, recorded: Path | None, ranks: int = 2) -> list[dict[str, Any]]:
    """What the job left on each rank, by schedule."""
    folder.mkdir()
    run_job(
        JOB, "--out", folder, ranks=ranks, recorded=recorded, timeout=200, forked=ranks > 2
    ).must_succeed()
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks)]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The recording of all schedules on two ranks, and what they left."""
    folder = tmp_path_factory.mktemp("stages")
    return folder / "run", left_by(folder / "recorded", folder / "run")


def test_everything_is_equal_bit_for_bit(two_ranks: Recorded, tmp_path: Path) -> None:
    bare = left_by(tmp_path / "bare", None)
    for rank in range(2):
        assert list(bare[rank]) == [*SCHEDULES, *WAYS]
        for name in bare[rank]:
            assert same(bare[rank][name], two_ranks[1][rank][name]), (rank, name)


@pytest.mark.slow
def test_everything_is_equal_and_recorded_on_four_ranks(tmp_path: Path) -> None:
    bare = left_by(tmp_path / "bare", None, ranks=4)
    recorded = left_by(tmp_path / "recorded", tmp_path / "run", ranks=4)
    for rank in range(4):
        for name in bare[rank]:
            assert same(bare[rank][name], recorded[rank][name]), (rank, name)
    # Twice the stages and twice the microbatches, each forward once.
    forwards = [2 * stages * 8 for stages in (SCHEDULES | WAYS).values() for _ in range(2)]
    forwards[-2:] = [2 * count for count in forwards[-2:]]
    assert rows(
        tmp_path / "run",
        "SELECT step, count(*) FROM stage_events WHERE kind = 'forward' GROUP BY 1 ORDER BY 1",
    ) == list(enumerate(forwards))
    assert rows(
        tmp_path / "run",
        "SELECT count(*) FILTER (s.sent_fingerprint IS DISTINCT FROM r.received_fingerprint), count(*) > 1000 "
        "FROM stage_events s JOIN stage_events r USING (step, microbatch, occurrence) "
        "WHERE s.kind IN ('backward_full', 'backward_input') AND r.kind IN ('backward_full', 'backward_input') "
        "AND r.stage_index = s.stage_index - 1",
    ) == [(0, True)]


def first_step(name: str) -> int:
    """The first of the two steps that the job trains this way."""
    return 2 * [*SCHEDULES, *WAYS].index(name)


def actions_of(run: Path, name: str) -> list[set[tuple[int, int, str]]]:
    """(stage, microbatch, kind) of the actions of each of its steps, over both ranks; each has one row."""
    first = first_step(name)
    steps = []
    for step in (first, first + 1):
        found = rows(
            run,
            f"SELECT stage_index, microbatch, kind FROM stage_events WHERE step = {step} AND kind IN "
            "('forward', 'backward_full', 'backward_input', 'backward_weight') AND error IS NULL",
        )
        assert len(found) == len(set(found))
        steps.append(set(found))
    return steps


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_action_has_its_row(two_ranks: Recorded, schedule: str) -> None:
    stages = range(SCHEDULES[schedule])
    every = {(stage, microbatch) for stage in stages for microbatch in MICROBATCHES}
    for actions in actions_of(two_ranks[0], schedule):
        of_kind = {
            kind: {(stage, microbatch) for stage, microbatch, k in actions if k == kind}
            for kind in ("forward", "backward_full", "backward_input", "backward_weight")
        }
        split = of_kind["backward_weight"]
        assert of_kind["forward"] == every
        assert of_kind["backward_input"] == split
        assert of_kind["backward_full"] == every - split
        if schedule in ALL_SPLIT:
            # The first stage has nobody to send gradients to: its weight action is a full backward.
            assert split == {place for place in every if place[0] > 0}
        else:
            assert bool(split) == (schedule == "DualPipeV")


def test_backward_passes_of_a_step_are_counted_though_they_are_split(two_ranks: Recorded) -> None:
    every = {**SCHEDULES, **WAYS}
    passes = [4 * stages // 2 for stages in every.values() for _ in range(2)]
    passes[-2:] = [2 * count for count in passes[-2:]]  # twice a step
    found = rows(two_ranks[0], "SELECT step, rank, backward_count FROM steps ORDER BY step, rank")
    assert found == [(step, r, count) for step, count in enumerate(passes) for r in range(2)]


def test_weight_half_of_the_job_is_a_half(two_ranks: Recorded) -> None:
    """With `dw_builder` also the first stage's backward is split: torch runs a whole one in front."""
    for actions in actions_of(two_ranks[0], "own weight half"):
        places = [(stage, microbatch) for stage in range(4) for microbatch in MICROBATCHES]
        kinds = ("forward", "backward_input", "backward_weight")
        assert actions == {(*place, kind) for place in places for kind in kinds}


def test_schedule_that_runs_twice_in_a_step_has_its_rows_twice(two_ranks: Recorded) -> None:
    step = first_step("twice a step")
    assert rows(
        two_ranks[0],
        "SELECT occurrence, count(*) FILTER (kind = 'forward'), count(*) FILTER (kind LIKE 'backward%') "
        f"FROM stage_events WHERE step = {step} GROUP BY 1 ORDER BY 1",
    ) == [(0, 16, 4 + 2 * 12), (1, 16, 4 + 2 * 12)]


def test_what_a_stage_sent_is_what_its_neighbour_received(two_ranks: Recorded) -> None:
    activations = rows(
        two_ranks[0],
        "SELECT s.step, count(*), sum((s.sent_fingerprint = r.received_fingerprint)::INT) FROM stage_events s "
        "JOIN stage_events r USING (step, microbatch, kind, occurrence) WHERE kind = 'forward' "
        "AND r.stage_index = s.stage_index + 1 GROUP BY 1 ORDER BY 1",
    )
    gradients = rows(
        two_ranks[0],
        "SELECT s.step, count(*), sum((s.sent_fingerprint = r.received_fingerprint)::INT) FROM stage_events s "
        "JOIN stage_events r USING (step, microbatch, occurrence) WHERE s.kind IN ('backward_full', 'backward_input') "
        "AND r.kind IN ('backward_full', 'backward_input') AND r.stage_index = s.stage_index - 1 "
        "GROUP BY 1 ORDER BY 1",
    )
    every = SCHEDULES | WAYS
    boundaries = [4 * (stages - 1) for stages in every.values() for _ in range(2)]
    boundaries[-2:] = [2 * count for count in boundaries[-2:]]  # twice a step
    expected = [(step, count, count) for step, count in enumerate(boundaries)]
    assert activations == expected
    assert gradients == expected


def test_waits_lie_before_what_needs_them_and_after_what_they_send(two_ranks: Recorded) -> None:
    count_early = (
        "SELECT w.kind, count(*), sum((w.end_ns <= a.start_ns)::INT), sum((w.start_ns >= a.end_ns)::INT) "
        "FROM stage_events w JOIN stage_events a USING (rank, step, microbatch, stage_index) "
        f"WHERE {OF_SCHEDULES} AND w.end_ns >= w.start_ns AND a.end_ns > a.start_ns AND (w.kind LIKE '%_activations' "
        "AND a.kind = 'forward' OR w.kind LIKE '%_gradients' AND (a.kind = 'backward_input' OR a.kind = 'backward_full'"
        ")) GROUP BY 1 ORDER BY 1"
    )
    # Two stages on a line have one boundary between ranks, four in a loop have three, four in a V two.
    waits = 2 * 4 * (2 * 1 + 3 * 3 + 2 * 2)
    assert rows(two_ranks[0], count_early) == [
        ("receive_activations", waits, waits, 0),
        ("receive_gradients", waits, waits, 0),
        ("send_activations", waits, 0, waits),
        ("send_gradients", waits, 0, waits),
    ]


def test_nodes_carry_the_action_that_ran_them(two_ranks: Recorded) -> None:
    whole = "CASE a.kind WHEN 'backward_input' THEN 'input' WHEN 'backward_weight' THEN 'weight' ELSE 'backward' END"
    (nodes,) = rows(two_ranks[0], "SELECT count(*) FROM node_events")[0]
    assert nodes > 1000
    assert rows(
        two_ranks[0],
        "SELECT count(*) FROM node_events n JOIN stage_events a USING (rank, step, microbatch, stage_index) "
        f"WHERE a.start_ns <= n.start_ns AND n.end_ns <= a.end_ns AND n.phase = {whole}",
    ) == [(nodes,)]


def test_a_split_backward_runs_each_node_in_its_half_or_in_both(two_ranks: Recorded) -> None:
    step = first_step("ZBVZeroBubble")
    halves = rows(
        two_ranks[0],
        "SELECT node_name, list(DISTINCT phases) FROM (SELECT node_name, string_agg(phase, ' ' ORDER BY record_index)"
        f" AS phases FROM node_events WHERE step = {step} AND stage_index = 1 GROUP BY microbatch, autograd_seq, "
        "node_name) GROUP BY 1 ORDER BY 1",
    )
    assert halves == [
        ("AddmmBackward0", ["input weight"]),
        ("NativeLayerNormBackward0", ["input weight"]),
        ("TBackward0", ["weight"]),
        ("TanhBackward0", ["input"]),
    ]


def test_gradients_are_summarised_after_each_microbatch(two_ranks: Recorded) -> None:
    """Accumulated by AccumulateGrad or by the weight half; scaled once at the end, as the schedule does."""
    found = rows(
        two_ranks[0],
        "SELECT step, rank, root, parameter_fqn, count(*) FILTER (point = 'local'), "
        "count(DISTINCT microbatch) FILTER (point = 'local'), "
        "arg_max(norm, record_index) FILTER (point = 'local') / max(norm) FILTER (point = 'final') "
        f"FROM gradients WHERE {OF_SCHEDULES} AND point <> 'carried' GROUP BY ALL",
    )
    assert len(found) == 2 * 6 * sum(SCHEDULES.values())  # a stage has six parameters
    for *place, count, microbatches, ratio in found:
        assert (count, microbatches) == (4, 4), place
        assert ratio == pytest.approx(4, rel=1e-5), place


def test_keys_are_unique(two_ranks: Recorded) -> None:
    tables = (
        "stage_events",
        "module_calls",
        "node_events",
        "gradients",
        "backward_passes",
        "inputs",
    )
    for name in tables:
        key = ", ".join(TABLES[name].key)
        assert (
            rows(
                two_ranks[0],
                f"SELECT {key}, count(*) FROM {name} GROUP BY {key} HAVING count(*) > 1",
            )
            == []
        ), name


def test_calls_of_modules_carry_the_microbatch(two_ranks: Recorded) -> None:
    step = first_step("Interleaved1F1B")
    assert rows(
        two_ranks[0],
        f"SELECT microbatch, count(*), max(call_index) FROM module_calls WHERE step = {step} GROUP BY 1 ORDER BY 1",
    ) == [(microbatch, 4 * 5, 0) for microbatch in MICROBATCHES]
