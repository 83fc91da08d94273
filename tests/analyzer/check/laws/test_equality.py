"""`gradients_equal` and `parameters_equal`: the first place at which ranks differ, and what it follows from."""

from pathlib import Path

from gradtrace_analyzer.check.laws.equality import gradients_equal, parameters_equal
from support.synthetic_runs.data_parallel import (
    Job,
    checked,
    edit,
    findings,
    laws,
    matching,
    remove,
    violation,
)


def test_equal_parameters_break_nothing(tmp_path: Path) -> None:
    answer = checked(tmp_path, Job(3).made(), rank_count=3)
    assert answer["violations"] == [] and answer["judged"]["parameters_equal"] == 18


def test_odd_rank_from_the_start_is_named(tmp_path: Path) -> None:
    rows = Job(3).made()
    for point in ("before", "after"):
        edit(
            rows,
            "parameters",
            {"rank": 1, "parameter_fqn": "head.bias", "point": point},
            fingerprint=5,
        )
    [found] = checked(tmp_path, rows, rank_count=3)["violations"]
    assert (found["law"], found["step"], found["rank"]) == ("parameters_equal", 0, 1)
    assert found["parameter_fqn"] == "head.bias" and found["count"] == 1
    assert found["explanation"] == (
        "Step 0: rank 1's parameter head.bias differs from that of ranks 0,2 before the first forward. "
        "They differ from the start. So in 2 later steps."
    )


def test_two_ranks_have_no_majority(tmp_path: Path) -> None:
    rows = Job().made()
    edit(rows, "parameters", {"rank": 1, "step": 1, "point": "after"}, fingerprint=5)
    [found] = checked(tmp_path, rows)["violations"]
    assert (found["step"], found["rank"], found["ranks"]) == (1, None, [0, 1])
    assert found["count"] == 3 and found["parameter_fqn"] == "body.weight"
    assert "after the optimizer's step (and 2 more parameters)" in found["explanation"]


def test_buffers_and_parameters_outside_the_buckets_may_differ(tmp_path: Path) -> None:
    rows = Job().made()
    for kind, fqn in (("buffer", "body.mean"), ("parameter", "frozen")):
        rows["parameters"] += [
            {**row, "kind": kind, "parameter_fqn": fqn, "fingerprint": row["rank"]}
            for row in matching(rows, "parameters", parameter_fqn="head.bias")
        ]
    assert checked(tmp_path, rows)["verdict"] == "clean"


def test_without_buckets_what_requires_a_gradient_is_held_equal(tmp_path: Path) -> None:
    rows = Job().made()
    del rows["buckets"]
    edit(rows, "groups", {}, unobserved="an old torch")
    edit(rows, "parameters", {"parameter_fqn": "head.bias"}, requires_grad=False)
    edit(rows, "parameters", {"rank": 1, "parameter_fqn": "head.bias"}, fingerprint=5)
    assert checked(tmp_path, rows)["verdict"] == "clean"
    edit(rows, "parameters", {"rank": 1, "parameter_fqn": "head.weight"}, fingerprint=5)
    answer = checked(tmp_path / "b", rows)
    assert violation(answer, "parameters_equal")["parameter_fqn"] == "head.weight"


def test_parameters_of_other_groups_may_differ(tmp_path: Path) -> None:
    rows = Job().made()
    edit(rows, "groups", {}, role="tp")
    edit(rows, "parameters", {"rank": 1}, fingerprint=5)
    answer = checked(tmp_path, rows)
    assert answer["verdict"] == "clean"
    assert answer["not_judged"]["parameters_equal"] == "no data-parallel group was recorded"


def test_module_of_which_each_rank_holds_a_shard_may_differ(tmp_path: Path) -> None:
    rows = Job().made()
    edit(rows, "buckets", {}, kind="reduce_scatter")
    edit(rows, "parameters", {"rank": 1}, fingerprint=5)
    edit(rows, "gradients", {"rank": 1, "point": "reduced"}, fingerprint=5)
    answer = checked(tmp_path, rows)
    assert laws(answer) == [] and "whole on each rank" in answer["not_judged"]["parameters_equal"]


def test_rank_is_taken_from_the_cause(tmp_path: Path) -> None:
    rows = Job().made()
    for name in ("reduced", "final"):
        edit(rows, "gradients", {"rank": 1, "step": 1, "point": name}, fingerprint=5)
    edit(rows, "parameters", {"rank": 1, "step": 1, "point": "after"}, fingerprint=5)
    answer = checked(tmp_path, rows)
    assert laws(answer) == ["gradients_equal", "parameters_equal"]
    found = violation(answer, "parameters_equal")
    assert found["inherits"] == "gradients_equal"
    assert found["explanation"].endswith("It follows from the above: the gradients differ.")


