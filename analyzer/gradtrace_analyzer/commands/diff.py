"""`analyzer diff`: the first divergence of two runs, its origin, and how far it spread."""

from __future__ import annotations

import click

from gradtrace_analyzer.chosen import CHOOSABLE, chosen
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

_EXIT = {"identical": 0, "within_tolerance": 0, "different": 1, "incomparable": 2}


@click.command()
@click.argument("baseline", type=click.Path(path_type=str))
@click.argument("candidate", type=click.Path(path_type=str))
@click.option("--exact", is_flag=True, help="Any changed bit is a difference.")
@click.option("--at", type=click.IntRange(min=0), metavar="STEP", help="Compare this step only.")
@click.option("--rank", metavar="RANKS", help="Compare these ranks only: 3, or 0,4-7.")
@click.option(
    "--module",
    multiple=True,
    metavar="GLOB",
    help="Compare these modules only, and those inside them. May be given several times.",
)
@click.option(
    "--link",
    multiple=True,
    type=click.Choice(CHOOSABLE),
    metavar="LINK",
    help=f"Compare these links of the chain only: {', '.join(CHOOSABLE)}.",
)
@click.option("--top", type=click.IntRange(min=1), metavar="N", help="How long lists may get.")
@click.option(
    "-v", "--verbose", is_flag=True, help="Show the chain around the first origin as a table."
)
@report_format_option
@attempt_option
def diff(
    baseline: str,
    candidate: str,
    exact: bool,
    at: int | None,
    rank: str | None,
    module: tuple[str, ...],
    link: tuple[str, ...],
    top: int | None,
    verbose: bool,
    format: str,
    attempt: int | None,
) -> int:
    """The first divergence of two runs: step, rank, module, Node, and why.

    Exit status: 0 the same (bit for bit, or within rounding), 1 different, 2 cannot tell.
    """
    wanted = chosen(at, rank, module, link)
    runs = opened_runs((baseline, candidate), attempt)
    found = compare(*runs, exact=exact, chosen=wanted, with_chain=verbose)
    if format == "json":
        answer([json_text(as_object(found), indent=2)])
    else:
        names = run_names(runs)
        answer(lines(found, (names[0], names[1]), top))
    return _EXIT[found.verdict]
