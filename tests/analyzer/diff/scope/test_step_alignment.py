from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradtrace_analyzer.diff.scope.cover import Cover, cover_of
from gradtrace_analyzer.diff.scope.step_alignment import (
    StepAlignment,
    alignment_hint,
    alignment_of,
)
from gradtrace_analyzer.errors import BadAlignment
from gradtrace_analyzer.runs.opening import open_run
from gradtrace_analyzer.runs.run import Run
from support.synthetic_runs.builder import build_run, summary_columns


def counted(path: Path, *numbers: int | None, framework: str = "transformers") -> Run:
    """A run whose framework counted its steps so."""
    rows = [
        {
            "step": step,
            "framework": None if number is None else framework,
            "framework_step": number,
        }
        for step, number in enumerate(numbers)
    ]
    return open_run(build_run(path, {"steps": rows}))


def parameters(path: Path, *values: float) -> Run:
    rows: list[dict[str, Any]] = [
        {"step": step, "root": 0, "parameter_fqn": "w", "point": "before", "kind": "parameter",
         **summary_columns([value])}
        for step, value in enumerate(values)
    ]  # fmt: skip
    return open_run(build_run(path, {"parameters": rows}))


def covered(run: Run, alignment: StepAlignment | None) -> Cover:
    nothing: dict[str, dict[int, list[int]]] = {"both": {}, "baseline": {}, "candidate": {}}
    runs = {"baseline": run, "candidate": run}
    return cover_of(runs, [], nothing, {}, {side: [] for side in runs}, alignment=alignment)


@pytest.mark.parametrize(
    ("text", "offset"), [("offset=5000", 5000), ("offset:-3", -3), ("offset=+2", 2)]
)
def test_offset_is_read(text: str, offset: int, tmp_path: Path) -> None:
    run = counted(tmp_path / "a", None)
    assert alignment_of(text, run, run) == StepAlignment(offset)


def test_framework_says_how_far_the_steps_are_apart(tmp_path: Path) -> None:
    a, b = counted(tmp_path / "a", 0, 2, 4, 6, None), counted(tmp_path / "b", 4, 6)
    assert alignment_of("framework", a, b) == StepAlignment(2, "transformers")
    assert alignment_of("framework", b, a) == StepAlignment(-2, "transformers")
    assert alignment_of(None, a, b) is None


@pytest.mark.parametrize(
    ("numbers", "framework", "said"),
    [
        ((None, None), "", "recorded no framework's counter; --align-steps offset=N"),
        ((0, 1, 1, 2), "transformers", "step 1 of transformers is several steps of the candidate (1-2)"),
        ((7, 8), "transformers", "no step of transformers was recorded on both sides: 0-3 against 7-8"),
        ((0, 1), "lightning", "counted by transformers, the candidate's by lightning"),
        ((0, 2, 3), "transformers", "do not go alike"),
    ],
)  # fmt: skip
def test_counters_that_pair_nothing_are_refused(
    numbers: tuple[int | None, ...], framework: str, said: str, tmp_path: Path
) -> None:
    baseline = counted(tmp_path / "a", 0, 1, 2, 3)
    with pytest.raises(BadAlignment) as refused:
        alignment_of("framework", baseline, counted(tmp_path / "b", *numbers, framework=framework))
    assert said in str(refused.value)


def test_text_that_is_neither_is_refused(tmp_path: Path) -> None:
    run = counted(tmp_path / "a", None)
    for text in ("offset", "offset=x", "5", ""):
        with pytest.raises(BadAlignment, match="write framework, or offset=N"):
            alignment_of(text, run, run)


def test_step_that_begins_with_the_parameters_of_another_is_hinted_at(tmp_path: Path) -> None:
    whole, late = parameters(tmp_path / "a", 0, 1, 2, 3), parameters(tmp_path / "b", 2, 3)
    hint = alignment_hint({"baseline": whole, "candidate": late})
    assert hint is not None and hint.endswith("--align-steps offset=2 pairs them.")
    turned = alignment_hint({"baseline": late, "candidate": whole})
    assert turned is not None and turned.endswith("--align-steps offset=-2 pairs them.")
    assert alignment_hint({"baseline": whole, "candidate": whole}) is None
    assert (
        alignment_hint({"baseline": whole, "candidate": parameters(tmp_path / "c", 9, 9)}) is None
    )
