"""What `.grad` holds after several passes of a step is what they put there."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradtrace_analyzer.check.law import Findings
from gradtrace_analyzer.check.laws.accumulation import gradients_accumulate
from support.synthetic_runs.builder import summary_columns
from support.synthetic_runs.data_parallel import Job, checked, findings, violation

NAMES = ("a.weight", "a.bias")


def passes(
    *, change: float = 1.0, reset: bool = False, reduced: bool = False, rank_count: int = 1
) -> dict[str, list[dict[str, Any]]]:
    """Three passes of one step; before the last one `.grad` is multiplied, or reset."""
    rows: dict[str, list[dict[str, Any]]] = {
        "gradients": [], "node_events": [], "backward_passes": [], "steps": [],
    }  # fmt: skip
    for rank in range(rank_count):
        own: dict[str, Any] = {"rank": rank, "step": 0}
        record = iter(range(1, 1000))
        held = {name: np.zeros(32, "float32") for name in NAMES}
        for index in range(3):
            key = {**own, "backward_index": index, "microbatch": index}
            for n, name in enumerate(NAMES):
                came = np.random.default_rng((rank, index, n)).standard_normal(32).astype("float32")
                came[0] = -0.0  # added to a zero it becomes another zero
                if index == 2:
                    held[name] = held[name] * np.float32(0 if reset else change)
                held[name] = held[name] + came
                place = {**key, "root": 0, "parameter_fqn": name}
                after = {"point": "local", **summary_columns(held[name])}
                rows["gradients"].append({**place, "record_index": next(record), **after})
                arrived = {
                    "event_index": n, "node_name": "AccumulateGrad", "outcome": "ok",
                    **summary_columns(came, "grad_output_", 4),
                }  # fmt: skip
                rows["node_events"].append({**place, "record_index": next(record), **arrived})
                if reduced:
                    held[name] = held[name] * np.float32(0.5)
                    after = {"point": "reduced", **summary_columns(held[name])}
                    rows["gradients"].append({**place, "record_index": next(record), **after})
            rows["backward_passes"].append(
                {**key, "record_index": next(record), "kind": "backward", "loss": 1.0}
            )
        rows["steps"].append({**own, "record_index": next(record), "backward_count": 3})
    return rows


def test_gradient_that_was_multiplied_between_passes_is_told(tmp_path: Path) -> None:
    answer = checked(tmp_path, passes(change=0.25, rank_count=2))
    found = violation(answer, "gradients_accumulate")
    assert (found["severity"], found["ranks"], found["count"]) == ("warning", [0, 1], 4)
    assert (found["backward_index"], found["microbatch"]) == (2, 2)
    assert found["factor"] == pytest.approx(0.25, rel=1e-4)
    assert found["explanation"] == (
        "Step 0, ranks 0-1: after backward pass 1 and before pass 2, `.grad` of a.weight and a.bias was multiplied by "
        "0.25 outside backward."
    )
    assert answer["judged"]["gradients_accumulate"] == 8


@pytest.mark.parametrize("kind", [{}, {"reset": True}, {"reduced": True}])
def test_gradient_may_be_kept_reset_or_reduced_between_passes(
    kind: dict[str, bool], tmp_path: Path
) -> None:
    answer = checked(tmp_path, passes(**kind), rank_count=1)
    assert answer["violations"] == [] and answer["judged"]["gradients_accumulate"] == 4


def test_gradient_that_no_factor_explains_is_told_as_changed(tmp_path: Path) -> None:
    rows = passes()
    for name in NAMES:
        values = np.random.default_rng(9).standard_normal(32).astype("float32")
        (last,) = (
            r for r in rows["gradients"] if r["backward_index"] == 2 and r["parameter_fqn"] == name
        )
        last.update(summary_columns(values))
    found = violation(checked(tmp_path, rows, rank_count=1), "gradients_accumulate")
    assert found["factor"] is None
    assert "was changed (of a.weight, " in found["explanation"]


def test_gradient_that_is_reduced_outside_buckets_is_not_judged(tmp_path: Path) -> None:
    rows = passes(change=0.25)
    for row in rows["backward_passes"]:
        row["ddp_sync"] = "sync"
    answer = checked(tmp_path, rows, rank_count=1)
    assert "gradients_accumulate" in answer["not_judged"]


def test_gradient_without_its_size_is_not_judged(tmp_path: Path) -> None:
    rows = passes(change=0.25)
    for row in rows["gradients"]:
        row["numel"] = None
    found = findings(tmp_path, gradients_accumulate, rows, rank_count=1)
    assert (list(found.violations), found.compared) == ([], 0)
    assert found.not_judged == (
        "no gradient was accumulated onto one that was recorded before it in its step"
    )


def test_step_of_one_pass_lacks_nothing(tmp_path: Path) -> None:
    assert findings(tmp_path, gradients_accumulate, Job().made()) == Findings()
