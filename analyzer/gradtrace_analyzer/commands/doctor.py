"""`analyzer doctor`: would a job that is started here be recorded; with a run: what of it is lost, and why."""

from __future__ import annotations

import sys
from typing import Literal

import click

from gradtrace_analyzer.commands import (
    answer,
    attempt_option,
    examples,
    opened_runs,
    report_format_option,
)
from gradtrace_analyzer.doctor.examine import examined
from gradtrace_analyzer.doctor.finding import DoctorVerdict, verdict
from gradtrace_analyzer.doctor.interpreter import interpreter
from gradtrace_analyzer.doctor.recorded import recorded
from gradtrace_analyzer.reports.doctor import job_object, lines, run_object
from gradtrace_analyzer.reports.tables import json_text
from gradtrace_analyzer.sql.views import run_names

_EXIT: dict[DoctorVerdict, int] = {"well": 0, "wrong": 1, "unknown": 2}


@click.command(epilog=examples("GRADTRACE_DIR=runs/c analyzer doctor", "analyzer doctor runs/a"))
@click.argument("run", required=False, type=click.Path(path_type=str))
@click.option(
    "--python",
    metavar="PATH",
    help="The Python that runs the job.  [default: the one that runs the analyzer]",
)
@click.option(
    "--trial/--no-trial",
    default=True,
    help="Train a small model, bare and recorded: 30 seconds at most.",
)
@report_format_option
@attempt_option
def doctor(
    run: str | None,
    python: str | None,
    trial: bool,
    format: Literal["table", "json"],
    attempt: int | None,
) -> int:
    """Would a job that is started here be recorded, and at what cost. Of a RUN: what is lost, and why.

    Without RUN it starts the Python that runs the job, in this environment and this directory, and looks at everything
    that recording needs. It trains a small model in turn bare and recorded: by which observer, at what cost. With RUN
    it tells which ranks recorded what, and what is missing.

    Exit status: 0 all is well, 1 something is wrong, 2 it cannot be told.
    """
    if run is not None:
        if python is not None:
            raise click.UsageError("--python is for a job that would be started; a run is over.")
        runs = opened_runs((run,), attempt)
        found = recorded(runs[0])
        findings = found.findings
        told = run_object(run_names(runs)[0], found)
    else:
        if attempt is not None:
            raise click.UsageError("--attempt is for a run.")
        asked = interpreter(python or sys.executable)
        about = examined(asked, with_trial=trial)
        findings = about.findings
        told = job_object(asked.path, findings, about.trial)
    if format == "json":
        answer([json_text(told, indent=2)])
    else:
        answer(lines(findings, is_of_a_run=run is not None))
    return _EXIT[verdict(findings)]
