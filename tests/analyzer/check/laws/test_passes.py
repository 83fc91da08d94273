"""The laws of backward passes: complete, through the wrapper, reduced by the last, equally many, every bucket out."""

from pathlib import Path
from typing import Any

import pytest

from gradtrace_analyzer.check.laws.passes import (
    buckets_launched,
    last_pass_reduces,
    passes_complete,
    passes_match,
    wrapper_called,
)
from support.synthetic_runs.data_parallel import (
    Job,
    Rows,
    checked,
    edit,
    findings,
    laws,
    matching,
    remove,
    violation,
)


def test_parameters_left_out_of_every_bucket_are_told_with_those_that_are_why(
    tmp_path: Path,
) -> None:
    rows = Job().made()
    remove(rows, "buckets", step=1, bucket_index=0)
    remove(rows, "gradients", step=1, point="local", parameter_fqn="head.bias")
    found = violation(checked(tmp_path, rows), "buckets_launched")
    assert (found["step"], found["ranks"], found["parameter_fqn"]) == (1, [0, 1], "head.bias")
    assert found["explanation"] == (
        "Step 1, ranks 0-1: backward pass 0 launched no bucket of 2 parameters: head.bias got no gradient, so its "
        "buckets were never full, and the gradients of head.weight stayed the rank's own. So in 1 backward pass."
    )


def test_pass_without_any_bucket_is_left_to_one_law(tmp_path: Path) -> None:
    rows = Job().made()
    remove(rows, "buckets", step=1)
    edit(rows, "gradients", {"rank": 1, "step": 1, "point": "reduced"}, fingerprint=5)
    assert laws(checked(tmp_path, rows)) == ["buckets_launched"]


def test_bucket_that_was_never_done_is_told(tmp_path: Path) -> None:
    rows = Job().made()
    edit(rows, "buckets", {"rank": 0, "step": 2, "bucket_index": 1}, done_ns=None)
    edit(rows, "backward_passes", {"rank": 0, "step": 2}, error="RuntimeError: timed out")
    found = violation(checked(tmp_path, rows), "buckets_launched")
    assert (found["rank"], found["bucket_index"]) == (0, 1)
    assert found["explanation"] == (
        "Step 2, rank 0: bucket 1 was launched and never done, until the backward pass ended with RuntimeError: timed "
        "out."
    )


def test_model_called_past_its_wrapper_is_told(tmp_path: Path) -> None:
    rows = Job().made()
    edit(rows, "backward_passes", {"step": 1}, ddp_sync="bypassed")
    remove(rows, "buckets", step=1)
    remove(rows, "gradients", step=1, point="reduced")
    found = violation(checked(tmp_path, rows), "wrapper_called")
    assert (found["step"], found["ranks"], found["count"]) == (1, [0, 1], 1)
    assert "called past its DDP wrapper" in found["explanation"]


@pytest.mark.parametrize(
    ("syncs", "said"),
    [
        (("sync", "no_sync"), "no_sync on the wrong microbatch, off by one"),
        (("no_sync", "no_sync"), "as was every other: the gradients were never reduced"),
        (("no_sync", "sync"), None),
    ],
)
def test_last_of_several_passes_has_to_reduce(
    tmp_path: Path, syncs: tuple[str, str], said: str | None
) -> None:
    rows = Job().made()
    for row in matching(rows, "backward_passes", step=1):
        again = {**row, "backward_index": 1, "microbatch": 1, "ddp_sync": syncs[1]}
        rows["backward_passes"].append(again)
        row["ddp_sync"] = syncs[0]
    if syncs[0] == "no_sync":
        edit(rows, "buckets", {"step": 1}, backward_index=1)
    if "sync" not in syncs:
        remove(rows, "buckets", step=1)
    edit(rows, "gradients", {"step": 1, "point": "reduced"}, backward_index=1)
    answer = checked(tmp_path, rows)
    if said is None:
        assert laws(answer) == []
    else:
        assert said in violation(answer, "last_pass_reduces")["explanation"]


def test_step_without_an_optimizer_need_not_reduce(tmp_path: Path) -> None:
    rows = Job().made()
    edit(rows, "backward_passes", {"step": 2}, ddp_sync="no_sync")
    for table, where in (
        ("buckets", {}),
        ("gradients", {"point": "final"}),
        ("optimizer_groups", {}),
    ):
        remove(rows, table, step=2, **where)
    assert laws(checked(tmp_path, rows)) == []


def test_ranks_with_different_numbers_of_passes_are_told(tmp_path: Path) -> None:
    rows = Job(3).made()
    edit(rows, "steps", {"rank": 1, "step": 1}, backward_count=2)
    found = violation(checked(tmp_path, rows, rank_count=3), "passes_match")
    assert (found["rank"], found["step"], found["group"]) == (1, 1, "0")
    assert found["explanation"] == (
        "Step 1: rank 1 made 2 backward passes, ranks 0,2 made 1 backward pass. So in 1 step."
    )


def without_last_step(rows: Rows, rank: int) -> Rows:
    for of_table in rows.values():
        of_table[:] = [r for r in of_table if r["rank"] != rank or r.get("step") != 2]
    return rows


