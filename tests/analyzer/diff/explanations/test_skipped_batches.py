"""A rank that left out a batch, or a reduction, is told from one that was fed something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.answers.commands import asked
from support.synthetic_runs.builder import build_run, summary_columns


def run(path: Path, batches: dict[int, list[int]], reductions: dict[int, list[int]]) -> Path:
    """By rank: the batch of each step, and the number of the collective of each step's bucket."""
    rows: dict[str, list[dict[str, Any]]] = {"inputs": [], "buckets": []}
    for rank, numbers in batches.items():
        for step, number in enumerate(numbers):
            place = {"rank": rank, "step": step}
            name = {"root": 0, "call_index": 0, "name": "x", "shape": [2]}
            rows["inputs"].append({**place, **name, **summary_columns([float(number), rank + 0.5])})
    for rank, numbers in reductions.items():
        for step, number in enumerate(numbers):
            bucket = {"backward_index": 0, "root": 0, "module_fqn": "", "bucket_index": 0}
            more = {"kind": "all_reduce", "parameter_fqns": ["w"], "collective_seq": number}
            values = summary_columns([1.0], "before_") | summary_columns([1.0], "after_")
            rows["buckets"].append({"rank": rank, "step": step, **bucket, **more, **values})
    return build_run(path, rows, world_size=len(batches))


ALL = {rank: [0, 1, 2, 3, 4] for rank in range(3)}


@pytest.mark.parametrize("swapped", [False, True])
def test_batch_that_one_rank_left_out_is_named(swapped: bool, tmp_path: Path) -> None:
    a = run(tmp_path / "a", ALL, ALL)
    b = run(tmp_path / "b", ALL | {1: [0, 1, 3, 4, 5]}, ALL)
    code, answer = asked("diff", "--format", "json", *((b, a) if swapped else (a, b)))
    side, other = ("baseline", "candidate") if swapped else ("candidate", "baseline")
    assert code == 1
    assert answer["explanation"].startswith("Step 2, rank 1: the input 'x'")
    assert (
        f"Rank 1 of the {side} reads from step 2 on what the {other} reads 1 step later: it left out a batch there."
        in answer["explanation"]
    )


def test_other_batches_are_no_skipped_ones(tmp_path: Path) -> None:
    a = run(tmp_path / "a", ALL, ALL)
    b = run(tmp_path / "b", ALL | {1: [0, 1, 9, 8, 7]}, ALL)
    _, answer = asked("diff", "--format", "json", a, b)
    assert "left out" not in answer["explanation"]


def test_reduction_that_one_rank_left_out_is_named(tmp_path: Path) -> None:
    a = run(tmp_path / "a", ALL, ALL)
    b = run(tmp_path / "b", ALL | {1: [0, 1, 9, 8, 7]}, ALL | {2: [0, 1, 2, 2, 3]})
    _, answer = asked("diff", "--format", "json", a, b)
    assert (
        "Rank 2 of the candidate left out a collective before or in step 3: its reductions no longer meet"
        in answer["explanation"]
    )
