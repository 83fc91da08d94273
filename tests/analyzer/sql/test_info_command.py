"""`analyzer info`: what was recorded, told the way a colleague would want it."""

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from gradtrace_analyzer.cli import analyzer
from gradtrace_analyzer.words.numbers import bytes_text
from support.synthetic_runs.builder import add_part, build_run
from support.synthetic_runs.journals import write_journal


def info(*arguments: object) -> Result:
    result = CliRunner().invoke(analyzer, ["info", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result


def info_json(*paths: Path) -> list[Any]:
    runs = json.loads(info("--format", "json", *paths).stdout)["runs"]
    assert isinstance(runs, list)
    return runs


def test_whole_run_is_told_in_a_few_lines(tmp_path: Path) -> None:
    steps = [
        {"rank": rank, "step": n, "start_ns": 0, "end_ns": 1000, "recorder_ns": 15}
        for rank in range(2)
        for n in range(3)
    ]
    nodes = [{"rank": 0, "event_index": n} for n in range(1234)]
    path = build_run(tmp_path / "a", {"steps": steps, "node_events": nodes}, world_size=2)
    size = sum(p.stat().st_size for p in path.glob("steps/*/*.parquet"))
    lines = info(path).stdout.splitlines()
    assert lines[:8] == [
        f"a  (attempt 0, {path})",
        "  versions      torch 2.13.0, python 3.11.7, gradtrace 0.1.0",
        "  hosts         host0",
        "  device        cpu",
        "  ranks         0-1 of 2",
        "  steps         0-2 (3 steps)",
        "  recorded      detail nodes, summary full",
        "  recorder took 1.50% of the steps' time",
    ]
    tables = [line.split() for line in lines[-2:]]
    assert tables[0][:3] == ["steps", "6", "2"]
    assert tables[0][3:] == bytes_text(size).split()
    assert tables[1][:3] == ["node_events", "1,234", "1"]


def test_json_holds_everything(tmp_path: Path) -> None:
    facts = {"dropped": {"node_events": 3}, "unsummarised": {"fake": 2}, "problems": ["disk full"]}
    path = build_run(
        tmp_path / "a", {"steps": [{"step": 4}]}, world_size=4, absent=(3,), rank_facts=facts
    )
    [held] = info_json(path)
    assert held["ranks"] == {"present": [0, 1, 2], "missing": [3], "incomplete": []}
    assert held["steps"] == {"first": 4, "last": 4, "count": 1}
    assert held["dropped"] == {"node_events": 9}
    assert held["unsummarised"] == {"fake": 6}
    assert held["problems"] == [f"rank {rank}: disk full" for rank in range(3)]
    assert held["versions"] == {"gradtrace": ["0.1.0"], "python": ["3.11.7"], "torch": ["2.13.0"]}
    assert held["notices"] == [f"{path} lacks rank 3 of 4"]
    assert held["recorder_share"] is None
    [table] = held["tables"]
    assert table["table"] == "steps" and table["rows"] == 1 and table["parts"] == 1
    assert table["bytes"] == sum(p.stat().st_size for p in path.glob("steps/*/*.parquet"))


def test_dropped_unsummarised_and_problems_are_told(tmp_path: Path) -> None:
    facts = {"dropped": {"node_events": 3}, "unsummarised": {"fake": 2}, "problems": ["disk full"]}
    text = info(build_run(tmp_path / "a", rank_facts=facts)).stdout
    assert "  dropped       3 node_events\n" in text
    assert "  unsummarised  2 fake\n" in text
    assert "  problem       rank 0: disk full\n" in text


def test_missing_and_unclosed_ranks_are_told(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a", world_size=8, absent=(6, 7), unclosed=(2,))
    result = info(path)
    assert "0-5 of 8; missing: 6-7; not closed (killed, or running): 2" in result.stdout
    assert "lacks ranks 6-7 of 8" in result.stderr


def test_rows_of_a_journal_are_counted_and_drops_of_a_killed_rank_are_told(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a", {"inputs": [{"step": 5}]}, unclosed=(0,))
    rows = [("inputs", {"step": 5}), ("inputs", {"step": 6})]
    write_journal(path, rows, drained=1, dropped=7)
    [held] = info_json(path)
    assert held["dropped"] == {"journal full, rank killed": 7}
    assert held["steps"] == {"first": 5, "last": 6, "count": 2}
    [table] = held["tables"]
    assert (table["rows"], table["journal_rows"], table["parts"]) == (2, 1, 1)
    lines = [line.split() for line in info(path).stdout.splitlines()]
    assert lines[-3][-3:] == ["rows", "in", "journals"]
    assert (lines[-1][:3], lines[-1][-1]) == (["inputs", "2", "1"], "1")


def test_step_that_a_rank_was_killed_in_is_counted(tmp_path: Path) -> None:
    rows = {"steps": [{"step": 0}, {"step": 1}], "node_events": [{"step": 1}, {"step": 2}]}
    [killed] = info_json(build_run(tmp_path / "a", rows, unclosed=(0,)))
    assert killed["steps"] == {"first": 0, "last": 2, "count": 3}


def test_part_cut_in_half_is_told_and_not_counted(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a", {"steps": [{}]})
    cut = add_part(path, "steps", [{"step": 1}])
    cut.write_bytes(cut.read_bytes()[:-20])
    result = info(path)
    assert "part-0-1.parquet is cut off" in result.stderr
    assert result.stdout.splitlines()[-1].split()[:3] == ["steps", "1", "1"]


def test_run_without_rows_says_so(tmp_path: Path) -> None:
    assert info(build_run(tmp_path / "a")).stdout.endswith("  no rows were recorded\n")


def test_ranks_that_differ_in_a_version_show_both(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a", world_size=2)
    file = path / "ranks" / "rank=00001-0.json"
    facts = json.loads(file.read_text())
    facts["versions"]["torch"] = "2.12.1"
    file.write_text(json.dumps(facts))
    assert "torch 2.12.1 and 2.13.0" in info(path).stdout


def test_csv_has_a_row_per_run_and_table(tmp_path: Path) -> None:
    first = build_run(tmp_path / "a", {"steps": [{}], "inputs": [{}, {}]})
    second = build_run(tmp_path / "b", {"steps": [{}]})
    lines = info("--format", "csv", first, second).stdout.splitlines()
    assert lines[0] == "run,table,rows,parts,bytes,journal_rows"
    assert [line.split(",")[:4] for line in lines[1:]] == [
        ["a", "steps", "1", "1"],
        ["a", "inputs", "2", "1"],
        ["b", "steps", "1", "1"],
    ]


def test_sizes_are_told_in_the_unit_that_reads_best() -> None:
    assert [bytes_text(n) for n in (0, 999, 1234, 5_600_000, 7_890_000_000_000)] == [
        "0 B",
        "999 B",
        "1.23 kB",
        "5.6 MB",
        "7.89 TB",
    ]
