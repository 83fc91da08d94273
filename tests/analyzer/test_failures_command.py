"""`analyzer failures` where the rank's process cannot be asked: on another machine its heartbeat tells."""

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from gradtrace_analyzer.cli import analyzer
from support.journals import write_journal

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
