"""The rule of rounding: from made-up rows, of which it is known what ought to come out. Noise measured: test_noise."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradtrace_analyzer.numerics.tolerance import Rule, epsilon, roundoff
from support.answers.commands import asked
from support.synthetic_runs.layer_chain import layered_run

# What a layer with a weight of 20 x 20 may add in float32, by hand: three times one rounding, and sums of 20 terms.
LAYER = 3 * 2.0**-24 * (1 + math.sqrt(20))
# A verdict rests on an estimate from 16 lanes from 1.5 tolerances on, and from 4 lanes from 4 on.
SURE, SURE_OF_NODES = 1.5, 4.0


def place(answer: dict[str, Any]) -> tuple[Any, ...]:
    first = answer["first_divergence"]
    return first["step"], first["module_fqn"], first["node_name"]


def verdict(a: Path, b: Path, *more: object) -> str:
    _, answer = asked("diff", a, b, *more, "--format", "json")
    if answer["verdict"] == "different":
        step, module, _ = place(answer)
        return f"different at {step} {module}"
    return str(answer["verdict"])


def test_units_are_half_of_a_dtypes_last_place() -> None:
    for dtype in (np.float64, np.float32, np.float16):
        assert (
            epsilon(np.dtype(dtype).name)
            == np.finfo(dtype).eps
            == 2 * roundoff(np.dtype(dtype).name)
        )
    assert roundoff("int64") == 0


def test_rule_grows_as_the_root_of_sums_and_of_depth() -> None:
    rule = Rule(roundoff("float32"), "float32", 10_000, 16)
    assert rule.forward() == 4 * Rule(roundoff("float32"), "float32", 10_000, 1).forward()
    longer = Rule(roundoff("float32"), "float32", 1_000_000, 16)
    assert 9 < longer.forward() / rule.forward() < 10
    assert rule.backward() > rule.forward() > rule.norm()
    assert Rule(roundoff("bfloat16"), "bfloat16", 100, 16).forward() > 500 * rule.forward()


def test_sum_of_float32_in_any_order_stays_within_the_rule() -> None:
    rule = Rule(roundoff("float32"), "float32", 4096, 1)
    draw = np.random.default_rng(0)
    for _ in range(200):
        summed = draw.standard_normal(4096).astype(np.float32)
        in_a_row = np.add.accumulate(draw.permutation(summed), dtype=np.float32)[-1]
        exact = summed.astype(np.float64).sum()
        assert abs(in_a_row - exact) < rule.forward() * np.linalg.norm(summed)


@pytest.mark.parametrize(
    ("kind", "allowed"),
    [
        ({}, LAYER * 2),
        ({"layers": 16}, LAYER * 4),
        ({"shape": (1, 400)}, 3 * 2.0**-24 * (1 + 20) * 2),
        ({"dtype": "bfloat16"}, 3 * (2.0**-8 + 2.0**-24 * math.sqrt(20)) * 2),
    ],
    ids=["four layers", "more layers", "longer sums", "another dtype"],
)
def test_output_is_allowed_what_the_rule_says_and_no_more(
    kind: dict[str, Any], allowed: float, tmp_path: Path
) -> None:
    a = layered_run(tmp_path / "a", **kind)
    for share, said in ((0.9, "within_tolerance"), (1.1, "different at 1 layer2")):
        error = {(1, "layer2"): share * SURE * allowed}
        b = layered_run(
            tmp_path / f"b{share}", forward=0.1 * LAYER, backward=1e-9, outputs=error, **kind
        )
        assert verdict(a, b) == said


def test_gradient_is_allowed_the_forward_behind_it_and_no_more(tmp_path: Path) -> None:
    """Twice as many layers; or one layer, and eight times what the step's forward shows."""
    a = layered_run(tmp_path / "a")
    seen = 0.1 * LAYER
    for forward, allowed in ((0.0, LAYER * math.sqrt(8)), (seen, LAYER + 8 * seen)):
        for share, said in ((0.9, "within_tolerance"), (1.1, "different at 1 layer2")):
            error = {(1, "layer2"): share * SURE_OF_NODES * allowed}
            name = f"b{forward}-{share}"
            b = layered_run(tmp_path / name, forward=forward, backward=1e-7, at=error)
            assert verdict(a, b) == said


