"""What `diff` says of backward passes that failed on one side, and of ranks that died there."""

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from gradtrace_analyzer.cli import analyzer
from support.synthetic_runs.builder import build_run
from support.synthetic_runs.data_parallel import Job, Rows, edit, remove


def failed(rows: Rows, rank: int, step: int, node_name: str | None) -> None:
    """Make a pass one that ended with an exception, in a Node or while none ran."""
    edit(rows, "backward_passes", {"rank": rank, "step": step}, error="RuntimeError: no")
    for table, where in (("buckets", {}), ("gradients", {"point": "reduced"})):
        remove(rows, table, rank=rank, step=step, **where)
    rows.setdefault("failures", []).append(
        {
            "rank": rank, "step": step, "record_index": 10_000, "microbatch": 0, "backward_index": 0,
            "root": 0, "module_fqn": "head", "node_name": node_name, "exception_type": "RuntimeError",
            "exception_text": f"no, says rank {rank}",
        }
    )  # fmt: skip


def diffed(folder: Path, candidate: Rows, **build: Any) -> dict[str, Any]:
    runs = [
        build_run(folder / "good", Job().made(), world_size=2),
        build_run(folder / "bad", candidate, world_size=2, **build),
    ]
    result = CliRunner().invoke(analyzer, ["diff", *map(str, runs), "--format", "json"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 1, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_rank_that_failed_while_it_waited_inherits_from_the_one_that_failed_in_a_node(
    tmp_path: Path,
) -> None:
    rows = Job().made()
    failed(rows, 0, 2, None)
    failed(rows, 1, 2, "MulBackward0")
    answer = diffed(tmp_path, rows)
    assert [(o["ranks"], o["node_name"]) for o in answer["origins"]] == [([1], "MulBackward0")]
    assert [o["ranks"] for o in answer["inherited"]] == [[0]]
    assert "no, says rank 1" in answer["explanation"]
    assert "Rank 0 then failed while no Node ran." in answer["explanation"]


def test_failure_of_the_only_rank_that_failed_is_an_origin_wherever_it_was(tmp_path: Path) -> None:
    rows = Job().made()
    failed(rows, 0, 2, None)
    assert [o["ranks"] for o in diffed(tmp_path, rows)["origins"]] == [[0]]


def test_rows_that_one_side_lacks_do_not_count_as_compared(tmp_path: Path) -> None:
    rows = Job().made()
    remove(rows, "module_calls", step=2, rank=0)
    edit(rows, "parameters", {"step": 2}, fingerprint=1)
    answer = diffed(tmp_path, rows)
    assert answer["cover"]["rows"]["module_calls"] == len(rows["module_calls"])


def test_where_a_rank_died_is_told_beside_what_others_failed_with(tmp_path: Path) -> None:
    rows = Job().made()
    failed(rows, 0, 2, None)
    place = {
        "thread": 1, "doing": "node", "since_ns": 5, "step": 2, "module_fqn": "head", "node_name": "MulBackward0",
    }  # fmt: skip
    seen = {
        "pid": 1, "process_start": 1, "machine": 1, "wall_start_ns": 0, "monotonic_start_ns": 0,
        "heartbeat_ns": 0, "moved_ns": 5, "places": [place], "dropped": {},
    }  # fmt: skip
    answer = diffed(tmp_path, rows, unclosed=(1,), rank_facts={"left_behind": seen})
    assert (
        "The candidate's rank 1 died in step 2, in MulBackward0 of head." in answer["explanation"]
    )


def test_parameter_of_a_failed_node_is_kept_where_its_own_row_is_missing(tmp_path: Path) -> None:
    rows = Job().made()
    failed(rows, 1, 2, "AccumulateGrad")
    rows["failures"][0] |= {"parameter_fqn": "head.weight", "event_index": 90}
    [failure] = diffed(tmp_path, rows)["failures"]
    assert failure["parameter_fqn"] == "head.weight"
