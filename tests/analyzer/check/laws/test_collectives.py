"""`collectives_match`: what ranks reduce together, and who never came."""

from pathlib import Path

import pytest

from gradtrace_analyzer.check.laws.collectives import collectives_match
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


def one_pass_less(rows: Rows, step: int) -> Rows:
    """Rank 1 runs no backward pass in that step: its later buckets meet rank 0's of the step before."""
    for table in ("buckets", "backward_passes", "gradients", "node_events"):
        remove(rows, table, rank=1, step=step)
    edit(rows, "steps", {"rank": 1, "step": step}, backward_count=0)
    for row in rows["buckets"]:
        if row["rank"] == 1 and row["step"] > step:
            row["collective_seq"] -= 2
    return rows


def test_rank_that_left_out_a_pass_is_reduced_with_the_wrong_step(tmp_path: Path) -> None:
    answer = checked(tmp_path, one_pass_less(Job(step_count=4).made(), 2))
    found = [v for v in answer["violations"] if v["law"] == "collectives_match"]
    assert (found[0]["step"], found[0]["ranks"], found[0]["count"]) == (2, [0, 1], 2)
    assert found[0]["explanation"] == (
        "Step 2: rank 0's bucket 0 of step 2 was reduced with rank 1's of step 3: rank 1 ran no backward pass that "
        "reduces in step 2. So in 2 buckets."
    )
    assert "rank 1 never came" in found[1]["explanation"] and found[1]["step"] == 3
    assert answer["exit_code"] == 1


def test_bucket_of_other_parameters_is_told(tmp_path: Path) -> None:
    rows = Job().made()
    edit(
        rows,
        "buckets",
        {"rank": 1, "step": 1, "bucket_index": 0},
        parameter_fqns=["head.bias", "head.weight"],
    )
    found = violation(checked(tmp_path, rows), "collectives_match")
    assert (found["step"], found["bucket_index"]) == (1, 0)
    assert (
        "(head.weight and 1 more) was reduced with rank 1's bucket 0 (head.bias and 1 more)"
        in (found["explanation"])
    )


def test_rank_with_another_hook_is_named_by_majority(tmp_path: Path) -> None:
    rows = Job(3).made()
    edit(rows, "buckets", {"rank": 2}, hook_name="default_hooks.allreduce_hook")
    found = violation(checked(tmp_path, rows, rank_count=3), "collectives_match")
    assert (found["rank"], found["step"], found["count"]) == (2, 0, 6)
    assert (
        "rank 2 reduces with default_hooks.allreduce_hook, rank 0 with DDP's own"
        in (found["explanation"])
    )


def test_shadow_matches_anything(tmp_path: Path) -> None:
    rows = Job().made()
    edit(rows, "buckets", {"rank": 1, "step": 2}, kind="shadow", parameter_fqns=[], step=1)
    assert "collectives_match" not in laws(checked(tmp_path, rows))


def test_rank_that_never_came_is_named(tmp_path: Path) -> None:
    rows = Job(3).made()
    remove(rows, "buckets", rank=1, step=2, bucket_index=1)
    edit(rows, "buckets", {"step": 2, "bucket_index": 1}, done_ns=None)
    found = violation(checked(tmp_path, rows, rank_count=3), "collectives_match")
    assert (found["rank"], found["step"], found["bucket_index"]) == (1, 2, 1)
    assert found["explanation"] == (
        "Step 2, bucket 1 (body.weight): rank 1 never came to the reduction, ranks 0,2 wait for it; its recording "
        "was ended in step 2."
    )


def test_rank_whose_recording_was_cut_off_is_only_blamed_where_others_wait(tmp_path: Path) -> None:
    rows = Job().made()
    remove(rows, "buckets", rank=1, step=2)
    answer = checked(tmp_path, rows, unclosed=(1,))
    assert "collectives_match" not in laws(answer) and answer["cover"]["incomplete_ranks"] == [1]
    edit(rows, "buckets", {"rank": 0, "step": 2}, done_ns=None)
    waited = checked(tmp_path / "b", rows, unclosed=(1,))
    assert (
        "its recording was cut off in step 2"
        in violation(waited, "collectives_match")["explanation"]
    )