def test_step_is_allowed_what_its_parameters_have_drifted(tmp_path: Path) -> None:
    """The relative change of the weights, once a layer, four times over: and nothing for a step's number."""
    a = layered_run(tmp_path / "a")
    drift = 1e-5
    allowed = LAYER * 2 + 4 * ((1 + drift) ** 4 - 1)
    for share, said in ((0.9, "within_tolerance"), (1.1, "different at 2 layer1")):
        error = {(2, "layer1"): share * SURE * allowed}
        b = layered_run(
            tmp_path / f"b{share}",
            forward=0.1 * LAYER,
            backward=1e-9,
            drift=[0, drift, drift],
            outputs=error,
        )
        assert verdict(a, b) == said
    still = layered_run(tmp_path / "still", forward=0.1 * LAYER, backward=1e-9, outputs=error)
    assert verdict(a, still) == "different at 2 layer1"


def test_rounding_everywhere_is_within_tolerance_and_says_where_that_comes_from(
    tmp_path: Path,
) -> None:
    a = layered_run(tmp_path / "a")
    code, answer = asked(
        "diff", a, layered_run(tmp_path / "b", forward=2e-7, backward=3e-7), "--format", "json"
    )
    assert (code, answer["verdict"]) == (0, "within_tolerance")
    assert "float32, sums of up to 20 terms, 4 layers" in answer["explanation"]
    assert answer["tolerance"]["arithmetic"] == "float32" and answer["tolerance"]["summands"] == 20


def test_one_link_beyond_the_noise_of_its_forward_is_the_origin(tmp_path: Path) -> None:
    a = layered_run(tmp_path / "a")
    fault = {(1, "layer2"): 1e-2}
    b = layered_run(tmp_path / "b", forward=2e-7, backward=3e-7, at=fault)
    code, answer = asked("diff", a, b, "--format", "json")
    assert code == 1 and place(answer) == (1, "layer2", "MmBackward0")
    assert "Rounding explains up to" in answer["explanation"]


def test_declared_precision_allows_what_it_rounds(tmp_path: Path) -> None:
    a = layered_run(tmp_path / "a")
    noise = layered_run(tmp_path / "noise", forward=3e-3, backward=3e-3, seed=50)
    assert asked("diff", a, noise, "--precision", "bf16", "--format", "json")[0] == 0
    assert asked("diff", a, noise, "--format", "json")[0] == 1


def test_switches_of_the_job_tell_its_precision(tmp_path: Path) -> None:
    a = layered_run(tmp_path / "a")
    facts: dict[str, Any] = {"environment": {"num_threads": 1, "float32_matmul_precision": "high"}}
    b = layered_run(tmp_path / "b", forward=2e-4, backward=3e-4, **facts)
    code, answer = asked("diff", a, b, "--format", "json")
    assert (code, answer["verdict"]) == (0, "within_tolerance") and "tf32" in answer["explanation"]


def test_module_that_computes_in_half_precision_inside_is_allowed_it(tmp_path: Path) -> None:
    """Its outputs are in float32 on both sides; the gradients of its Nodes tell."""
    a = layered_run(tmp_path / "a")
    b = layered_run(tmp_path / "b", forward=3e-4, backward=3e-4, node_dtype="float16")
    assert verdict(a, b) == "within_tolerance"
    assert verdict(a, layered_run(tmp_path / "c", forward=3e-4, backward=3e-4)).startswith("diff")


def test_exact_counts_a_bit_whatever_noise_is(tmp_path: Path) -> None:
    a = layered_run(tmp_path / "a")
    b = layered_run(tmp_path / "b", forward=2e-7, backward=3e-7)
    assert asked("diff", a, b, "--exact", "--format", "json")[0] == 1
