"""`analyzer failures` where the rank's process cannot be asked: on another machine its heartbeat tells."""

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from gradtrace_analyzer.cli import analyzer
from support.synthetic_runs.builder import build_run
from support.synthetic_runs.data_parallel import Job, edit, remove
from support.synthetic_runs.journals import write_journal

NODE = {"node_name": "ReluBackward0", "module_fqn": "act", "step": 1, "start_ns": 7}


@pytest.mark.parametrize(
    ("ago", "state", "said"),
    [(2.0, "stuck", "Rank 0 lives"), (600.0, "silent", "it died, or its disk stalls")],
)
def test_rank_on_another_machine_lives_as_long_as_its_heart_beats(
    ago: float, state: str, said: str, tmp_path: Path
) -> None:
    row = ("steps", {"step": 0, "start_ns": 5, "end_ns": 9})
    beat = int((time.time() - ago) * 1e9)
    write_journal(tmp_path, [row], running=[NODE], machine=1, heartbeat_ns=beat)
    result = CliRunner().invoke(analyzer, ["failures", str(tmp_path), "--format", "json"])
    [rank] = json.loads(result.stdout)["ranks"]
    assert (result.exit_code, rank["state"]) == (1, state) and said in rank["sentence"]
    assert (rank["doing"]["node_name"], rank["doing"]["module_fqn"]) == ("ReluBackward0", "act")


@pytest.mark.parametrize("other", ["another bucket", "none"])
def test_rank_that_died_waiting_is_told_for_whom_and_with_what_that_came(
    other: str, tmp_path: Path
) -> None:
    rows = Job().made()
    remove(rows, "backward_passes", rank=0, step=2)
    edit(rows, "buckets", {"rank": 0, "step": 2, "bucket_index": 0}, done_ns=None)
    remove(rows, "buckets", rank=0, step=2, bucket_index=1)
    if other == "none":
        remove(rows, "buckets", rank=1, step=2)
    else:
        where = {"rank": 1, "step": 2, "bucket_index": 0}
        edit(rows, "buckets", where, parameter_fqns=["body.weight"], bucket_index=1)
    place = {"thread": 1, "doing": "backward", "since_ns": 5, "step": 2, "backward_index": 0}
    seen = {
        "pid": 1, "process_start": 1, "machine": 1, "wall_start_ns": 0, "monotonic_start_ns": 0,
        "heartbeat_ns": 0, "moved_ns": 5, "places": [place], "dropped": {},
    }  # fmt: skip
    run = build_run(
        tmp_path / "run", rows, world_size=2, unclosed=(0,), rank_facts={"left_behind": seen}
    )
    result = CliRunner().invoke(analyzer, ["failures", str(run), "--format", "json"])
    waiting = json.loads(result.stdout)["ranks"][0]
    assert (waiting["state"], waiting["waits"]["for_ranks"]) == ("died", [1])
    if other == "none":
        assert waiting["waits"]["absent"] == [1]
        assert "rank 1 has not launched its own" in waiting["sentence"]
    else:
        assert "rank 1 came with bucket 1 of step 2 (body.weight) instead" in waiting["sentence"]
