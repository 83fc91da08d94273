"""`analyzer check`: the laws that hold within one run, and where they are broken."""

from __future__ import annotations

from typing import Literal

import click

from gradtrace_analyzer.check.check import CheckVerdict
from gradtrace_analyzer.check.check import check as judged
from gradtrace_analyzer.commands import (
    answer,
    attempt_option,
    examples,
    opened_runs,
    report_format_option,
    run_argument,
)
from gradtrace_analyzer.reports.check import as_object, lines
from gradtrace_analyzer.reports.tables import json_text
from gradtrace_analyzer.sql.views import run_names

_EXIT: dict[CheckVerdict, int] = {"clean": 0, "violated": 1, "incomparable": 2}


@click.command(epilog=examples("analyzer check runs/a"))
@run_argument
@report_format_option
@attempt_option
@click.option(
    "--compressing",
    multiple=True,
    metavar="GLOB",
    help="A communication hook of the job's own that loses precision on purpose: its error is told, not judged.",
)
def check(
    run: str, format: Literal["table", "json"], attempt: int | None, compressing: tuple[str, ...]
) -> int:
    """Ranks that disagree, a reduction that is not the mean, where a value that is not finite was born.

    Exit status: 0 clean (warnings alone are), 1 violated, 2 nothing could be judged.
    """
    runs = opened_runs((run,), attempt)
    found = judged(runs[0], compressing=compressing)
    if format == "json":
        answer([json_text(as_object(found), indent=2)])
    else:
        answer(lines(found, run_names(runs)[0]))
    return _EXIT[found.verdict]
