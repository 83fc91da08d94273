"""`reduction_is_mean`: what came out of a reduction, and why it is not the mean."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradtrace_analyzer.check.laws.reductions import reduction_is_mean
from support.synthetic_runs.data_parallel import (
    Array,
    Job,
    Rows,
    checked,
    edit,
    findings,
    laws,
    mean,
    violation,
)

MINE = "__main__.my_hook"


def answer_of(folder: Path, reduce: Callable[..., Any], ranks: int = 2, **job: Any) -> Any:
    options = job.pop("options", ())
    rows = Job(ranks, reduce=reduce, **{"hook_name": MINE, **job}).made()
    return checked(folder, rows, *options, rank_count=ranks)


def scaled(factor: float) -> Callable[[int, list[Array]], list[Array]]:
    return lambda step, buckets: [(factor * np.mean(buckets, axis=0)).astype("f4")] * len(buckets)


def weighted(*weights: float) -> Callable[[int, list[Array]], list[Array]]:
    def reduce(step: int, buckets: list[Array]) -> list[Array]:
        whole = sum(w * b for w, b in zip(weights, buckets, strict=True)) / len(buckets)
        return [np.asarray(whole, "f4")] * len(buckets)

    return reduce


def only_rank(rank: int, own: Callable[[Array, int], Array]) -> Callable[..., list[Array]]:
    """All ranks get the mean but one, which gets what `own` makes of its bucket."""

    def reduce(step: int, buckets: list[Array]) -> list[Array]:
        after = [np.mean(buckets, axis=0, dtype="f4")] * len(buckets)
        after[rank] = own(buckets[rank], len(buckets)).astype("f4")
        return after

    return reduce


@pytest.mark.parametrize("ranks", [2, 3])
def test_sum_that_is_not_divided_is_a_factor_of_the_world_size(tmp_path: Path, ranks: int) -> None:
    answer = answer_of(tmp_path, scaled(ranks), ranks)
    assert laws(answer) == ["reduction_is_mean"] and answer["exit_code"] == 1
    found = violation(answer, "reduction_is_mean")
    assert found["factor"] == pytest.approx(ranks)
    assert found["explanation"] == (
        f"Step 0, bucket 0 (head.weight and 1 more): after __main__.my_hook it is {ranks} times the mean of the "
        f"{ranks} ranks' buckets: the hook sums and does not divide. So in 6 of 6 buckets."
    )
    assert (found["step"], found["bucket_index"], found["hook_name"]) == (0, 0, MINE)
    assert found["ranks"] == list(range(ranks)) and found["rank"] is None


def test_division_made_twice_is_said_so(tmp_path: Path) -> None:
    found = violation(answer_of(tmp_path, scaled(1 / 3), 3), "reduction_is_mean")
    assert found["factor"] == pytest.approx(1 / 3)
    assert "it was divided by 3 twice" in found["explanation"]


def test_scale_that_means_nothing_is_told_with_the_world_size(tmp_path: Path) -> None:
    found = violation(answer_of(tmp_path, scaled(0.9)), "reduction_is_mean")
    assert found["factor"] == pytest.approx(0.9)
    assert "0.9 times" in found["explanation"] and "world size 2" in found["explanation"]


def test_deviation_within_rounding_breaks_nothing(tmp_path: Path) -> None:
    assert answer_of(tmp_path, scaled(1 + 2e-7))["verdict"] == "clean"
    assert answer_of(tmp_path / "far", scaled(1 + 2e-6))["verdict"] == "violated"


@pytest.mark.parametrize(
    ("weight", "said"),
    [(0.0, "is missing"), (2.0, "is counted twice"), (1.5, "is scaled by 1.5")],
)
def test_contribution_of_one_rank_is_singled_out(tmp_path: Path, weight: float, said: str) -> None:
    found = violation(answer_of(tmp_path, weighted(1, 1, weight), 3), "reduction_is_mean")
    assert f"rank 2's contribution {said}" in found["explanation"]
    assert found["rank"] == 2 and found["factor"] is None


def test_missing_contribution_between_two_ranks_is_singled_out(tmp_path: Path) -> None:
    found = violation(answer_of(tmp_path, weighted(0, 1)), "reduction_is_mean")
    assert "rank 0's contribution is missing" in found["explanation"] and found["rank"] == 0


@pytest.mark.parametrize("ranks", [2, 3])
def test_rank_that_kept_its_own_bucket_is_told(tmp_path: Path, ranks: int) -> None:
    answer = answer_of(tmp_path, only_rank(1, lambda bucket, size: bucket), ranks)
    assert laws(answer) == ["reduction_is_mean", "gradients_equal", "parameters_equal"]
    found = violation(answer, "reduction_is_mean")
    assert "on rank 1 still the rank's own bucket, not reduced at all" in found["explanation"]
    assert found["rank"] == 1 and found["ranks"] == [1]
    assert [v["rank"] for v in answer["violations"]] == [1, 1, 1]
    assert [v["inherits"] for v in answer["violations"]] == [
        None,
        "reduction_is_mean",
        "gradients_equal",
    ]


def test_bucket_divided_but_not_summed_is_told(tmp_path: Path) -> None:
    answer = answer_of(tmp_path, only_rank(1, lambda bucket, size: bucket / size))
    found = violation(answer, "reduction_is_mean")
    assert "divided but not summed" in found["explanation"] and found["rank"] == 1


def test_deviation_that_nothing_explains_has_its_size(tmp_path: Path) -> None:
    noise = np.random.default_rng(5)

    def reduce(step: int, buckets: list[Array]) -> Sequence[Array]:
        mean = np.mean(buckets, axis=0)
        return [(mean + 0.1 * noise.standard_normal(mean.shape)).astype("f4")] * len(buckets)

    found = violation_of_first(answer_of(tmp_path, reduce))
    assert 0.03 < found["relative_error"] < 0.5 and found["factor"] is None
    assert "no factor, and no missing or repeated contribution, explains" in found["explanation"]


def violation_of_first(answer: Any) -> Any:
    return next(v for v in answer["violations"] if v["law"] == "reduction_is_mean")


def test_different_explanations_are_different_violations(tmp_path: Path) -> None:
    answer = answer_of(tmp_path, lambda step, b: (scaled(2) if step < 2 else scaled(0.5))(step, b))
    assert [(v["step"], v["factor"], v["count"]) for v in answer["violations"]] == [
        (0, pytest.approx(2), 4),
        (2, pytest.approx(0.5), 2),
    ]


def through_float16(step: int, buckets: list[Array]) -> list[Array]:
    return [
        np.mean([b.astype("f2") / len(buckets) for b in buckets], axis=0).astype("f4")
        * len(buckets)
    ] * len(buckets)


def test_compressing_hook_is_held_to_its_wire_and_its_error_is_told(tmp_path: Path) -> None:
    name = "default_hooks.fp16_compress_hook"
    answer = answer_of(tmp_path, through_float16, hook_name=name)
    assert answer["verdict"] == "clean"
    [told] = answer["compression"]
    assert told["hook_name"] == name and told["bucket_count"] == 6 and told["group"] == "0"
    assert 0 < told["median_error"] <= told["largest_error"] < told["promised"] < 2e-3
    worse = answer_of(tmp_path / "b", scaled(1.01), hook_name=name)
    assert violation(worse, "reduction_is_mean")["factor"] == pytest.approx(1.01)


def test_same_error_of_ones_own_hook_is_a_warning_unless_it_is_called_compressing(
    tmp_path: Path,
) -> None:
    """A cast inside a hook loses as much; a larger error is none that a cast explains."""
    found = violation(answer_of(tmp_path, through_float16), "reduction_is_mean")
    assert found["severity"] == "warning" and "--compressing '__main__." in found["explanation"]

    def far_off(step: int, buckets: list[Array]) -> list[Array]:
        turned = np.roll(np.mean(buckets, axis=0), 1).astype("f4")
        return [turned] * len(buckets)

    assert answer_of(tmp_path / "c", far_off)["verdict"] == "violated"
    torchs = answer_of(tmp_path / "d", through_float16, hook_name="default_hooks.allreduce_hook")
    assert torchs["verdict"] == "violated"
    answer = answer_of(tmp_path / "b", through_float16, options=("--compressing", "__main__.*"))
    assert answer["verdict"] == "clean"
    assert [c["promised"] for c in answer["compression"]] == [None]


def test_quantizing_hook_may_err_by_a_level(tmp_path: Path) -> None:
    name = "quantization_hooks.quantization_pertensor_hook"

    def quantized(step: int, buckets: list[Array]) -> list[Array]:
        levels = [np.abs(b).max() / 127 for b in buckets]
        rounded = [np.round(b / level) * level for b, level in zip(buckets, levels, strict=True)]
        return [np.mean(rounded, axis=0).astype("f4")] * len(buckets)

    assert answer_of(tmp_path, quantized, hook_name=name)["verdict"] == "clean"
    assert laws(answer_of(tmp_path / "b", scaled(2), hook_name=name)) == ["reduction_is_mean"]


def test_error_of_power_sgd_is_told_and_not_judged(tmp_path: Path) -> None:
    answer = answer_of(tmp_path, scaled(0.5), hook_name="powerSGD_hook.powerSGD_hook")
    assert answer["verdict"] == "clean" and "reduction_is_mean" in answer["not_judged"]
    assert answer["compression"][0]["largest_error"] == pytest.approx(0.5, rel=1e-3)
    assert "gradients_equal" in answer["judged"]


@pytest.mark.parametrize(
    "name", ["debugging_hooks.noop_hook", "post_localSGD_hook.post_localSGD_hook"]
)
def test_hooks_that_promise_nothing_are_not_judged(tmp_path: Path, name: str) -> None:
    answer = answer_of(tmp_path, lambda step, buckets: buckets, hook_name=name)
    assert answer["verdict"] == "clean"
    assert {"reduction_is_mean", "gradients_equal", "parameters_equal"} <= set(answer["not_judged"])


def without_sketches(rows: Rows) -> Rows:
    for of_table in rows.values():
        for row in of_table:
            row.update({k: None for k in row if k.endswith(("fingerprint", "sketch"))})
    return rows


def test_norms_alone_tell_a_factor_and_say_that_they_are_all(tmp_path: Path) -> None:
    facts = {"settings": {"summary": "norms"}}
    rows = without_sketches(Job(reduce=scaled(2), hook_name=MINE).made())
    answer = checked(tmp_path, rows, rank_facts=facts)
    assert violation(answer, "reduction_is_mean")["factor"] == pytest.approx(2)
    assert "sums alone" in answer["cover"]["notes"][0]
    clean = checked(tmp_path / "clean", without_sketches(Job().made()), rank_facts=facts)
    assert clean["verdict"] == "clean" and clean["judged"]["parameters_equal"] == 18


def test_norms_alone_take_no_odd_multiple_for_a_factor(tmp_path: Path) -> None:
    rows = without_sketches(Job(reduce=weighted(1, 0.37), hook_name=MINE).made())
    found = checked(tmp_path, rows)["violations"]
    assert [v["factor"] for v in found if v["law"] == "reduction_is_mean"] == [None]


def test_norms_alone_tell_ranks_apart(tmp_path: Path) -> None:
    rows = without_sketches(
        Job(3, reduce=only_rank(1, lambda bucket, size: bucket), hook_name=MINE).made()
    )
    answer = checked(tmp_path, rows, rank_count=3)
    assert violation(answer, "gradients_equal")["rank"] == 1
    assert violation(answer, "parameters_equal")["rank"] == 1


def test_reduction_with_a_rank_not_recorded_is_not_judged(tmp_path: Path) -> None:
    rows = Job(3, reduce=scaled(2)).made()
    answer = checked(tmp_path, rows, rank_count=3, absent=(2,))
    assert answer["verdict"] == "clean" and answer["cover"]["missing_ranks"] == [2]
    assert "on all ranks" in answer["not_judged"]["reduction_is_mean"]
    assert answer["judged"]["gradients_equal"] == 15


def test_shadow_of_a_joined_rank_counts_as_zeros(tmp_path: Path) -> None:
    rows = Job(reduce=weighted(1, 0)).made()
    edit(rows, "buckets", {"rank": 1}, kind="shadow")
    for row in rows["buckets"]:
        if row["rank"] == 1:
            row.update({k: None for k in row if k.startswith(("before_", "after_"))})
    answer = checked(tmp_path, rows)
    assert "reduction_is_mean" not in laws(answer)
    assert answer["judged"]["reduction_is_mean"] == 6


@pytest.mark.parametrize("ranks", [3, 4, 16])
def test_mean_of_some_ranks_alone_is_told(tmp_path: Path, ranks: int) -> None:
    half = max(2, ranks // 2)

    def reduce(step: int, buckets: list[Array]) -> list[Array]:
        parts = [buckets[:half]] * half + [buckets[half:]] * (ranks - half)
        return [np.mean(part, axis=0, dtype="f4") for part in parts]

    answer = answer_of(tmp_path, reduce, ranks)
    found = [v for v in answer["violations"] if v["law"] == "reduction_is_mean"]
    assert found[0]["explanation"].startswith(
        "Step 0, bucket 0 (head.weight and 1 more): after __main__.my_hook it is on "
        f"ranks 0-{half - 1} the mean of the buckets of ranks 0-{half - 1} alone, not of the {ranks} ranks'"
    )
    assert found[0]["ranks"] == list(range(half)) and found[0]["rank"] is None
    assert len(found) == 2


def test_result_of_an_earlier_step_handed_out_again_is_told(tmp_path: Path) -> None:
    kept: dict[int, Array] = {}

    def reduce(step: int, buckets: list[Array]) -> list[Array]:
        mean: Array = np.mean(buckets, axis=0, dtype="f4")
        given = kept[mean.size] if step == 1 else mean
        kept[mean.size] = mean
        return [given] * len(buckets)

    found = violation(answer_of(tmp_path, reduce), "reduction_is_mean")
    assert found["step"] == 1 and found["count"] == 2
    assert "but bit-equal to what came out in step 0" in found["explanation"]


@pytest.mark.parametrize(("size", "verdict"), [(1e-8, "clean"), (1e-5, "violated")])
def test_half_precision_may_lose_what_is_smaller_than_its_smallest_number(
    tmp_path: Path, size: float, verdict: str
) -> None:
    def reduce(step: int, buckets: list[Array]) -> list[Array]:
        for bucket in buckets:
            bucket *= np.float32(size)
        return [np.zeros_like(buckets[0])] * len(buckets)

    answer = answer_of(tmp_path, reduce, hook_name="default_hooks.fp16_compress_hook")
    assert answer["verdict"] == verdict and answer["judged"]["reduction_is_mean"] == 6


def test_buckets_of_sparse_gradients_are_not_judged(tmp_path: Path) -> None:
    rows = Job(reduce=scaled(3)).made()
    edit(rows, "buckets", {"bucket_index": 0, "rank": 1}, before_numel=18)
    answer = checked(tmp_path, rows)
    assert answer["judged"]["reduction_is_mean"] == 3
    assert violation(answer, "reduction_is_mean")["bucket_index"] == 1


def test_means_are_counted_by_the_bucket(tmp_path: Path) -> None:
    found = findings(tmp_path, reduction_is_mean, Job(3).made(), rank_count=3)
    assert (list(found.violations), found.compared) == ([], 6)


def test_reduction_that_is_no_mean_has_its_place(tmp_path: Path) -> None:
    def reduce(step: int, buckets: list[Array]) -> Sequence[Array]:
        return scaled(2)(step, buckets) if step == 1 else mean(step, buckets)

    (v,) = findings(tmp_path, reduction_is_mean, Job(reduce=reduce).made()).violations
    assert (v.law, v.severity, v.step, v.rank) == (reduction_is_mean, "error", 1, None)
    assert (v.ranks, v.group, v.bucket_index, v.backward_index) == ((0, 1), "0", 0, 0)
    assert (v.root, v.module_fqn, v.hook_name, v.count) == (0, "", None, 2)
    assert v.factor == pytest.approx(2) and v.relative_error == pytest.approx(1)
    assert v.tolerance is not None and 1e-7 < v.tolerance < 1e-5


def test_reductions_without_values_or_promise_are_not_judged(tmp_path: Path) -> None:
    rows = Job(hook_name=MINE).made()
    found = findings(tmp_path / "mine", reduction_is_mean, rows, compressing=["__main__.*"])
    assert (found.compared, found.not_judged) == (0, "the hooks in use promise no mean")
    edit(rows, "buckets", {}, before_norm=None)
    found = findings(tmp_path / "off", reduction_is_mean, rows)
    assert found.not_judged == "no bucket was recorded on all ranks of its group with values"
    del rows["groups"]
    found = findings(tmp_path / "groups", reduction_is_mean, rows)
    assert found.not_judged == "no data-parallel group was recorded"
