"""What a comparison opens: little, whatever the size, and the answer is that of opening everything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gradtrace_analyzer.diff.judged_rows as judged_rows
import gradtrace_analyzer.diff.pairing.opening as opening
import gradtrace_analyzer.diff.pairing.pairs as pairing
import gradtrace_analyzer.diff.pairing.step_index as step_index
from gradtrace_analyzer.diff.compare import compare
from gradtrace_analyzer.reports.diff.json_object import as_object
from gradtrace_analyzer.reports.tables import json_text
from gradtrace_analyzer.runs.opening import open_run
from gradtrace_schemas import TABLES
from support.synthetic_runs.builder import build_run
from support.synthetic_runs.large import Change, Sizes, build_large

SIZES = Sizes(ranks=2, steps=6, nodes=40, modules=6, parts=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def baseline(folder: Path) -> Path:
    return build_large(folder / "baseline", SIZES)


def changed(folder: Path, baseline: Path, change: Change) -> Path:
    return build_large(folder / change.replace(" ", "-"), SIZES, change, like=baseline)


def answer(baseline: Path, candidate: Path, *, exact: bool = False) -> dict[str, Any]:
    found = as_object(compare(open_run(baseline), open_run(candidate), exact=exact))
    told: dict[str, Any] = json.loads(json_text(found))
    return told


@pytest.mark.parametrize("change", ["nothing", "one event", "noise", "bug"])
def test_sieve_changes_no_answer(
    change: Change, folder: Path, baseline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its judgement must be that of the SQL that pairs row by row."""
    candidate = changed(folder, baseline, change)
    opened = answer(baseline, candidate)
    monkeypatch.setattr(step_index, "MOST_ROWS", 0)
    sieved = answer(baseline, candidate)
    for seen, known in zip(sieved["spread"], opened["spread"], strict=True):
        if seen["beyond_tolerance"] is None:  # the step was not opened
            seen["beyond_tolerance"] = known["beyond_tolerance"]
    assert sieved == opened
    expected = {"nothing": "identical", "noise": "within_tolerance"}
    assert opened["verdict"] == expected.get(change, "different")


def test_order_of_rows_within_a_step_changes_no_answer(
    folder: Path, baseline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a step does not pair by place: it is opened, or opened and counted."""
    import shutil

    import pyarrow as pa
    import pyarrow.parquet as pq

    from gradtrace_schemas.batches import write_part

    candidate = changed(folder, baseline, "bug")
    turned = shutil.copytree(candidate, tmp_path / "turned")
    for part in turned.glob("node_events/*/*.parquet"):
        rows = pq.read_table(part, partitioning=None)
        order = sorted(range(len(rows)), key=lambda n: (rows["step"][n].as_py(), -n))
        part.unlink()
        moved = rows.take(pa.array(order)).cast(TABLES["node_events"].arrow_schema)
        write_part(part, TABLES["node_events"], moved, 1)
    opened = answer(baseline, turned)
    monkeypatch.setattr(step_index, "MOST_ROWS", 0)
    assert answer(baseline, turned) == opened
    assert opened["first_divergence"]["step"] == SIZES.steps // 2


def test_more_differences_than_are_followed_are_told(
    folder: Path, baseline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate = changed(folder, baseline, "noise")
    said = "more rows differ in that step than were followed"
    whole = answer(baseline, candidate, exact=True)
    monkeypatch.setattr(judged_rows, "MOST_DIFFERENCES", 1)
    partial = answer(baseline, candidate, exact=True)
    assert said in partial["explanation"] and said not in whole["explanation"]
    assert partial["first_divergence"]["node_name"] == whole["first_divergence"]["node_name"]


def test_link_without_a_digest_on_both_sides_is_compared(tmp_path: Path) -> None:
    """A row without a fingerprint leaves its link no digest: that nothing tells is no proof of being equal."""
    summary = {"grad_input_norm": 1.0, "grad_input_numel": 4, "grad_input_dtype": "float32"}
    nodes = [{"event_index": 0, "node_name": "MulBackward0", **summary}]
    others = [nodes[0] | {"grad_input_norm": 3.0}]
    steps = [{"digest_forward": 7}]
    for name, rows in (("a", nodes), ("b", others)):
        build_run(tmp_path / name, {"steps": steps, "node_events": rows})
    found = answer(tmp_path / "a", tmp_path / "b")
    assert found["first_divergence"]["node_name"] == "MulBackward0", found["explanation"]


def test_one_event_opens_one_step_of_one_rank(
    folder: Path, baseline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[tuple[int, int]]] = []
    original = pairing.opened

    def watched(places: Any) -> str:
        seen.append(set(places))
        return original(places)

    monkeypatch.setattr(opening, "opened", watched)
    answer(baseline, changed(folder, baseline, "one event"))
    assert seen == [{(SIZES.ranks - 1, SIZES.steps // 2)}]
