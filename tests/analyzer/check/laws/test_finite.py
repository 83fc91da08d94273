"""`values_finite`: where the first infinity and the first NaN were born."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradtrace_analyzer.check.laws.finite import values_finite
from support.synthetic_runs.builder import summary_columns
from support.synthetic_runs.data_parallel import Job, Rows, checked, edit, findings, laws, remove
from support.synthetic_runs.pipeline import handed, pipeline, row_of

NAN, INF = {"nan_count": 2}, {"inf_count": 3}


def prefixed(prefix: str, counts: dict[str, int]) -> dict[str, int]:
    return {f"{prefix}{name}": count for name, count in counts.items()}


def births(answer: Any) -> list[Any]:
    return [v for v in answer["violations"] if v["law"] == "values_finite"]


def spread(rows: Rows, step: int, counts: dict[str, int], rank: int | None = None) -> None:
    """What a value that is not finite does to everything after the forward pass."""
    where = {"step": step} if rank is None else {"step": step, "rank": rank}
    edit(
        rows,
        "node_events",
        where,
        **prefixed("grad_output_", counts),
        **prefixed("grad_input_", counts),
    )
    edit(rows, "gradients", where, **counts)
    edit(rows, "buckets", where, **prefixed("before_", counts))
    edit(rows, "buckets", {"step": step}, **prefixed("after_", counts))
    for point in ("reduced", "final"):
        edit(rows, "gradients", {"step": step, "point": point}, **counts)
    edit(rows, "parameters", {"step": step, "point": "after"}, **counts)


def test_finite_run_breaks_nothing(tmp_path: Path) -> None:
    answer = checked(tmp_path, Job().made())
    assert births(answer) == [] and answer["judged"]["values_finite"] == 150


def test_value_that_came_with_the_data_is_said_so(tmp_path: Path) -> None:
    rows = Job().made()
    edit(rows, "inputs", {"step": 1, "rank": 1}, **NAN)
    edit(
        rows,
        "module_calls",
        {"step": 1, "rank": 1},
        **prefixed("input_", NAN),
        **prefixed("output_", NAN),
    )
    spread(rows, 1, NAN, rank=1)
    [found] = births(checked(tmp_path, rows))
    assert (found["step"], found["rank"], found["severity"]) == (1, 1, "error")
    assert found["explanation"] == (
        "Step 1, rank 1: the first NaN came in with the data: input 'x'. Rank 0 got it through the reduction."
    )


def test_shard_of_a_reduction_that_is_not_paired_inherits_from_the_rank_that_gave_birth(
    tmp_path: Path,
) -> None:
    rows = Job().made()
    edit(rows, "buckets", {}, kind="reduce_scatter")
    edit(rows, "inputs", {"step": 1, "rank": 1}, **NAN)
    edit(rows, "module_calls", {"step": 1, "rank": 1}, **prefixed("input_", NAN))
    spread(rows, 1, NAN, rank=1)
    [found] = births(checked(tmp_path, rows))
    assert found["rank"] == 1 and "Rank 0 got it through" in found["explanation"]


def test_innermost_module_gave_birth(tmp_path: Path) -> None:
    rows = Job().made()
    edit(rows, "module_calls", {"step": 2, "module_fqn": "head"}, **prefixed("output_", NAN))
    edit(rows, "module_calls", {"step": 2, "module_fqn": ""}, **prefixed("output_", NAN))
    edit(rows, "backward_passes", {"step": 2}, loss=float("nan"))
    spread(rows, 2, NAN)
    [found] = births(checked(tmp_path, rows))
    assert (found["module_fqn"], found["ranks"], found["rank"]) == ("head", [0, 1], None)
    assert "is born in head, whose input is finite" in found["explanation"]


def test_parameter_that_was_never_finite_is_told(tmp_path: Path) -> None:
    rows = Job().made()
    edit(rows, "parameters", {"parameter_fqn": "head.bias"}, **NAN)
    edit(rows, "module_calls", {"module_fqn": "head"}, **prefixed("output_", NAN))
    [found] = births(checked(tmp_path, rows))
    assert (found["parameter_fqn"], found["step"]) == ("head.bias", 0)
    assert "before the forward pass: it is there from the start" in found["explanation"]


def test_what_autograd_grad_starts_from_is_no_loss(tmp_path: Path) -> None:
    """A pipeline's shape inference runs such a pass over memory that nothing was written to."""
    rows = Job().made()
    edit(rows, "backward_passes", {"step": 1, "rank": 0}, loss=float("inf"), kind="grad")
    assert "values_finite" not in laws(checked(tmp_path, rows))


def test_loss_of_finite_outputs_gave_birth(tmp_path: Path) -> None:
    rows = Job().made()
    edit(rows, "backward_passes", {"step": 1, "rank": 0}, loss=float("inf"))
    edit(rows, "node_events", {"step": 1, "rank": 0}, **prefixed("grad_output_", INF))
    [found] = births(checked(tmp_path, rows))
    assert "the first infinity is the loss itself" in found["explanation"]
    assert found["severity"] == "error" and found["rank"] == 0


