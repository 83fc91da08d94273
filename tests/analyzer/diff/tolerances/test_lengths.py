"""What lengths tell where directions do not: a factor in coarse arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.answers.commands import asked
from support.synthetic_runs.layer_chain import Place, layered_run

COARSE: dict[str, Any] = {"layers": 8, "forward": 6e-2, "backward": 6e-2}
STEPS = 6


def test_factor_beyond_what_other_nodes_lengthen_is_found(tmp_path: Path) -> None:
    """In bfloat16 rounding turns gradients by 3e-3, and 4 times the forward's noise would hide 1.01."""
    a = layered_run(tmp_path / "a", layers=8, dtype="bfloat16")
    noise: dict[str, Any] = {
        "layers": 8, "dtype": "bfloat16", "forward": 3e-3, "backward": 3e-3, "lengthens": 3e-4,
        "drift": [0, 1e-6, 1e-6],
    }  # fmt: skip
    for times, code in ((1.003, 0), (1.01, 1)):
        fault = {(1, "layer2"): times}
        b = layered_run(tmp_path / f"b{times}", times=fault, **noise)
        found, answer = asked("diff", a, b, "--format", "json")
        assert found == code, answer["explanation"]
    first = answer["first_divergence"]
    assert (first["step"], first["module_fqn"]) == (1, "layer2")
    assert first["tolerance"] < 8e-3
    assert "has 1.01 times the baseline's norm, given what comes in" in answer["explanation"]
    assert "Rounding would explain that it is longer or shorter by" in answer["explanation"]


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layered_run(
        tmp_path_factory.mktemp("coarse") / "a", exact_at="layer2", layers=8, steps=STEPS
    )


def factor_from(step: int) -> dict[Place, float]:
    return {(s, "layer2"): 1.01 for s in range(step, STEPS)}


@pytest.mark.parametrize(("first", "is_found"), [(2, True), (3, False)])
def test_same_factor_four_times_in_a_row_is_no_rounding(
    first: int, is_found: bool, baseline: Path, tmp_path: Path
) -> None:
    b = layered_run(
        tmp_path / "b", steps=STEPS, exact_at="layer2", times=factor_from(first), **COARSE
    )
    code, answer = asked("diff", baseline, b, "--precision", "fp8", "--format", "json")
    assert code == int(is_found), answer["explanation"]
    if is_found:
        place = answer["first_divergence"]
        assert (place["step"], place["module_fqn"]) == (2, "layer2")
        assert "longer or shorter time after time" in answer["explanation"]


def test_noise_that_comes_back_with_the_same_batch_is_no_factor(
    baseline: Path, tmp_path: Path
) -> None:
    b = layered_run(tmp_path / "b", steps=STEPS, same_noise=True, lengthens=0.01, **COARSE)
    code, answer = asked("diff", baseline, b, "--precision", "fp8", "--format", "json")
    assert (code, answer["verdict"]) == (0, "within_tolerance")
