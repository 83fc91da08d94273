"""`analyzer failures`: how each rank ended, or where it is: the Node it was in, and who waits for whom."""

from __future__ import annotations

from typing import Literal

import click

from gradtrace_analyzer.commands import (
    answer,
    attempt_option,
    examples,
    opened_runs,
    report_format_option,
    run_argument,
)
from gradtrace_analyzer.failures.endings import STUCK_SECONDS, EndingsVerdict, endings
from gradtrace_analyzer.reports.failures import as_object, lines
from gradtrace_analyzer.reports.tables import json_text
from gradtrace_analyzer.sql.views import run_names

_EXIT: dict[EndingsVerdict, int] = {"well": 0, "found": 1, "unknown": 2}


@click.command(epilog=examples("analyzer failures runs/a"))
@run_argument
@report_format_option
@attempt_option
@click.option(
    "--stuck-after",
    type=click.FloatRange(min=0),
    default=STUCK_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="A rank that lives is stuck when nothing has happened in it for so long.",
)
def failures(
    run: str, format: Literal["table", "json"], attempt: int | None, stuck_after: float
) -> int:
    """Which rank raised, died, hangs or waits: in which Node, since when, and for whom.

    A job that still runs is read without touching it. Exit status: 0 all ranks ended by themselves and no
    exception was seen (with which exit code is not recorded), 1 something was found, 2 it cannot be told (yet).
    """
    runs = opened_runs((run,), attempt)
    found = endings(runs[0], stuck_after)
    name = run_names(runs)[0]
    if format == "json":
        answer([json_text(as_object(found, name), indent=2)])
    else:
        answer(lines(found, name))
    return _EXIT[found.verdict]