@pytest.mark.parametrize(("seen_ns", "is_missed"), [(3_000_000, False), (5_000_000_000, True)])
def test_rank_that_was_cut_off_a_moment_after_its_launch_has_not_waited_in_vain(
    seen_ns: int, is_missed: bool, tmp_path: Path
) -> None:
    rows = Job().made()
    remove(rows, "buckets", rank=1, step=2)
    edit(rows, "buckets", {"rank": 0, "step": 2}, done_ns=None, launched_ns=0)
    seen = {
        "pid": 1, "process_start": 1, "machine": 1, "wall_start_ns": 0, "monotonic_start_ns": 0,
        "heartbeat_ns": 0, "moved_ns": seen_ns, "places": [], "dropped": {},
    }  # fmt: skip
    answer = checked(tmp_path, rows, unclosed=(0, 1), rank_facts={"left_behind": seen})
    assert ("collectives_match" in laws(answer)) == is_missed


def test_rows_that_were_dropped_are_no_absence(tmp_path: Path) -> None:
    rows = Job().made()
    remove(rows, "buckets", rank=1, step=2)
    answer = checked(tmp_path, rows, rank_facts={"dropped": {"buckets": 2}})
    assert laws(answer) == [] and answer["cover"]["dropped"] == {"buckets": 4}


def test_numbers_that_a_chaining_hook_blurs_are_not_relied_on(tmp_path: Path) -> None:
    rows = Job(hook_name="__main__.chaining").made()
    for n, row in enumerate(matching(rows, "buckets", rank=1)):
        row["collective_seq"] += n
    answer = checked(tmp_path, rows)
    assert laws(answer) == [] and answer["judged"]["reduction_is_mean"] == 6


def test_run_without_numbers_is_paired_by_place(tmp_path: Path) -> None:
    rows = Job().made()
    edit(rows, "buckets", {}, collective_seq=None)
    answer = checked(tmp_path, rows)
    assert laws(answer) == [] and answer["judged"]["reduction_is_mean"] == 6


def test_rank_whose_hook_launched_nothing_is_told(tmp_path: Path) -> None:
    rows = Job(3, hook_name="__main__.my_hook").made()
    for row in matching(rows, "buckets", rank=1):
        if (row["step"], row["bucket_index"]) >= (1, 0):
            row["collective_seq"] -= 1
    found = violation(checked(tmp_path, rows, rank_count=3), "collectives_match")
    assert (found["step"], found["bucket_index"], found["rank"]) == (1, 0, 1)
    assert found["explanation"] == (
        "Step 1, bucket 0 (head.weight and 1 more): rank 1 launched no collective of the group in "
        "__main__.my_hook, ranks 0,2 did: from there on what ranks 0,2 reduce meets something else of rank 1."
    )


def test_hook_of_another_group_is_not_missed(tmp_path: Path) -> None:
    rows = Job(hook_name="__main__.my_hook").made()
    edit(rows, "buckets", {}, collective_seq=4)
    assert checked(tmp_path, rows)["violations"] == []


def test_hooks_that_chain_are_paired_in_order_where_steps_are_apart(tmp_path: Path) -> None:
    rows = Job(hook_name="powerSGD_hook.powerSGD_hook").made()
    for row in matching(rows, "buckets", rank=1):
        row["step"] += 1
    answer = checked(tmp_path, rows)
    found = [v for v in answer["violations"] if v["law"] == "collectives_match"]
    assert "of step 0 was reduced with rank 1's of step 1" in found[0]["explanation"]
    assert len(found) == 1


def test_reductions_that_belong_together_are_counted(tmp_path: Path) -> None:
    found = findings(tmp_path, collectives_match, Job(3).made(), rank_count=3)
    assert (found.violations, found.compared) == ([], 6)


def test_run_without_buckets_or_group_has_no_collectives_to_judge(tmp_path: Path) -> None:
    rows = Job().made()
    del rows["buckets"]
    found = findings(tmp_path / "buckets", collectives_match, rows)
    assert (found.compared, found.not_judged) == (0, "no bucket was recorded")
    del rows["groups"]
    found = findings(tmp_path / "groups", collectives_match, rows)
    assert found.not_judged == "no data-parallel group was recorded"


def test_mismatch_has_its_place(tmp_path: Path) -> None:
    rows = Job(3).made()
    edit(rows, "buckets", {"rank": 2, "step": 1, "bucket_index": 1}, parameter_fqns=["head.other"])
    (v,) = findings(tmp_path, collectives_match, rows, rank_count=3).violations
    assert (v.law, v.severity, v.step, v.rank) == (collectives_match, "error", 1, 2)
    assert (v.ranks, v.group, v.bucket_index, v.backward_index) == ((2,), "0", 1, 0)
    assert (v.root, v.module_fqn, v.hook_name, v.count) == (0, "", None, 1)