def test_parameters_that_differ_from_the_start_are_told_before_the_chain_of_the_step(
    tmp_path: Path,
) -> None:
    rows = Job(3).made()
    edit(rows, "parameters", {"rank": 1}, fingerprint=5)
    edit(rows, "module_calls", {"rank": 0, "step": 0}, output_nan_count=1)
    answer = checked(tmp_path, rows, rank_count=3)
    assert laws(answer) == ["parameters_equal", "values_finite"]
    assert answer["verdict"] == "violated" and answer["exit_code"] == 1


def test_parameter_changed_between_steps_is_told_with_its_rank(tmp_path: Path) -> None:
    rows = Job().made()
    place = {"step": 1, "point": "before", "parameter_fqn": "head.bias"}
    edit(rows, "parameters", {**place, "rank": 1}, fingerprint=5)
    found = violation(checked(tmp_path / "a", rows), "parameters_equal")
    assert (found["step"], found["rank"], found["ranks"]) == (1, 1, [1])
    assert found["explanation"].startswith(
        "Step 1: rank 1's parameter head.bias differs from that of rank 0 before the first forward. "
        "It was changed on rank 1 after the optimizer's step 0."
    )
    edit(rows, "parameters", {**place, "rank": 0}, fingerprint=6)
    found = violation(checked(tmp_path / "b", rows), "parameters_equal")
    assert found["rank"] is None and "It was changed" not in found["explanation"]


def test_shards_are_not_held_equal(tmp_path: Path) -> None:
    rows = Job().made()
    edit(rows, "parameters", {"rank": 1}, fingerprint=5)
    edit(rows, "groups", {}, unobserved="its own reduce-scatter")
    for bucket in rows["buckets"]:
        bucket.update(kind="reduce_scatter", group="1", module_fqn="body")
    answer = checked(tmp_path / "a", rows)
    assert "parameters_equal" in answer["not_judged"] and answer["verdict"] == "clean"
    del rows["buckets"]  # whole on each rank, as far as is known
    assert laws(checked(tmp_path / "b", rows)) == ["parameters_equal"]


def test_ranks_that_joined_are_compared_by_what_they_reduced_together(tmp_path: Path) -> None:
    """Rank 1 has joined in step 1, and counts its later steps from one less."""
    rows = Job(step_count=4).made()
    edit(rows, "buckets", {"rank": 1, "step": 1}, kind="shadow")
    for table in ("parameters", "gradients", "backward_passes", "steps", "inputs", "module_calls"):
        remove(rows, table, rank=1, step=1)
    for table in rows:
        for row in matching(rows, table, rank=1):
            row["step"] = row.get("step", 0) - (row.get("step", 0) > 1)
    answer = checked(tmp_path / "a", rows)
    assert (answer["violations"], answer["judged"]["parameters_equal"]) == ([], 18)
    edit(rows, "parameters", {"rank": 1, "step": 2, "point": "after"}, fingerprint=5)
    found = violation(checked(tmp_path / "b", rows), "parameters_equal")
    assert found["step"] == 2 and found["count"] == 3


def test_reduced_gradient_that_differs_while_buckets_agree_broke_after_the_reduction(
    tmp_path: Path,
) -> None:
    rows = Job(3).made()
    edit(
        rows,
        "gradients",
        {"rank": 2, "step": 1, "point": "reduced", "parameter_fqn": "head.bias"},
        fingerprint=17,
    )
    answer = checked(tmp_path, rows, rank_count=3)
    assert laws(answer) == ["gradients_equal"]
    [found] = answer["violations"]
    assert (found["step"], found["rank"], found["parameter_fqn"]) == (1, 2, "head.bias")
    assert found["explanation"] == (
        "Step 1: rank 2's reduced gradient of head.bias differs from that of ranks 0-1. "
        "The buckets that came out of the reduction are equal: it broke after the reduction."
    )


def test_bit_that_only_the_fingerprint_shows_is_a_difference_of_buckets(tmp_path: Path) -> None:
    rows = Job().made()
    edit(rows, "buckets", {"rank": 1, "step": 2, "bucket_index": 1}, after_fingerprint=17)
    [found] = checked(tmp_path, rows)["violations"]
    assert (found["law"], found["step"], found["bucket_index"]) == ("gradients_equal", 2, 1)
    assert found["rank"] is None and found["ranks"] == [0, 1]


def test_two_nan_of_different_bits_are_not_held_against_ranks(tmp_path: Path) -> None:
    rows = Job().made()
    edit(rows, "buckets", {"step": 2}, after_nan_count=3, before_nan_count=1)
    edit(rows, "buckets", {"step": 2, "rank": 1}, after_fingerprint=17)
    assert "gradients_equal" not in laws(checked(tmp_path, rows))


