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
from gradtrace_analyzer.reports.tables import json_text
from gradtrace_analyzer.tolerance import PRECISIONS

_EXIT = {"identical": 0, "within_tolerance": 0, "different": 1, "incomparable": 2}


@click.command()
@click.argument("baseline", type=click.Path(path_type=str))
@click.argument("candidate", type=click.Path(path_type=str))
@click.option("--exact", is_flag=True, help="Any changed bit is a difference.")
@click.option(
    "--noise",
    "repeats",
    multiple=True,
    metavar="RUN",
    type=click.Path(path_type=str),
    help="A repeat of the baseline: how far it differs is noise. May be given several times.",
)
@click.option(
    "--precision",
    type=click.Choice(sorted(PRECISIONS)),
    help="What one side computes products in, where no dtype or switch of the job tells it.",
)
@report_format_option
@attempt_option
def diff(
    baseline: str,
    candidate: str,
    exact: bool,
    repeats: tuple[str, ...],
    precision: str | None,
    format: str,
    attempt: int | None,
) -> int:
    """The first divergence of two runs: step, rank, module, Node, and why.

    Exit status: 0 the same (bit for bit, or within rounding), 1 different, 2 cannot tell.
    """
    runs = opened_runs((baseline, candidate), attempt)
    found = compare(
        *runs,
        exact=exact,
        repeats=opened_runs(repeats, None) if repeats else (),
        precision=precision,
    )
    if format == "json":
        answer([json_text(as_object(found), indent=2)])
    else:
        names = run_names(runs)
        answer(lines(found, (names[0], names[1])))
    return _EXIT[found.verdict]
