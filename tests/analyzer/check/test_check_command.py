"""`analyzer check` as a whole: exit codes, the keys of its JSON, what is said of a clean run and of the cover."""

from pathlib import Path

import numpy as np
from click.testing import CliRunner, Result

from gradtrace_analyzer.check.registry import all_laws
from gradtrace_analyzer.cli import analyzer
from support.synthetic_runs.builder import build_run
from support.synthetic_runs.data_parallel import Array, Job, Rows, checked, edit


def told(folder: Path, rows: Rows, *options: str, ranks: int = 2) -> Result:
    path = build_run(folder / "run", rows, world_size=ranks)
    return CliRunner().invoke(analyzer, ["check", str(path), *options])


def doubled(step: int, buckets: list[Array]) -> list[Array]:
    return [np.sum(buckets, axis=0)] * len(buckets)


def test_clean_run_is_said_to_be(tmp_path: Path) -> None:
    """The whole text is a golden one."""
    result = told(tmp_path, Job().made())
    assert result.exit_code == 0
    assert result.stdout.splitlines()[:3] == [
        "clean: run",
        "",
        "Clean: 3 parameters equal on ranks 0-1 before and after 3 steps, 6 buckets are the mean of the ranks' own, "
        "150 tensors finite.",
    ]
    judged = result.stdout.splitlines()[-1]
    assert judged.startswith("Judged: data_differ (3 steps), ")
    assert ", forward_is_fresh (4 pairs of steps), " in judged
    assert ", gradients_equal (15 buckets and gradients), " in judged
    assert judged.endswith("; ranks 0-1, steps 0-2.")


def test_violated_run_is_told_in_sentences(tmp_path: Path) -> None:
    result = told(tmp_path, Job(reduce=doubled, hook_name="__main__.my_hook").made())
    assert result.exit_code == 1
    assert result.stdout.splitlines()[:4] == [
        "violated: run",
        "",
        "error  reduction_is_mean",
        "  Step 0, bucket 0 (head.weight and 1 more): after __main__.my_hook it is 2 times the mean of the 2 ranks' "
        "buckets: the hook sums and does not divide. So in 6 of 6 buckets.",
    ]


def test_compression_is_a_table(tmp_path: Path) -> None:
    lines = told(tmp_path, Job(hook_name="powerSGD_hook.powerSGD_hook").made()).stdout.splitlines()
    at = lines.index("What compressing hooks lose (relative error of a bucket):")
    assert lines[at + 1].split() == ["hook", "group", "buckets", "median", "largest", "promised"]
    assert lines[at + 3].split()[:3] == ["powerSGD_hook.powerSGD_hook", "0", "6"]


def test_nothing_to_judge_is_incomparable(tmp_path: Path) -> None:
    answer = checked(tmp_path, {})
    assert (answer["verdict"], answer["exit_code"]) == ("incomparable", 2)
    assert answer["explanation"].startswith("Cannot tell: nothing could be judged")
    assert set(answer["not_judged"]) == {law.name for law in all_laws()}


def test_summary_off_says_which_laws_are_not_judged(tmp_path: Path) -> None:
    rows = Job().made()
    ends = ("numel", "norm", "abs_max", "sum", "count", "fingerprint", "sketch", "loss")
    for name, of_table in rows.items():
        for row in of_table if name != "steps" else ():
            row.update({k: None for k in row if k.endswith(ends) and k != "backward_count"})
    answer = checked(tmp_path, rows, rank_facts={"settings": {"summary": "off"}})
    assert answer["verdict"] == "clean" and answer["cover"]["settings"] == {"summary": "off"}
    of_values = {
        "data_differ",
        "values_finite",
        "forward_is_fresh",
        "reduction_is_mean",
        "gradients_equal",
        "parameters_equal",
    }
    assert of_values <= set(answer["not_judged"])
    assert {"passes_complete", "passes_match", "collectives_match"} <= set(answer["judged"])


def test_single_process_is_judged_by_what_needs_no_group(tmp_path: Path) -> None:
    rows = Job(1).made()
    del rows["groups"], rows["buckets"]
    edit(rows, "backward_passes", {}, ddp_sync=None)
    answer = checked(tmp_path, rows, rank_count=1)
    assert answer["verdict"] == "clean"
    assert {"values_finite", "forward_is_fresh", "passes_complete"} <= set(answer["judged"])
    of_groups = {"collectives_match", "reduction_is_mean", "gradients_equal", "parameters_equal"}
    assert of_groups <= set(answer["not_judged"])
    assert answer["not_judged"]["reduction_is_mean"] == "no data-parallel group was recorded"


def test_group_of_one_recorded_rank_is_not_called_missing(tmp_path: Path) -> None:
    answer = checked(tmp_path, Job().made(), absent=(1,))
    assert answer["not_judged"]["parameters_equal"] == (
        "of no data-parallel group more than one rank was recorded"
    )
    assert answer["cover"]["missing_ranks"] == [1] and answer["verdict"] == "clean"


def test_keys_of_the_json_are_those_of_the_reference(tmp_path: Path) -> None:
    answer = checked(tmp_path, Job(reduce=doubled).made())
    assert list(answer)[:-1] == [
        "verdict", "violations", "compression", "judged", "not_judged", "cover", "explanation",
    ]  # fmt: skip
    assert set(answer["violations"][0]) >= {
        "law", "severity", "step", "rank", "ranks", "group", "microbatch", "backward_index",
        "bucket_index", "root", "module_fqn", "node_name", "parameter_fqn", "hook_name", "factor",
        "relative_error", "tolerance", "event_index", "stage_index", "phase", "count", "explanation",
    }  # fmt: skip


def test_caveats_are_told(tmp_path: Path) -> None:
    path = build_run(
        tmp_path / "run",
        Job(3).made(),
        world_size=3,
        absent=(2,),
        unclosed=(1,),
        rank_facts={"dropped": {"node_events": 2}, "problems": ["disk full"]},
    )
    said = CliRunner().invoke(analyzer, ["check", str(path)]).stdout
    assert "Not recorded: rank 2.\n" in said
    assert "The recording of rank 1 was not ended" in said
    assert "Rows dropped: 4 node_events.\n" in said
    assert "The recorder gave up in part: rank 0: disk full.\n" in said


def test_order_of_rows_changes_no_answer(tmp_path: Path) -> None:
    rows = Job(3, reduce=lambda s, b: [b[0], *doubled(s, b)[1:]]).made()
    plain = checked(tmp_path, rows, rank_count=3)
    turned = {name: list(reversed(of_table)) for name, of_table in rows.items()}
    assert checked(tmp_path / "b", turned, rank_count=3) == plain
