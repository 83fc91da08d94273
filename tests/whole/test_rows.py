"""No sentence speaks of what was not recorded: each table is taken away in turn, and every sentence is read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from gradtrace_analyzer.check.check import check
from gradtrace_analyzer.cli import analyzer
from gradtrace_analyzer.diff.compare import compare
from gradtrace_analyzer.failures.endings import endings
from gradtrace_analyzer.reports import check as check_report
from gradtrace_analyzer.reports import failures as failures_report
from gradtrace_analyzer.reports.diff.json_object import as_object
from gradtrace_analyzer.reports.diff.text import lines
from gradtrace_analyzer.runs.opening import open_run
from support.launching.launcher import run_job
from support.recordings.lacking import tables_of, without

ROOT = Path(__file__).resolve().parents[1]
JOB = ROOT / "support" / "jobs" / "sentences.py"

# What a sentence may say, and the tables that it needs: a sentence that needs several may not be said without any.
SAID = {
    r"its inputs (is|are) equal": {"module_calls"},
    r"although its parameters were|and its parameters were": {"parameters"},
    r"although the outputs of all modules": {"module_calls"},
    r"everything recorded that it reads": {"node_events"},
    r"gradients that the Nodes gave are equal|all Nodes that ran before gave equal": {
        "node_events"
    },
    r"local gradients are equal": {"gradients"},
    r"although it was equal after the backward pass": {"gradients"},
    r"although its gradient\b": {"gradients"},
    r"its value before the forward.{0,30} (is|are) equal": {"parameters"},
    r"the optimizer's settings are equal": {"optimizer_groups"},
    r"what every rank put in is equal": {"buckets"},
    r"although what it received is equal|although stage \d made the same": {"stage_events"},
    r"all that was recorded before it is equal": {"parameters", "inputs", "module_calls"},
    r"changed since the step before": {"parameters"},
    r"the optimizer saw no gradient": {"gradients"},
    r"no (output|[a-z, ]*output)[a-z, ]* differs by more": {"module_calls"},
    r"no [a-z, ]*\bloss[a-z, ]* differs by more": {"backward_passes"},
    # The table of what is equal in a step, and with -v the rows around the origin.
    r"Equal in that step.*\blinks\b[^;.\n]*\bparameters\b": {"parameters"},
    r"Equal in that step.*\blinks\b[^;.\n]*\binputs\b": {"inputs"},
    r"Equal in that step.*\blinks\b[^;.\n]*\bforward\b": {"module_calls"},
    r"Equal in that step.*\blinks\b[^;.\n]*\bloss\b": {"backward_passes"},
    r"Equal in that step.*\blinks\b[^;.\n]*\bbackward\b": {"node_events"},
    r"Equal in that step.*\blinks\b[^;.\n]*\b(local_gradient|clip)\b": {"gradients"},
    r"Equal in that step.*\blinks\b[^;.\n]*\bbucket\b": {"buckets"},
    r"Equal in that step.*\blinks\b[^;.\n]*\boptimizer\b": {"parameters"},
    r"Equal in that step.*the modules ": {"module_calls"},
    r"^.? *forward .* equal": {"module_calls"},
    r"^.? *backward .* equal": {"node_events"},
    r"^.? *(local_gradient|clip) .* equal": {"gradients"},
    r"^.? *(parameters|optimizer) .* equal": {"parameters"},
    # `check`.
    r"parameters? equal on ": {"parameters"},
    r"buckets? (is|are) the mean": {"buckets"},
    r"tensors? handed on between stages": {"stage_events"},
    r"reduced gradients are equal": {"gradients"},
}
# What only one kind of fault in one of these jobs would bring about; units hold its sentence.
NOT_HERE = {
    r"Equal in that step.*\blinks\b[^;.\n]*\boptimizer\b",
    r"although what it received is equal|although stage \d made the same",
    r"what every rank put in is equal",
    r"gradients that the Nodes gave are equal|all Nodes that ran before gave equal",
    r"local gradients are equal",
    r"all that was recorded before it is equal",
    r"the optimizer saw no gradient",
    r"reduced gradients are equal",
    r"no (output|[a-z, ]*output)[a-z, ]* differs by more",
    r"no [a-z, ]*\bloss[a-z, ]* differs by more",
    r"changed since the step before",
    r"although its parameters were|and its parameters were",
}

ONE_PROCESS = {
    "plain": "plain",
    "again": "plain",
    "derivative": "plain:derivative",
    "gradient": "plain:gradient",
    "loss": "plain:loss",
    "two": "two_optimizers",
    "two-update": "two_optimizers:update",
    "scaler": "scaler",
    "teacher": "teacher",
    "teacher-output": "teacher:output",
}
TWO_RANKS = {
    "ddp": "ddp",
    "ddp-update": "ddp:update",
    "stages": "stages",
    "stages-derivative": "stages:derivative",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recordings, by name."""
    place = tmp_path_factory.mktemp("runs")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    for jobs, ranks in ((ONE_PROCESS, 1), (TWO_RANKS, 2)):
        words = [f"{name}={kind}" for name, kind in jobs.items()]
        done = run_job(JOB, "--out", place, *words, ranks=ranks, env={"PYTHONPATH": path})
        done.must_succeed()
    return place