def test_gradient_changed_before_the_optimizer_is_told(tmp_path: Path) -> None:
    rows = Job().made()
    place = {"rank": 1, "step": 1, "point": "final", "parameter_fqn": "head.bias"}
    edit(rows, "gradients", place, fingerprint=17)
    found = violation(checked(tmp_path / "a", rows), "gradients_equal")
    assert (found["step"], found["rank"], found["parameter_fqn"]) == (1, 1, "head.bias")
    assert (
        "it was changed on rank 1 between backward() and the optimizer's step"
        in (found["explanation"])
    )
    edit(rows, "gradients", {**place, "rank": 0}, fingerprint=18)  # clipped on both
    found = violation(checked(tmp_path / "b", rows), "gradients_equal")
    assert found["rank"] is None and found["ranks"] == [0, 1]
    edit(rows, "backward_passes", {"step": 1}, ddp_sync="no_sync")
    assert "gradients_equal" not in laws(checked(tmp_path / "c", rows))


NOOP = "debugging_hooks.noop_hook"


def test_gradients_of_equal_ranks_are_counted(tmp_path: Path) -> None:
    found = findings(tmp_path, gradients_equal, Job(3).made(), rank_count=3)
    assert (found.violations, found.compared) == ([], 15)


def test_bucket_that_differs_on_one_of_three_ranks_has_its_place(tmp_path: Path) -> None:
    rows = Job(3).made()
    edit(rows, "buckets", {"rank": 1, "step": 1, "bucket_index": 1}, after_fingerprint=17)
    (v,) = findings(tmp_path, gradients_equal, rows, rank_count=3).violations
    assert (v.law, v.severity, v.step, v.rank) == (gradients_equal, "error", 1, 1)
    assert (v.ranks, v.group, v.bucket_index, v.backward_index) == ((1,), "0", 1, 0)
    assert (v.root, v.module_fqn, v.parameter_fqn, v.count) == (0, "", None, 1)
    assert v.explanation == (
        "Step 1, bucket 1 (body.weight): after DDP's own reduction rank 1's reduced bucket differs from that of ranks "
        "0,2. So in 1 bucket."
    )


def test_between_two_ranks_that_which_came_out_with_no_mean_is_odd(tmp_path: Path) -> None:
    """The mean is judged by another law, which is not asked again for it."""
    rows = Job().made()
    place = {"rank": 1, "step": 1, "bucket_index": 1}
    [bucket] = matching(rows, "buckets", **place)
    twice = [2 * lane for lane in bucket["after_sketch"]]
    doubled = {"after_norm": 2 * bucket["after_norm"], "after_sum": 2 * bucket["after_sum"]}
    edit(rows, "buckets", place, after_fingerprint=17, after_sketch=twice, **doubled)
    (v,) = findings(tmp_path, gradients_equal, rows).violations
    assert (v.step, v.rank, v.ranks) == (1, 1, (1,))


def test_gradients_without_values_or_promise_are_not_judged(tmp_path: Path) -> None:
    rows = Job().made()
    edit(rows, "buckets", {}, after_norm=None)
    edit(rows, "gradients", {}, norm=None)
    found = findings(tmp_path / "off", gradients_equal, rows)
    assert (found.compared, found.not_judged) == (
        0,
        "no reduced bucket or gradient was recorded on two ranks of a group with values",
    )
    found = findings(tmp_path / "noop", gradients_equal, Job(hook_name=NOOP).made())
    assert found.not_judged == "the hooks in use do not keep the ranks equal"
    found = findings(tmp_path / "none", gradients_equal, Job(1).made(), rank_count=1)
    assert found.not_judged == "of no data-parallel group more than one rank was recorded"


def test_parameters_without_values_or_promise_are_not_judged(tmp_path: Path) -> None:
    rows = Job().made()
    edit(rows, "parameters", {}, norm=None)
    found = findings(tmp_path / "off", parameters_equal, rows)
    assert (found.compared, found.not_judged) == (
        0,
        "no parameter was recorded on two ranks of a group with values",
    )
    found = findings(tmp_path / "noop", parameters_equal, Job(hook_name=NOOP).made())
    assert found.not_judged == "the hooks in use do not keep the ranks equal"


def test_parameter_that_differs_has_its_place(tmp_path: Path) -> None:
    rows = Job(3).made()
    place = {"rank": 2, "step": 1, "point": "after", "parameter_fqn": "head.bias"}
    edit(rows, "parameters", place, fingerprint=5)
    found = findings(tmp_path, parameters_equal, rows, rank_count=3)
    (v,) = found.violations
    assert (v.law, v.severity, v.step, v.rank) == (parameters_equal, "error", 1, 2)
    assert (v.ranks, v.group, v.root, v.module_fqn) == ((2,), "0", 0, "")
    assert (v.parameter_fqn, v.count, found.compared) == ("head.bias", 1, 18)
