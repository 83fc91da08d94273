"""`microbatches_add_up`: what the microbatches of a stage give is in its gradients, and all stages are scaled alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from gradtrace_analyzer.check.law import Findings
from gradtrace_analyzer.check.laws.microbatches import microbatches_add_up
from support.synthetic_runs.builder import summary_columns
from support.synthetic_runs.data_parallel import Job, Rows, findings
from support.synthetic_runs.pipeline import MICROBATCHES, STEPS, pipeline

STAGES = 3
MEAN = 1 / MICROBATCHES


def summed(*, lost: bool = False, scales: Sequence[float] = (MEAN,) * STAGES) -> Rows:
    """A pipeline with the one parameter that each stage has, its gradient after each microbatch and as the optimizer
    saw it. Where something is `lost`, `.grad` of stage 1 was set to zero before the last microbatch of step 1."""
    rows = pipeline(stages=STAGES)
    rows |= {"gradients": [], "node_events": []}
    for stage in range(STAGES):
        record = 1000
        for step in range(STEPS):
            held = np.zeros(32, "float32")
            for microbatch in range(MICROBATCHES):
                if lost and (stage, step, microbatch) == (1, 1, 2):
                    held = np.zeros_like(held)
                came = np.random.default_rng((stage, step, microbatch)).standard_normal(32)
                held = held + came.astype("float32")
                place = {
                    "rank": stage, "step": step, "microbatch": microbatch, "backward_index": microbatch, "root": 0,
                    "parameter_fqn": "weight",
                }  # fmt: skip
                arrived = summary_columns(came.astype("float32"), "grad_output_", 4)
                node = {"event_index": 0, "node_name": "AccumulateGrad", "stage_index": stage}
                rows["node_events"].append({**place, "record_index": record, **node, **arrived})
                after = {"record_index": record + 1, "point": "local", **summary_columns(held)}
                rows["gradients"].append({**place, **after})
                record += 2
            seen = (held * np.float32(scales[stage])).astype("float32")
            final = {"record_index": record, "point": "final", **summary_columns(seen)}
            rows["gradients"].append({**place, **final})
            record += 1
    return rows


def test_gradients_that_add_up_are_judged_by_the_sum(tmp_path: Path) -> None:
    found = findings(tmp_path, microbatches_add_up, summed(), rank_count=STAGES)
    sums, scaled = STAGES * STEPS * (MICROBATCHES - 1), STAGES * STEPS
    assert (found.violations, found.compared) == ([], sums + scaled)


def test_what_was_set_to_zero_between_microbatches_is_lost(tmp_path: Path) -> None:
    (v,) = findings(tmp_path, microbatches_add_up, summed(lost=True), rank_count=STAGES).violations
    assert (v.law, v.severity, v.step, v.rank) == (microbatches_add_up, "error", 1, 1)
    assert (v.stage_index, v.microbatch, v.backward_index, v.count) == (1, 1, 2, 1)
    assert (v.root, v.parameter_fqn, v.ranks) == (0, "weight", (1,))
    assert v.explanation == (
        "Step 1, microbatch 1: what it and those before it gave is lost in stage 1 (rank 1): `.grad` of weight was set "
        "to zero before microbatch 2, after which it holds what that one gave, and nothing else."
    )


@pytest.mark.parametrize(
    ("scale", "factor", "said"),
    [
        (1.0, 3.0, "not scaled, those of the other stages multiplied by 0.3333: dividing by the number of "
         "microbatches was left out."),
        (MEAN**2, 1 / 3, "multiplied by 0.1111, those of the other stages multiplied by 0.3333: dividing by the number "
         "of microbatches was done twice."),
        (0.0, 0.0, "set to zero, those of the other stages multiplied by 0.3333: what all its microbatches gave is "
         "lost."),
    ],
)  # fmt: skip
def test_stage_that_is_scaled_otherwise_than_all_others_is_told(
    tmp_path: Path, scale: float, factor: float, said: str
) -> None:
    rows = summed(scales=(MEAN, MEAN, scale))
    (v,) = findings(tmp_path, microbatches_add_up, rows, rank_count=STAGES).violations
    assert (v.law, v.severity, v.step, v.rank, v.stage_index) == (
        microbatches_add_up, "error", 0, 2, 2,
    )  # fmt: skip
    assert v.factor == pytest.approx(factor, abs=1e-6) and v.count == MICROBATCHES
    assert v.explanation == (
        f"Step 0: after its 3 microbatches the gradients of stage 2 (rank 2) were {said}"
    )


def test_stages_that_are_scaled_by_what_no_division_explains_are_not_held_against(
    tmp_path: Path,
) -> None:
    """Clipping by stage, for one."""
    rows = summed(scales=(MEAN, MEAN, 0.7 * MEAN))
    assert findings(tmp_path, microbatches_add_up, rows, rank_count=STAGES).violations == []


def test_stages_without_a_gradient_after_each_microbatch_are_not_judged(tmp_path: Path) -> None:
    found = findings(tmp_path / "few", microbatches_add_up, pipeline())
    assert (found.compared, found.not_judged) == (
        0,
        "no gradient of a stage was recorded after several microbatches",
    )
    none = findings(tmp_path / "none", microbatches_add_up, {})
    assert none.not_judged == "no pipeline stage was recorded"


def test_job_without_stages_has_no_sums_to_lack(tmp_path: Path) -> None:
    assert findings(tmp_path, microbatches_add_up, Job().made()) == Findings()