def test_rank_that_ended_early_is_told(tmp_path: Path) -> None:
    rows = without_last_step(Job().made(), 1)
    found = violation(checked(tmp_path, rows), "passes_match")
    assert (found["rank"], found["step"]) == (1, 2)
    assert (
        "rank 1 ended after step 1, other ranks of its group went on to step 2"
        in (found["explanation"])
    )
    killed = checked(tmp_path / "b", rows, unclosed=(1,))
    assert "passes_match" not in laws(killed)


def test_rank_that_joined_may_end_early(tmp_path: Path) -> None:
    rows = Job().made()
    shadows = [{**r, "kind": "shadow"} for r in matching(rows, "buckets", rank=1, step=2)]
    without_last_step(rows, 1)
    rows["buckets"] += shadows
    assert "passes_match" not in laws(checked(tmp_path, rows))


def failed(rows: Rows, rank: int, step: int, **fields: Any) -> None:
    """Make a pass of the job one that ended with an exception."""
    edit(rows, "backward_passes", {"rank": rank, "step": step}, error="RuntimeError: no")
    row = {
        "rank": rank,
        "step": step,
        "microbatch": 0,
        "backward_index": 0,
        "root": 0,
        "module_fqn": "head",
        "node_name": "MulBackward0",
        "event_index": 3,
        "exception_type": "RuntimeError",
        "exception_text": "no such thing\nat all",
        **fields,
    }
    rows.setdefault("failures", []).append({"record_index": 10_000 + step, **row})


def test_pass_that_ended_with_an_exception_is_told_with_its_node(tmp_path: Path) -> None:
    rows = Job().made()
    for rank in range(2):
        failed(rows, rank, 2)
    answer = checked(tmp_path, rows)
    found = violation(answer, "passes_complete")
    assert (found["severity"], found["ranks"], found["count"]) == ("error", [0, 1], 2)
    assert (found["node_name"], found["module_fqn"], found["event_index"]) == (
        "MulBackward0", "head", 3,
    )  # fmt: skip
    assert found["explanation"] == (
        "Step 2, ranks 0-1: backward pass 0 failed in MulBackward0 of head: RuntimeError: no such thing."
    )
    assert answer["exit_code"] == 1


def test_exception_that_was_caught_is_a_warning(tmp_path: Path) -> None:
    rows = Job(1).made()
    failed(rows, 0, 0)
    failed(rows, 0, 1)
    found = violation(checked(tmp_path, rows, rank_count=1), "passes_complete")
    assert (found["severity"], found["step"], found["count"]) == ("warning", 0, 2)
    assert found["explanation"].endswith(
        "The exception was caught: later passes were completed. So in 2 backward passes."
    )


@pytest.mark.parametrize(
    ("node", "law"), [(None, "buckets_launched"), ("MulBackward0", "passes_complete")]
)
def test_pass_that_failed_in_a_node_is_not_blamed_on_a_bucket_under_way(
    tmp_path: Path, node: str | None, law: str
) -> None:
    rows = Job().made()
    edit(rows, "buckets", {"rank": 0, "step": 2, "bucket_index": 1}, done_ns=None)
    failed(rows, 0, 2, node_name=node)
    told = laws(checked(tmp_path, rows))
    assert law in told and {"buckets_launched", "passes_complete"} - {law} - set(told)


@pytest.mark.parametrize(("counts", "rank"), [((0, 1), 1), ((1, 2), None), ((1, 1), None)])
def test_batch_left_out_on_some_ranks_is_told(
    tmp_path: Path, counts: tuple[int, int], rank: int | None
) -> None:
    rows = Job().made()
    for of_rank, count in enumerate(counts):
        edit(rows, "steps", {"rank": of_rank, "step": 1}, abandoned_forwards=count)
    answer = checked(tmp_path, rows)
    if len(set(counts)) == 1:
        assert laws(answer) == []
        return
    found = violation(answer, "passes_match")
    assert (found["rank"], found["step"], found["severity"]) == (rank, 1, "warning")
    if rank == 1:
        assert found["explanation"].startswith(
            "Step 1: rank 1 made 1 forward that no backward pass followed, rank 0 made none. A batch was left out on "
            "rank 1"
        )


def test_last_pass_of_a_rank_that_was_cut_off_is_judged_too(tmp_path: Path) -> None:
    rows = Job().made()
    remove(rows, "buckets", step=2, rank=0)
    remove(rows, "gradients", step=2, rank=0, point="reduced")
    assert "buckets_launched" in laws(checked(tmp_path, rows, unclosed=(0,)))


NO_PASS = "no backward pass of a DDP model was recorded"


def test_complete_passes_are_counted(tmp_path: Path) -> None:
    found = findings(tmp_path, passes_complete, Job().made())
    assert (found.violations, found.compared) == ([], 6)


def test_failed_pass_has_its_place(tmp_path: Path) -> None:
    rows = Job().made()
    failed(rows, 1, 2)
    (v,) = findings(tmp_path, passes_complete, rows).violations
    assert (v.law, v.severity, v.step, v.rank) == (passes_complete, "error", 2, 1)
    assert (v.ranks, v.microbatch, v.backward_index, v.event_index) == ((1,), 0, 0, 3)
    assert (v.root, v.module_fqn, v.node_name, v.count) == (0, "head", "MulBackward0", 1)