def diffed(baseline: Path, candidate: Path) -> str:
    """All that `diff -v` says, as text and in the sentences of its JSON."""
    answer = compare(open_run(baseline), open_run(candidate), with_chain=True)
    return "\n".join([*lines(answer, ("a", "b")), as_object(answer)["explanation"]])


def judged(run: Path) -> str:
    """All that `check` and `failures` say."""
    opened = open_run(run)
    answer, ended = check(opened), endings(opened)
    said = [*check_report.lines(answer, "a"), check_report.explanation(answer)]
    return "\n".join([*said, *failures_report.lines(ended, "a")])


def untrue(said: str, table: str) -> Iterator[str]:
    """What is said that needs the table."""
    for pattern, needed in SAID.items():
        found = re.search(pattern, said, re.MULTILINE)
        if table in needed and found is not None:
            yield found[0]


# Of each pair the tables that its sentences rest on; of the last two all that a job on several ranks has.
_CHAIN = ("parameters", "inputs", "module_calls", "backward_passes", "node_events", "gradients")
PAIRS = {
    ("plain", "again"): ("steps", *_CHAIN),
    ("plain", "derivative"): ("node_events", "node_tensors", "module_calls"),
    ("plain", "loss"): ("backward_passes", "module_calls"),
    ("plain", "gradient"): ("gradients", "parameters"),
    ("teacher", "teacher-output"): ("parameters", "module_calls"),
    ("ddp", "ddp-update"): (*_CHAIN, "buckets", "groups", "optimizer_groups", "steps"),
    ("stages", "stages-derivative"): ("stage_events", "node_events", "parameters"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("baseline", "candidate", "table"),
    [(*pair, table) for pair, tables in PAIRS.items() for table in tables],
)
def test_no_sentence_of_diff_rests_on_a_table_that_neither_side_has(
    baseline: str, candidate: str, table: str, runs: Path, tmp_path: Path
) -> None:
    # The table is gone, or, where it holds any, all its values.
    ways = ("never",) if table in ("steps", "groups", "node_tensors") else ("never", "values")
    for way in ways:
        sides = [
            without(runs / name, table, way, tmp_path / f"{way}-{name}")
            for name in (baseline, candidate)
        ]
        said = diffed(*sides)
        assert not list(untrue(said, table)), (way, said)


@pytest.mark.slow
@pytest.mark.parametrize("table", ["parameters", "gradients", "optimizer_groups", "buckets"])
def test_table_that_one_side_lacks_is_no_ground_either(
    table: str, runs: Path, tmp_path: Path
) -> None:
    for way, is_first in (("lost", True), ("never", False)):
        lacking = without(runs / "ddp", table, way, tmp_path / way)
        sides = (lacking, runs / "ddp-update")
        said = diffed(*(sides if is_first else sides[::-1]))
        assert not list(untrue(said, table)), (way, said)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "ddp", "stages"])
def test_no_sentence_about_one_run_rests_on_a_table_that_it_lacks(
    name: str, runs: Path, tmp_path: Path
) -> None:
    for table in tables_of(runs / name):
        lacking = without(runs / name, table, "never", tmp_path / table)
        said = judged(lacking)
        assert not list(untrue(said, table)), (table, said)
        result = CliRunner().invoke(analyzer, ["timing", str(lacking)])
        assert result.exception is None or isinstance(result.exception, SystemExit), table


@pytest.mark.slow
def test_sentences_that_are_looked_for_are_said_where_nothing_is_missing(runs: Path) -> None:
    said = "\n".join(
        [
            *(diffed(runs / a, runs / b) for a, b in (*PAIRS, ("two", "two-update"))),
            *(judged(runs / name) for name in ("ddp", "stages")),
        ]
    )
    assert {p for p in SAID if not re.search(p, said, re.MULTILINE)} == NOT_HERE


def test_second_optimizer_and_teacher_are_spoken_of_as_far_as_they_were_recorded(
    runs: Path,
) -> None:
    """Of an optimizer of which no group was recorded, and of a root whose parameters were not."""
    update = diffed(
        without(runs / "two", "optimizer_groups", "never", runs / "two-lacking"),
        without(runs / "two-update", "optimizer_groups", "never", runs / "two-update-lacking"),
    )
    assert "the optimizer's settings were not recorded on both sides" in update
    teacher = diffed(runs / "teacher", runs / "teacher-output")
    assert "although its inputs are equal" in teacher


def test_loss_is_scaled_where_a_scaler_was(runs: Path) -> None:
    assert "(a loss scale)" in diffed(runs / "plain", runs / "scaler")
    assert "(a loss scale)" not in diffed(runs / "plain", runs / "loss")
