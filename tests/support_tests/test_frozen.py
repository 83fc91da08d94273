"""Frozen answers: what is packed comes back, and `scripts/rejudge` lists each answer that changed, however it did."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from gradtrace_schemas import layout
from gradtrace_schemas.journal import HEADER
from gradtrace_schemas.processes import machine_token
from support.frozen.capture import ABOUT
from support.frozen.changes import changes
from support.frozen.corpus import answers, keep_answers, record
from support.frozen.judging import Answer
from support.frozen.packing import pack, read_rows, unpack
from support.synthetic_runs.builder import build_run, summary_columns

SCRIPT = str(Path(__file__).resolve().parents[2] / "scripts" / "rejudge")
ODD = np.array([0x7FC0BEEF, 0xFF800001, 0x80000000, 0x7F800000], "<u4").view("<f4")


Values = Sequence[float] | npt.NDArray[np.float32]


def run(path: Path, *gradients: Values, fqn: str = "weight") -> Path:
    """Rows of three tables; the last gradient is that of a parameter too."""
    nodes = [
        {
            "event_index": n,
            "node_name": "MulBackward0",
            "start_ns": 1000 + n,
            "end_ns": 1900 + n * n,
        }
        | summary_columns(values, "grad_output_", 4)
        | (summary_columns([1.0], "grad_input_", 4) if n else {})  # null in the first row
        for n, values in enumerate(gradients)
    ]
    last = {"parameter_fqn": fqn, "shape": [len(gradients[-1])], "point": "final"}
    rows: dict[str, list[dict[str, Any]]] = {
        "steps": [{"step": 0}],
        "node_events": nodes,
        "gradients": [last | summary_columns(gradients[-1])],
    }
    return build_run(path, rows, rank_facts={"command": [f"{path}/train.py"]})


def bits(table: pa.Table) -> list[object]:
    """All that is in it, NaN by its bits."""
    found: list[object] = [table.schema]
    for column in table.columns:
        whole = column.combine_chunks()
        lengths = None
        if pa.types.is_list(whole.type):
            lengths, whole = whole.value_lengths().to_pylist(), whole.flatten()
        if pa.types.is_floating(whole.type):
            whole = whole.view(pa.int64() if whole.type.bit_width == 64 else pa.int32())
        found.append((lengths, whole.to_pylist()))
    return found


def test_packed_runs_come_back_with_all_bits_and_all_other_files(tmp_path: Path) -> None:
    place = tmp_path / "runs"
    run(place / "a", [1.0, 2.0], ODD, [3.0] * 20)
    run(place / "b" / "deep", [1.0, 2.0000002], [4.0], [3.0] * 20, [])
    run(place / "c", [1.0, 2.0])
    for path in (place / "c").rglob("part-*.parquet"):
        path.write_bytes(path.read_bytes()[:40])  # damaged
    (place / "c" / "journals").mkdir()
    (place / "c" / "journals" / "rank=00000-0.journal").write_bytes(bytes(100_000) + b"end")
    names = ["a", "b/deep", "c"]
    pack(place, names, {"b/deep": "a"}, tmp_path / "pack.zip")
    assert unpack(tmp_path / "pack.zip", tmp_path / "again") == names
    files = sorted(p.relative_to(place) for p in place.rglob("*") if p.is_file())
    assert files == sorted(
        p.relative_to(tmp_path / "again") for p in (tmp_path / "again").rglob("*") if p.is_file()
    )
    parts = 0
    for file in files:
        before, now = read_rows(place / file), read_rows(tmp_path / "again" / file)
        if before is None or now is None:
            assert (place / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
        else:
            assert (before[1], bits(before[0])) == (now[1], bits(now[0])), file
            parts += 1
    assert parts == 6


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Of a pair of `scripts/accuracy` and of what two tests asked, one of them twice of a run that lived."""
    accuracy, whole = tmp_path / "accuracy", tmp_path / "whole"
    run(accuracy / "1", [1.0, 2.0], [3.0, 4.0])
    run(accuracy / "2", [1.0, 2.0], [3.0, 5.0])
    pair = {"about": "a pair", "options": ["--precision", "fp8"], "runs": ["1", "2"]}
    (accuracy / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    notes = []
    for number, living in enumerate((True, True, False)):
        folder = whole / f"7-000{number}"
        hidden = run(folder / "job", [1.0, 2.0], [3.0, 4.0], fqn=f"{tmp_path}/secret")
        header = np.zeros(1, HEADER)
        header["machine"], header["pid"], header["process_start"] = machine_token(), os.getpid(), 5
        layout.journal_file(hidden, 0, 0).parent.mkdir()
        layout.journal_file(hidden, 0, 0).write_bytes(header.tobytes())
        about = {
            "test": f"t{number // 2}",
            "now_ns": number,
            "living": ["rank=00000-0.journal"] * living,
            "source": f"/runs/{number // 2}",
        }
        (folder / ABOUT).write_text(json.dumps(about))
        notes.append({"test": about["test"], "arguments": ["failures", f"@{folder.name}/job"]})
    (whole / "7.jsonl").write_text("".join(json.dumps(note) + "\n" for note in notes))
    record(accuracy, whole, [str(tmp_path)], tmp_path / "stage", tmp_path / "corpus")
    assert rejudge(tmp_path / "corpus", "--accept").returncode == 0
    return tmp_path / "corpus"


def rejudge(
    corpus: Path, *options: str, analyzer: Path | None = None
) -> subprocess.CompletedProcess[str]:
    path = [str(analyzer)] * bool(analyzer) + os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return subprocess.run(
        [sys.executable, SCRIPT, "--processes", "1", "--corpus", str(corpus), *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_answers_hold_and_each_that_changes_is_listed(corpus: Path, tmp_path: Path) -> None:
    held = rejudge(corpus, "--processes", "2")
    assert held.returncode == 0, held.stdout + held.stderr
    # Each of four runs thrice, the pair, and no run that a test asked about before it had its answer.
    assert held.stdout.startswith("0 of 13 answers changed")
    kept = answers(corpus)
    name = "diff --precision fp8 accuracy/1 accuracy/2"
    verdict = json.loads(kept[name]["json"].said)["verdict"]
    said = kept[name]["json"].said.replace(f'"{verdict}"', '"another"')
    changed = dataclasses.replace(kept[name]["json"], said=said, code=7)
    keep_answers(kept | {name: kept[name] | {"json": changed}}, corpus)
    listed = rejudge(corpus, "--only", "diff *")
    assert listed.returncode == 1
    assert listed.stdout.splitlines()[:4] == [
        name,
        "    of accuracy: a pair",
        f"    json: exit status: 7 -> {kept[name]['json'].code}",
        f'    json: verdict: "another" -> "{verdict}"',
    ]
    assert listed.stdout.splitlines()[-1].startswith("1 of 1 answers changed (")
    assert rejudge(corpus, "--only", "check *", "--part", "1/4").returncode == 0
    assert rejudge(corpus, "--only", "diff *", "--accept").returncode == 0
    assert answers(corpus) == kept


def test_analyzer_that_says_something_else_is_found_out(corpus: Path, tmp_path: Path) -> None:
    import gradtrace_analyzer

    other = tmp_path / "other" / "gradtrace_analyzer"
    shutil.copytree(Path(gradtrace_analyzer.__file__).parent, other)
    for path in other.rglob("*.py"):
        path.write_text(path.read_text().replace('"explanation"', '"told"'))
    listed = rejudge(corpus, "--only", "diff *", analyzer=other.parent)
    assert listed.returncode == 1
    assert "    json: explanation: " in listed.stdout and " -> (absent)\n" in listed.stdout


def test_corpus_tells_nothing_of_its_machine(corpus: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "stage").rglob("*"):
        if path.is_file():
            assert str(tmp_path).encode() not in path.read_bytes()
            assert b'"host0"' not in path.read_bytes()
            table = read_rows(path)
            assert table is None or str(tmp_path) not in str(table[0].to_pydict())
    assert "/secret" in str(
        [read_rows(p) for p in (tmp_path / "stage").rglob("gradients/*/*.parquet")]
    )
    said = {name: a["json"].said for name, a in answers(corpus).items() if "failures whole" in name}
    assert len(said) == 2


def test_what_tests_ask_and_record_is_kept(tmp_path: Path) -> None:
    root = Path(SCRIPT).parents[1]
    chosen = "tests/whole/test_diff_origins.py::test_options_restrict_what_is_compared_and_the_answer_says_so"
    command = [sys.executable, "-m", "pytest", "-q", chosen, "--keep-runs", str(tmp_path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout
    (notes,) = tmp_path.glob("*.jsonl")
    asked = [json.loads(line) for line in notes.read_text().splitlines()]
    assert {note["test"] for note in asked} == {chosen.removeprefix("tests/")}
    kinds = [[w for w in note["arguments"] if not w.startswith("@")] for note in asked]
    assert ["diff", "--at", "1"] in kinds and ["diff", "-v", "--top", "2"] in kinds
    runs = {w[1:] for note in asked for w in note["arguments"] if w.startswith("@")}
    assert len(runs) == 2  # each copied once, though asked about again and again
    for copy in runs:
        assert (tmp_path / copy / layout.RUN_FILE).exists()
        assert (tmp_path / copy).parent.joinpath(ABOUT).exists()


def test_digits_of_a_tolerance_behind_the_ninth_do_not_count_and_those_before_do() -> None:
    def told(tolerance: str) -> dict[str, Answer]:
        return {"json": Answer(1, f'{{"tolerance": {tolerance}, "error": {tolerance}}}', "")}

    kept = {"json": Answer(1, '{"tolerance": 0.005565164237631127}', "")}
    assert changes(kept, {"json": Answer(1, '{"tolerance": 0.005565164237639672}', "")}) == []
    assert changes(kept, {"json": Answer(1, '{"tolerance": 0.005565169}', "")}) != []
    assert changes(told("0.005565164237631127"), told("0.005565164237639672")) == [
        "json: error: 0.005565164237631127 -> 0.005565164237639672"
    ]