def test_infinite_loss_is_told_before_the_nan_that_it_makes(tmp_path: Path) -> None:
    rows = Job(1).made()
    edit(rows, "backward_passes", {"step": 1}, loss=float("inf"))
    edit(
        rows, "node_events", {"step": 1, "event_index": 0},
        **prefixed("grad_output_", INF), **prefixed("grad_input_", NAN),
    )  # fmt: skip
    infinity, nan = births(checked(tmp_path, rows, rank_count=1))
    assert "is the loss itself" in infinity["explanation"]
    assert "out of the infinity that came in" in nan["explanation"]


def test_node_gave_birth_and_nan_came_out_of_its_infinity(tmp_path: Path) -> None:
    rows = Job(1).made()
    edit(rows, "node_events", {"step": 1, "event_index": 0}, **prefixed("grad_input_", INF))
    edit(
        rows, "node_events", {"step": 1, "event_index": 1},
        **prefixed("grad_output_", INF), **prefixed("grad_input_", NAN),
    )  # fmt: skip
    edit(rows, "gradients", {"step": 1, "parameter_fqn": "body.weight"}, **NAN)
    infinity, nan = births(checked(tmp_path, rows, rank_count=1))
    assert (
        "the first infinity is born in AddmmBackward0 of head, whose incoming"
        in (infinity["explanation"])
    )
    assert (infinity["event_index"], infinity["node_name"]) == (0, "AddmmBackward0")
    assert (
        "the first NaN is born in AddmmBackward0 of head out of the infinity that came in"
        in (nan["explanation"])
    )
    assert nan["event_index"] == 1


def test_infinity_that_arrives_at_a_node_was_born_before_it(tmp_path: Path) -> None:
    rows = Job(1).made()
    edit(rows, "node_events", {"step": 0}, **prefixed("grad_output_", INF))
    [found] = births(checked(tmp_path, rows, rank_count=1))
    assert (
        "arrives at AddmmBackward0 of head: the infinity was born in front of it"
        in (found["explanation"])
    )


def test_overflow_in_the_reduction_names_the_hook(tmp_path: Path) -> None:
    rows = Job(hook_name="default_hooks.fp16_compress_hook").made()
    for table, where in (("gradients", "reduced"), ("gradients", "final"), ("parameters", "after")):
        edit(rows, table, {"step": 1, "point": where}, **INF)
    edit(
        rows, "buckets", {"step": 1, "bucket_index": 1}, before_abs_max=40_000.0, after_inf_count=3
    )
    answer = checked(tmp_path, rows)
    [found] = births(answer)
    assert found["explanation"] == (
        "Step 1, ranks 0-1: the first infinity is born in the reduction of bucket 1 by "
        "default_hooks.fp16_compress_hook: the ranks' buckets are finite, what came out is not (largest magnitudes "
        "add up to 80000, float16 holds up to 65504)."
    )
    assert (found["hook_name"], found["bucket_index"]) == ("default_hooks.fp16_compress_hook", 1)
    assert laws(answer)[0] == "values_finite"


@pytest.mark.parametrize(
    ("table", "point", "said"),
    [
        ("gradients", "local", "where the gradient is accumulated"),
        ("gradients", "reduced", "it is born in the reduction"),
        ("gradients", "final", "between backward() and the optimizer's step"),
        ("parameters", "after", "it is born in the optimizer"),
    ],
)
def test_each_point_of_a_parameter_has_its_sentence(
    tmp_path: Path, table: str, point: str, said: str
) -> None:
    rows = Job(1).made()
    edit(rows, table, {"step": 1, "point": point, "parameter_fqn": "head.bias"}, **NAN)
    [found] = births(checked(tmp_path, rows, rank_count=1))
    assert said in found["explanation"] and found["parameter_fqn"] == "head.bias"


@pytest.mark.parametrize(
    ("table", "point", "gone", "said"),
    [
        ("gradients", "reduced", ("gradients", "local"), "; the local gradients were not recorded."),
        ("gradients", "final", ("gradients", "local"), None),  # the reduced one is there
        ("parameters", "after", ("gradients", "final"), "; its gradient was not recorded."),
        ("parameters", "before", ("parameters", "after"), "; what the last step left was not recorded."),
    ],
)  # fmt: skip
def test_nothing_is_said_to_be_finite_that_was_not_recorded(
    tmp_path: Path, table: str, point: str, gone: tuple[str, str], said: str | None
) -> None:
    rows = Job(1).made()
    edit(rows, table, {"step": 1, "point": point, "parameter_fqn": "head.bias"}, **NAN)
    remove(rows, gone[0], point=gone[1])
    [found] = births(checked(tmp_path, rows, rank_count=1))
    if said is None:
        assert "although it was finite after the backward pass" in found["explanation"]
    else:
        assert found["explanation"].endswith(said) and "finite" not in found["explanation"]


