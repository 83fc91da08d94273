"""Laws of `analyzer diff`, on recordings of the example under torchrun."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from gradtrace_schemas import TABLES
from gradtrace_schemas.batches import write_part
from support.answers.golden import must_be_golden
from support.launching.launcher import run_job

ROOT = Path(__file__).resolve().parents[2]
FAULT = ("--fault", "wrong-derivative", "--fault-step", "3", "--fault-rank", "1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's runs a, b and c."""
    place = tmp_path_factory.mktemp("runs")
    for name, arguments in (
        ("a", ()),
        ("b", ()),
        ("c", (*FAULT, "--fault-module", "blocks.1.mlp")),
    ):
        job = ROOT / "examples" / "train.py"
        run_job(job, *arguments, ranks=2, recorded=place / name).must_succeed()
    return place


def analyzer(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradtrace_analyzer.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100)


def diff(a: Path, b: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    done = analyzer("diff", "--format", "json", *options, a, b, cwd=a.parent)
    return done.returncode, json.loads(done.stdout), done.stderr


def test_run_against_itself_is_identical(runs: Path) -> None:
    for name in "abc":
        code, answer, _ = diff(runs / name, runs / name, "--exact")
        assert (code, answer["verdict"], answer["first_divergence"]) == (0, "identical", None)


def test_demo_names_step_rank_module_and_node(runs: Path) -> None:
    code, answer, _ = diff(runs / "a", runs / "c")
    assert code == 1
    first = answer["first_divergence"]
    wanted = {"step": 3, "rank": 1, "link": "backward", "module_fqn": "blocks.1.mlp"}
    assert wanted.items() <= first.items() and first["node_name"] == "SquaredReluBackward"
    assert answer["factor"] == pytest.approx(1.01, abs=1e-4)
    assert answer["explanation"].startswith(
        "Step 3, rank 1: the gradient leaving blocks.1.mlp (SquaredReluBackward) differs by 1.0e-02"
    )


def test_rank_taken_away_is_named_and_nothing_is_called_identical(
    runs: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(runs / "b", tmp_path / "b")
    for path in copy.rglob("rank=00001*"):
        if path.is_dir():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()
    for pair in ((runs / "a", copy), (copy, runs / "a")):
        code, answer, _ = diff(*pair)
        assert (code, answer["verdict"]) == (2, "incomparable")
        assert "rank 1" in answer["explanation"] and answer["cover"]["ranks"] == [0]


def test_order_of_rows_in_a_file_changes_no_answer(runs: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(runs / "c", tmp_path / "c")
    for path in copy.rglob("part-*.parquet"):
        table = pq.ParquetFile(path).read()
        shuffled = table.take(list(reversed(range(len(table)))))
        write_part(path, TABLES[path.parts[-3]], shuffled, len(table))
    assert diff(runs / "a", copy)[1] == diff(runs / "a", runs / "c")[1]


def test_part_cut_in_half_is_named_and_the_rest_is_compared(runs: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(runs / "c", tmp_path / "c")
    part = copy / "module_calls" / "rank=00000" / "part-0-0.parquet"
    part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    code, answer, said = diff(runs / "c", copy)
    assert "module_calls" in said and "part-0-0.parquet" in said
    assert (code, answer["verdict"]) == (2, "incomparable")
    assert "the candidate has lost rows of module_calls of rank 0" in answer["explanation"]
    assert answer["cover"]["rows"]["node_events"] > 0
    assert diff(runs / "a", copy)[1]["first_divergence"]["module_fqn"] == "blocks.1.mlp"


def test_part_that_is_gone_is_missed(runs: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(runs / "a", tmp_path / "a")
    (copy / "gradients" / "rank=00001" / "part-0-0.parquet").unlink()
    code, answer, _ = diff(runs / "a", copy)
    assert (code, answer["verdict"]) == (2, "incomparable")
    assert "the candidate has lost rows of gradients of rank 1" in answer["explanation"]


def test_part_broken_in_its_middle_is_a_sentence(runs: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(runs / "c", tmp_path / "c")
    part = copy / "node_events" / "rank=00000" / "part-0-0.parquet"
    data = bytearray(part.read_bytes())
    data[100 : len(data) // 2] = bytes(len(data) // 2 - 100)
    part.write_bytes(data)
    done = analyzer("diff", runs / "a", copy, cwd=runs)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("analyzer: the recording could not be read: ")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("diff-identical", ("diff", "a", "b")),
        ("diff-different", ("diff", "a", "c")),
        ("info", ("info", "a")),
        ("sql", ("sql", "SELECT rank, step, point, count(*) AS n FROM gradients GROUP BY ALL "
                 "ORDER BY ALL LIMIT 4", "a")),
        ("no-run", ("diff", "a", "nowhere")),
    ],
)  # fmt: skip
def test_output_is_the_golden_one(name: str, arguments: tuple[str, ...], runs: Path) -> None:
    """As a person would read it, sizes, times and versions masked. `scripts/regold` rewrites them."""
    done = analyzer(*arguments, cwd=runs)
    must_be_golden(name, done.stdout, done.stderr, done.returncode)
