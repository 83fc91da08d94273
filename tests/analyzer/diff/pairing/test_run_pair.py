"""Two runs as they are read: ranks whose steps are all named, parts, journals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradtrace_analyzer.diff.pairing.run_pair import RunPair
from gradtrace_analyzer.runs.opening import open_run
from gradtrace_analyzer.sql.footers import Counts
from gradtrace_analyzer.words.nouns import SIDES
from support.synthetic_runs.builder import build_run

STEPS = {"steps": [{"step": s} for s in range(3)]}


def pair_of(path: Path, count: int = 3, **more: Any) -> RunPair:
    run = open_run(path)
    counts = Counts({("steps", 0): count})
    return RunPair({side: run for side in SIDES}, {side: counts for side in SIDES}, **more)


def test_rank_that_ended_and_lost_nothing_is_closed(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a", STEPS)
    assert pair_of(path).closed("baseline", [0]) == [0]
    assert pair_of(path, are_arranged=True).closed("baseline", [0]) == []


@pytest.mark.parametrize("facts", [{"dropped": {"ring full": 1}}, {"complete": False}])
def test_rank_that_lost_rows_or_did_not_end_is_not(tmp_path: Path, facts: dict[str, Any]) -> None:
    assert pair_of(build_run(tmp_path / "a", STEPS, rank_facts=facts)).closed("baseline", [0]) == []


def test_rank_of_which_rows_are_missing_is_not(tmp_path: Path) -> None:
    assert pair_of(build_run(tmp_path / "a", STEPS), count=2).closed("candidate", [0]) == []


def test_parts_come_as_they_were_written(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a", STEPS)
    parts = pair_of(path).parts("baseline", "steps", 0)
    assert [Path(part.path).suffix for part in parts] == [".parquet"]
    assert pair_of(path).parts("baseline", "steps", 7) == []
    assert pair_of(path).in_journals == set()