def test_mask_that_stays_in_the_forward_pass_is_a_warning(tmp_path: Path) -> None:
    rows = Job().made()
    edit(rows, "module_calls", {"module_fqn": "body"}, **prefixed("output_", INF))
    answer = checked(tmp_path, rows)
    [found] = births(answer)
    assert found["severity"] == "warning" and answer["exit_code"] == 0
    assert "It stays in the forward pass" in found["explanation"]


def test_mask_does_not_hide_an_infinity_that_spreads_later(tmp_path: Path) -> None:
    rows = Job().made()
    edit(rows, "module_calls", {"module_fqn": "body"}, **prefixed("output_", INF))
    edit(rows, "module_calls", {"module_fqn": "head", "step": 2}, **prefixed("output_", INF))
    spread(rows, 2, INF)
    answer = checked(tmp_path, rows)
    assert [(v["severity"], v["step"], v["module_fqn"]) for v in births(answer)] == [
        ("warning", 0, "body"),
        ("error", 2, "head"),
    ]
    assert answer["exit_code"] == 1


def test_overflow_that_the_scaler_caught_is_a_warning_and_hides_no_later_one(
    tmp_path: Path,
) -> None:
    rows = Job().made()
    edit(rows, "node_events", {"step": 0}, **prefixed("grad_input_", {**INF, **NAN}))
    edit(rows, "gradients", {"step": 0}, **INF, **NAN)
    edit(rows, "steps", {"step": 0}, skipped=True)
    answer = checked(tmp_path, rows)
    assert {v["severity"] for v in births(answer)} == {"warning"} and answer["exit_code"] == 0
    assert "GradScaler left the optimizer out" in births(answer)[0]["explanation"]
    edit(rows, "node_events", {"step": 2, "event_index": 2}, **prefixed("grad_input_", NAN))
    later = [v for v in births(checked(tmp_path / "b", rows)) if v["severity"] == "error"]
    assert [(v["step"], v["event_index"]) for v in later] == [(2, 2)]


def test_nan_of_a_module_with_an_infinite_parameter_is_made_of_it(tmp_path: Path) -> None:
    rows = Job().made()
    place = {"step": 1, "point": "before", "parameter_fqn": "head.weight"}
    edit(rows, "parameters", place, inf_count=1)
    edit(rows, "module_calls", {"step": 1, "module_fqn": "head"}, output_nan_count=2)
    found = [v for v in checked(tmp_path, rows)["violations"] if "first NaN" in v["explanation"]]
    assert (
        "is born in head out of the infinity in parameter head.weight." in (found[0]["explanation"])
    )


def test_rank_whose_stage_received_a_nan_inherits_it(tmp_path: Path) -> None:
    values = handed("forth", 0, 0, 0, 0)
    values[3] = np.nan
    born = {"step": 0, "root": 0, "module_fqn": "", "phase": "forward", "call_index": 0, "depth": 0}
    given = summary_columns(handed("forth", 9, 0, 0, 0), "input_")
    calls = [
        {**born, "rank": 0, **given, **summary_columns(values, "output_")},
        {
            **born,
            "rank": 1,
            **summary_columns(values, "input_"),
            **summary_columns(values, "output_"),
        },
    ]
    rows = {"module_calls": calls, **pipeline()}
    row_of(rows, rank=0, step=0, microbatch=0, kind="forward").update(
        summary_columns(values, "sent_")
    )
    row_of(rows, rank=1, step=0, microbatch=0, kind="forward").update(
        summary_columns(values, "received_")
    )
    (found,) = births(checked(tmp_path, rows))
    assert (found["rank"], found["stage_index"], found["phase"]) == (0, 0, "forward")
    assert found["explanation"] == (
        "Step 0, rank 0 (stage 0, microbatch 0, forward): the first NaN is born in the root module, whose input is "
        "finite. Rank 1 got it through what its stages received."
    )


def test_run_without_values_is_not_judged(tmp_path: Path) -> None:
    found = findings(tmp_path, values_finite, {"steps": [{"step": 0}]})
    assert (list(found.violations), found.compared) == ([], 0)
    assert found.not_judged == "nothing was recorded with values"


def test_birth_has_its_place(tmp_path: Path) -> None:
    rows = Job().made()
    edit(
        rows,
        "node_events",
        {"rank": 1, "step": 1, "event_index": 1},
        **prefixed("grad_input_", NAN),
    )
    found = findings(tmp_path, values_finite, rows)
    (v,) = found.violations
    assert (v.law, v.severity, v.step, v.rank) == (values_finite, "error", 1, 1)
    assert (v.ranks, v.root, v.module_fqn, v.node_name) == ((1,), 0, "head", "AddmmBackward0")
    assert (v.event_index, v.backward_index, v.count, found.compared) == (1, 0, 2, 150)
