"""No sentence speaks of what was not recorded: each table is taken away in turn, and every sentence is read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradtrace_analyzer.check.check import check
from gradtrace_analyzer.diff.compare import compare
from gradtrace_analyzer.failures.endings import endings
from gradtrace_analyzer.reports import check as check_report
from gradtrace_analyzer.reports import failures as failures_report
from gradtrace_analyzer.reports.diff.json_object import as_object
from gradtrace_analyzer.reports.diff.text import lines
from gradtrace_analyzer.runs.run import open_run
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
    r"all before it is equal": {"parameters", "inputs", "module_calls"},
    r"changed since the step before": {"parameters"},
    r"the optimizer saw no gradient": {"gradients"},
    r"no (output|[a-z, ]*output)[a-z, ]* differs by more": {"module_calls"},
    r"no [a-z, ]*\bloss[a-z, ]* differs by more": {"backward_passes"},
    # The table of what is equal in a step, and with -v the rows around the origin.
    r"Equal in that step.*\blinks\b[^;]*\bparameters\b": {"parameters"},
    r"Equal in that step.*\blinks\b[^;]*\binputs\b": {"inputs"},
    r"Equal in that step.*\blinks\b[^;]*\bforward\b": {"module_calls"},
    r"Equal in that step.*\blinks\b[^;]*\bloss\b": {"backward_passes"},
    r"Equal in that step.*\blinks\b[^;]*\bbackward\b": {"node_events"},
    r"Equal in that step.*\blinks\b[^;]*\b(local_gradient|clip)\b": {"gradients"},
    r"Equal in that step.*\blinks\b[^;]*\bbucket\b": {"buckets"},
    r"Equal in that step.*\blinks\b[^;]*\boptimizer\b": {"parameters"},
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
    r"although what it received is equal|although stage \d made the same",
    r"what every rank put in is equal",
    r"gradients that the Nodes gave are equal|all Nodes that ran before gave equal",
    r"local gradients are equal",
    r"all before it is equal",
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
PAIRS = (
    ("plain", "again"),
    ("plain", "derivative"),
    ("plain", "loss"),
    ("plain", "gradient"),
    ("teacher", "teacher-output"),
    ("ddp", "ddp-update"),
    ("stages", "stages-derivative"),
)


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


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_no_sentence_of_diff_rests_on_a_table_that_neither_side_has(
    pair: tuple[str, str], runs: Path, tmp_path: Path
) -> None:
    for table in tables_of(runs / pair[0]):
        for way in ("never", "values"):
            sides = [
                without(runs / name, table, way, tmp_path / f"{table}-{way}-{n}")
                for n, name in enumerate(pair)
            ]
            said = diffed(*sides)
            assert not list(untrue(said, table)), (table, way, said)
            if way == "values" and table in tables_of(sides[0]):
                assert "bit for bit" not in said or "Not compared" in said
