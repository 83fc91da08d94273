"""`data_differ` and `forward_is_fresh`: equality that should not be."""

from pathlib import Path
from typing import Any

from gradtrace_analyzer.check.laws.freshness import data_differ, forward_is_fresh
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


def first(rows: Rows, table: str, **where: Any) -> dict[str, Any]:
    return matching(rows, table, **where)[0]


def summary(row: dict[str, Any]) -> dict[str, Any]:
    names = ("numel", "norm", "sum", "abs_max", "fingerprint", "sketch")
    return {name: row[name] for name in names}


def test_ranks_with_the_same_inputs_are_told(tmp_path: Path) -> None:
    rows = Job(3).made()
    for step in range(3):
        same = summary(first(rows, "inputs", rank=0, step=step))
        edit(rows, "inputs", {"rank": 2, "step": step}, **same)
    answer = checked(tmp_path, rows, rank_count=3)
    found = violation(answer, "data_differ")
    assert (found["ranks"], found["count"], found["severity"]) == ([0, 2], 3, "warning")
    assert found["explanation"] == (
        "Step 0: ranks 0,2 were fed bit-equal inputs, in every step: they train on the same data."
    )
    assert answer["verdict"] == "clean" and answer["exit_code"] == 0


def test_steps_with_the_same_inputs_are_listed(tmp_path: Path) -> None:
    rows = Job().made()
    edit(rows, "inputs", {"rank": 1, "step": 1}, **summary(first(rows, "inputs", rank=0, step=1)))
    assert "in step 1:" in violation(checked(tmp_path, rows), "data_differ")["explanation"]


def test_scalars_and_constants_are_no_data(tmp_path: Path) -> None:
    rows = Job().made()
    edit(rows, "inputs", {}, norm=4.0, abs_max=1.0, sum=16.0, fingerprint=5)
    answer = checked(tmp_path, rows)
    assert laws(answer) == [] and "no inputs were recorded" in answer["not_judged"]["data_differ"]


def test_gradients_of_the_step_before_are_stale(tmp_path: Path) -> None:
    rows = Job().made()
    for row in matching(rows, "gradients", rank=1, step=2, point="local"):
        where = {"rank": 1, "step": 1, "point": "local", "parameter_fqn": row["parameter_fqn"]}
        row.update(summary(first(rows, "gradients", **where)))
    found = violation(checked(tmp_path, rows), "forward_is_fresh")
    assert (found["step"], found["rank"], found["count"]) == (2, 1, 1)
    assert "3 gradients are bit-equal to those of step 1" in found["explanation"]


def test_gradients_may_repeat_where_parameters_did_not_change_or_one_differs(
    tmp_path: Path,
) -> None:
    rows = Job().made()
    for row in matching(rows, "gradients", rank=1, step=2, point="local")[1:]:
        where = {"rank": 1, "step": 1, "point": "local", "parameter_fqn": row["parameter_fqn"]}
        row.update(summary(first(rows, "gradients", **where)))
    assert laws(checked(tmp_path, rows)) == []
    for rank in range(2):
        for row in matching(rows, "gradients", step=2, rank=rank, point="local"):
            where = {
                "rank": rank,
                "step": 1,
                "point": "local",
                "parameter_fqn": row["parameter_fqn"],
            }
            row.update(summary(first(rows, "gradients", **where)))
    edit(rows, "parameters", {}, fingerprint=9)
    assert "forward_is_fresh" not in laws(checked(tmp_path / "b", rows))


def test_ranks_with_data_of_their_own_are_counted_by_the_step(tmp_path: Path) -> None:
    found = findings(tmp_path, data_differ, Job(3).made(), rank_count=3)
    assert (found.violations, found.compared) == ([], 3)


def test_same_data_has_its_place(tmp_path: Path) -> None:
    rows = Job(3).made()
    same = summary(first(rows, "inputs", rank=1, step=2))
    edit(rows, "inputs", {"rank": 2, "step": 2}, **same)
    (v,) = findings(tmp_path, data_differ, rows, rank_count=3).violations
    assert (v.law, v.severity, v.step, v.rank) == (data_differ, "warning", 2, None)
    assert (v.ranks, v.group, v.count) == ((1, 2), "0", 1)


def test_data_without_fingerprints_or_group_are_not_judged(tmp_path: Path) -> None:
    rows = Job().made()
    edit(rows, "inputs", {}, fingerprint=None)
    found = findings(tmp_path / "norms", data_differ, rows)
    assert (found.compared, found.not_judged) == (
        0,
        "no inputs were recorded on two ranks with fingerprints",
    )
    remove(rows, "groups")
    found = findings(tmp_path / "groups", data_differ, rows)
    assert found.not_judged == "no data-parallel group was recorded"


def test_fresh_gradients_are_counted_by_rank_and_pair_of_steps(tmp_path: Path) -> None:
    found = findings(tmp_path, forward_is_fresh, Job().made())
    assert (found.violations, found.compared) == ([], 4)


def test_stale_gradients_have_their_place(tmp_path: Path) -> None:
    rows = Job(1).made()
    for row in matching(rows, "gradients", step=1, point="local"):
        old = first(rows, "gradients", step=0, point="local", parameter_fqn=row["parameter_fqn"])
        row.update(summary(old))
    (v,) = findings(tmp_path, forward_is_fresh, rows, rank_count=1).violations
    assert (v.law, v.severity, v.step, v.rank) == (forward_is_fresh, "warning", 1, 0)
    assert (v.ranks, v.count) == ((0,), 1)


def test_gradients_without_fingerprints_are_not_judged(tmp_path: Path) -> None:
    rows = Job().made()
    edit(rows, "gradients", {}, fingerprint=None)
    found = findings(tmp_path, forward_is_fresh, rows)
    assert (found.compared, found.not_judged) == (
        0,
        "no two consecutive steps have gradients and parameters with fingerprints",
    )