def test_run_without_passes_is_not_judged(tmp_path: Path) -> None:
    rows = Job().made()
    remove(rows, "backward_passes")
    found = findings(tmp_path, passes_complete, rows)
    assert (found.compared, found.not_judged) == (0, "no backward pass was recorded")


def test_passes_through_the_wrapper_are_counted(tmp_path: Path) -> None:
    found = findings(tmp_path, wrapper_called, Job().made())
    assert (found.violations, found.compared) == ([], 6)


def test_bypassed_wrapper_has_its_place(tmp_path: Path) -> None:
    rows = Job().made()
    edit(rows, "backward_passes", {"step": 1, "rank": 1}, ddp_sync="bypassed", microbatch=0)
    edit(rows, "backward_passes", {"step": 2}, ddp_sync="bypassed")
    (v,) = findings(tmp_path, wrapper_called, rows).violations
    assert (v.law, v.severity, v.step, v.rank) == (wrapper_called, "warning", 1, 1)
    assert (v.ranks, v.backward_index, v.microbatch, v.count) == ((1,), 0, 0, 2)


def test_models_that_ddp_does_not_wrap_are_not_judged(tmp_path: Path) -> None:
    rows = Job().made()
    edit(rows, "backward_passes", {}, ddp_sync=None)
    found = findings(tmp_path / "wrapper", wrapper_called, rows)
    assert (found.compared, found.not_judged) == (0, NO_PASS)
    found = findings(tmp_path / "last", last_pass_reduces, rows)
    assert (found.compared, found.not_judged) == (0, NO_PASS)
    found = findings(tmp_path / "buckets", buckets_launched, rows)
    assert (found.compared, found.not_judged) == (0, NO_PASS)


def test_last_passes_that_reduce_are_counted_by_the_optimizers_step(tmp_path: Path) -> None:
    found = findings(tmp_path, last_pass_reduces, Job().made())
    assert (found.violations, found.compared) == ([], 6)


def test_last_pass_under_no_sync_has_its_place(tmp_path: Path) -> None:
    rows = Job().made()
    edit(rows, "backward_passes", {"step": 1, "rank": 1}, ddp_sync="no_sync")
    (v,) = findings(tmp_path, last_pass_reduces, rows).violations
    assert (v.law, v.severity, v.step, v.rank) == (last_pass_reduces, "warning", 1, 1)
    assert (v.ranks, v.backward_index, v.microbatch, v.count) == ((1,), 0, 0, 1)
    assert v.explanation == (
        "Step 1, rank 1: the last backward pass before the optimizer was under no_sync, and there was no other: the "
        "gradients were never reduced. So in 1 step."
    )


def test_equal_numbers_of_passes_are_counted_by_the_step(tmp_path: Path) -> None:
    found = findings(tmp_path, passes_match, Job(3).made(), rank_count=3)
    assert (found.violations, found.compared) == ([], 3)


def test_ranks_that_count_differently_have_their_place(tmp_path: Path) -> None:
    rows = Job(3).made()
    edit(rows, "steps", {"rank": 2, "step": 1}, backward_count=3)
    (v,) = findings(tmp_path, passes_match, rows, rank_count=3).violations
    assert (v.law, v.severity, v.step, v.rank) == (passes_match, "warning", 1, 2)
    assert (v.ranks, v.group, v.count) == ((2,), "0", 1)


def test_numbers_of_passes_of_one_rank_are_not_judged(tmp_path: Path) -> None:
    rows = Job().made()
    found = findings(tmp_path / "one", passes_match, rows, absent=(1,))
    assert found.not_judged == "of no data-parallel group more than one rank was recorded"
    remove(rows, "steps", rank=1)
    found = findings(tmp_path / "steps", passes_match, rows)
    assert (found.compared, found.not_judged) == (0, "no step was recorded on two ranks")


def test_passes_that_launched_all_are_counted(tmp_path: Path) -> None:
    found = findings(tmp_path, buckets_launched, Job().made())
    assert (found.violations, found.compared) == ([], 6)


def test_bucket_that_was_not_launched_has_its_place(tmp_path: Path) -> None:
    rows = Job().made()
    remove(rows, "buckets", rank=1, step=1, bucket_index=1)
    (v,) = findings(tmp_path, buckets_launched, rows).violations
    assert (v.law, v.severity, v.step, v.rank) == (buckets_launched, "warning", 1, 1)
    assert (v.ranks, v.group, v.backward_index, v.microbatch) == ((1,), "0", 0, 0)
    assert (v.root, v.module_fqn, v.parameter_fqn, v.count) == (0, "", "body.weight", 1)


def test_reductions_that_nobody_saw_are_the_reason_where_buckets_are_not_judged(
    tmp_path: Path,
) -> None:
    rows = Job().made()
    edit(rows, "groups", {}, unobserved="an old torch")
    found = findings(tmp_path, buckets_launched, rows)
    assert found.not_judged == "the reductions were not recorded: an old torch"
