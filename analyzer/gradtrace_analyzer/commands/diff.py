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
from gradtrace_analyzer.reports.diff import as_object, lines
from gradtrace_analyzer.reports.slower import timing_lines, timing_object
from gradtrace_analyzer.reports.tables import json_text
from gradtrace_analyzer.timing.slower import compared_runs

_EXIT = {"identical": 0, "within_tolerance": 0, "different": 1, "incomparable": 2}


@click.command()
@click.argument("baseline", type=click.Path(path_type=str))
@click.argument("candidate", type=click.Path(path_type=str))
@click.option("--exact", is_flag=True, help="Any changed bit is a difference.")
@click.option(
    "--timing",
    is_flag=True,
    help="Also what got slower or faster, beyond the spread within the runs.",
)
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="How many places --timing shows in its table.",
)
@report_format_option
@attempt_option
def diff(
    baseline: str,
    candidate: str,
    exact: bool,
    timing: bool,
    top: int,
    format: str,
    attempt: int | None,
) -> int:
    """The first divergence of two runs: step, rank, module, Node, and why.

    Exit status: 0 the same (bit for bit, or within rounding), 1 different, 2 cannot tell. Times do not count for it.
    """
    runs = opened_runs((baseline, candidate), attempt)
    found = compare(*runs, exact=exact)
    times = compared_runs(*runs) if timing else None
    if format == "json":
        more = {} if times is None else {"timing": timing_object(times, (runs[0], runs[1]))}
        answer([json_text(as_object(found) | more, indent=2)])
    else:
        names = run_names(runs)
        answer(lines(found, (names[0], names[1])))
        if times is not None:
            answer(["", *timing_lines(times, (runs[0], runs[1]), top)])
    return _EXIT[found.verdict]
