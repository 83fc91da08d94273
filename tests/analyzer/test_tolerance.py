"""The rule of rounding, and noise that is measured: from made-up rows, of which it is known what ought to come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gradtrace_analyzer.tolerance import Rule, epsilon, roundoff
from gradtrace_schemas.table import NODE_SKETCH_LANES
from support.commands import asked
from support.layered import noisy, values
from support.synthetic import build_run, summary_columns

STEPS = 3


def run(
    path: Path,
    *,
    forward: float = 0.0,
    backward: float = 0.0,
    at: dict[tuple[int, str], float] | None = None,
    seed: int = 0,
    **facts: Any,
) -> Path:
    """A chain of four layers. `forward` and `backward` are relative errors of every row; `at` those of a Node at a
    (step, module)."""
    rows: dict[str, list[dict[str, Any]]] = {
        "module_calls": [],
        "node_events": [],
        "parameters": [],
    }
    record = 0
    names = [f"layer{n}" for n in range(4)]
    for step in range(STEPS):
        for n, name in enumerate(names):
            record += 1
            rows["parameters"].append(
                {"step": step, "record_index": record, "root": 0, "parameter_fqn": f"{name}.weight",
                 "point": "before", "kind": "parameter", "shape": [20, 20], **summary_columns(values(n))}
            )  # fmt: skip
        for n, name in enumerate(names):
            record += 1
            there, out = values(100 + n), values(101 + n)
            rows["module_calls"].append(
                {"step": step, "record_index": record, "root": 0, "module_fqn": name, "phase": "forward",
                 "call_index": 0, "module_class": "Linear", "depth": 1,
                 **summary_columns(noisy(there, forward if n else 0.0, seed + n), "input_"),
                 **summary_columns(noisy(out, forward, seed + n + 1), "output_")}
            )  # fmt: skip
        for index, name in enumerate(reversed(names)):
            record += 1
            error = (at or {}).get((step, name), backward)
            rows["node_events"].append(
                {"step": step, "record_index": record, "backward_index": 0, "event_index": index, "root": 0,
                 "module_fqn": name, "call_index": 0, "node_name": "MmBackward0", "occurrence": 0,
                 "phase": "backward", "outcome": "ok",
                 **summary_columns(noisy(values(200 + index), backward, seed + 20 + index), "grad_output_",
                                   NODE_SKETCH_LANES),
                 **summary_columns(noisy(values(201 + index), error, seed + 21 + index), "grad_input_",
                                   NODE_SKETCH_LANES)}
            )  # fmt: skip
    return build_run(path, rows, rank_facts=facts or None)


def place(answer: dict[str, Any]) -> tuple[Any, ...]:
    first = answer["first_divergence"]
    return first["step"], first["module_fqn"], first["node_name"]


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


def test_rounding_everywhere_is_within_tolerance_and_says_where_that_comes_from(
    tmp_path: Path,
) -> None:
    a = run(tmp_path / "a")
    code, answer = asked(
        "diff", a, run(tmp_path / "b", forward=2e-7, backward=3e-7), "--format", "json"
    )
    assert (code, answer["verdict"]) == (0, "within_tolerance")
    assert "float32, sums of up to 20 terms, 4 layers" in answer["explanation"]
    assert answer["tolerance"]["arithmetic"] == "float32" and answer["tolerance"]["summands"] == 20


def test_one_link_beyond_the_noise_of_its_forward_is_the_origin(tmp_path: Path) -> None:
    a = run(tmp_path / "a")
    fault = {(1, "layer2"): 1e-2}
    b = run(tmp_path / "b", forward=2e-7, backward=3e-7, at=fault)
    code, answer = asked("diff", a, b, "--format", "json")
    assert code == 1 and place(answer) == (1, "layer2", "MmBackward0")
    assert "Rounding explains up to" in answer["explanation"]


def test_four_lanes_decide_nothing_within_a_factor_of_four(tmp_path: Path) -> None:
    a = run(tmp_path / "a")
    rule = Rule(roundoff("float32"), "float32", 20, 4)
    near = {(1, "layer2"): 1.5 * rule.backward()}
    far = {(1, "layer2"): 10 * rule.backward()}
    for fault, verdict in ((near, "within_tolerance"), (far, "different")):
        # The forward shows no noise, so that the rule alone decides; half of the rows differ, so no witness does.
        b = run(tmp_path / f"b{verdict}", backward=1e-7, at=fault)
        assert asked("diff", a, b, "--format", "json")[1]["verdict"] == verdict


def test_declared_precision_allows_what_it_rounds(tmp_path: Path) -> None:
    a = run(tmp_path / "a")
    noise = run(tmp_path / "noise", forward=3e-3, backward=3e-3, seed=50)
    assert asked("diff", a, noise, "--precision", "bf16", "--format", "json")[0] == 0
    assert asked("diff", a, noise, "--format", "json")[0] == 1


def test_switches_of_the_job_tell_its_precision(tmp_path: Path) -> None:
    a = run(tmp_path / "a")
    facts: dict[str, Any] = {"environment": {"num_threads": 1, "float32_matmul_precision": "high"}}
    b = run(tmp_path / "b", forward=2e-4, backward=3e-4, **facts)
    code, answer = asked("diff", a, b, "--format", "json")
    assert (code, answer["verdict"]) == (0, "within_tolerance") and "tf32" in answer["explanation"]


def test_noise_is_measured_from_a_repeat(tmp_path: Path) -> None:
    a = run(tmp_path / "a")
    repeat = run(tmp_path / "repeat", forward=1e-4, backward=1e-4, seed=10)
    other = run(tmp_path / "other", forward=1.2e-4, backward=1.1e-4, seed=30)
    assert asked("diff", a, other, "--format", "json")[0] == 1
    code, answer = asked("diff", a, other, "--noise", repeat, "--format", "json")
    assert (code, answer["verdict"]) == (0, "within_tolerance")
    assert "measured from repeat" in answer["explanation"]
    assert (
        answer["tolerance"]["measured_from"] == ["repeat"]
        and 5e-5 < answer["tolerance"]["noise"] < 2e-4
    )


def test_fault_beyond_measured_noise_is_found_and_the_noise_is_named(tmp_path: Path) -> None:
    a = run(tmp_path / "a")
    repeat = run(tmp_path / "repeat", forward=1e-6, backward=1e-6, seed=10)
    b = run(tmp_path / "b", forward=1e-6, backward=1e-6, seed=30, at={(2, "layer1"): 1e-3})
    code, answer = asked("diff", a, b, "--noise", repeat, "--format", "json")
    assert code == 1 and place(answer) == (2, "layer1", "MmBackward0")
    assert (
        "measured from repeat" in answer["explanation"] and "Noise here is" in answer["explanation"]
    )


def test_repeat_without_noise_makes_any_bit_a_difference(tmp_path: Path) -> None:
    a, repeat = run(tmp_path / "a"), run(tmp_path / "repeat")
    b = run(tmp_path / "b", at={(0, "layer3"): 3e-7})
    assert asked("diff", a, b, "--format", "json")[1]["verdict"] == "within_tolerance"
    code, answer = asked("diff", a, b, "--noise", repeat, "--format", "json")
    assert code == 1 and place(answer) == (0, "layer3", "MmBackward0")


def test_exact_counts_a_bit_whatever_noise_is(tmp_path: Path) -> None:
    a = run(tmp_path / "a")
    b = run(tmp_path / "b", forward=2e-7, backward=3e-7)
    assert asked("diff", a, b, "--exact", "--format", "json")[0] == 1
