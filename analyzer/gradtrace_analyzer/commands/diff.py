"""`analyzer diff`: the first divergence of two runs, its origin, and how far it spread."""

from __future__ import annotations

import click

from gradtrace_analyzer.commands import (
    answer,
    attempt_option,
    opened_runs,
    report_format_option,
)
from gradtrace_analyzer.compare import compare
from gradtrace_analyzer.database import run_names
from gradtrace_analyzer.renames import rename_of
from gradtrace_analyzer.reports.diff import as_object, lines
from gradtrace_analyzer.reports.tables import json_text

_EXIT = {"identical": 0, "within_tolerance": 0, "different": 1, "incomparable": 2}


@click.command()
@click.argument("baseline", type=click.Path(path_type=str))
@click.argument("candidate", type=click.Path(path_type=str))
@click.option("--exact", is_flag=True, help="Any changed bit is a difference.")
@click.option(
    "--rename",
    "renames",
    multiple=True,
    metavar="OLD=NEW",
    help="What the baseline calls OLD is NEW in the candidate; * is any text. Repeatable.",
)
@report_format_option
@attempt_option
def diff(
    baseline: str,
    candidate: str,
    exact: bool,
    renames: tuple[str, ...],
    format: str,
    attempt: int | None,
) -> int:
    """The first divergence of two runs: step, rank, module, Node, and why.

    Exit status: 0 the same (bit for bit, or within rounding), 1 different, 2 cannot tell.
    """
    given = [rename_of(text) for text in renames]
    runs = opened_runs((baseline, candidate), attempt)
    found = compare(*runs, exact=exact, renames=given)
    if format == "json":
        answer([json_text(as_object(found), indent=2)])
    else:
        names = run_names(runs)
        answer(lines(found, (names[0], names[1])))
    return _EXIT[found.verdict]
