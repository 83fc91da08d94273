"""`analyzer diff`: the first divergence of two runs, its origin, and how far it spread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from gradtrace_analyzer.commands import (
    answer,
    attempt_option,
    examples,
    opened_runs,
    report_format_option,
    write_output,
)
from gradtrace_analyzer.diff.compare import compare
from gradtrace_analyzer.diff.gate import ANY, Gate, exit_status, gate_failures, gate_of
from gradtrace_analyzer.diff.names.renames import rename_of
from gradtrace_analyzer.diff.scope.selection import CHOOSABLE, chosen
from gradtrace_analyzer.diff.scope.step_alignment import alignment_of
from gradtrace_analyzer.errors import NoRepeat
from gradtrace_analyzer.numerics.tolerance import PRECISIONS
from gradtrace_analyzer.reports.diff.gate import failure_words
from gradtrace_analyzer.reports.diff.json_object import as_object
from gradtrace_analyzer.reports.diff.junit import junit_xml
from gradtrace_analyzer.reports.diff.text import lines
from gradtrace_analyzer.reports.diff.timing import timing_lines, timing_object
from gradtrace_analyzer.reports.tables import json_text
from gradtrace_analyzer.runs.run import Run, is_same_recording
from gradtrace_analyzer.sql.views import run_names
from gradtrace_analyzer.timing.slower import compared_runs
from gradtrace_analyzer.words.nouns import SIDES

_EXIT = {"identical": 0, "within_tolerance": 0, "different": 1, "incomparable": 2}

# How many places --timing shows in its table.
_PLACES = 10


@click.command(
    epilog=examples("analyzer diff runs/a runs/b", "analyzer diff runs/a runs/b --noise runs/a2 -v")
)
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
@click.option(
    "--timing",
    is_flag=True,
    help="Also what got slower or faster, beyond the spread within the runs.",
)
@click.option(
    "--rename",
    "renames",
    multiple=True,
    metavar="OLD=NEW",
    help="What the baseline calls OLD is NEW in the candidate; * is any text. Repeatable.",
)
@click.option(
    "--fail-on",
    "gates",
    multiple=True,
    metavar="LINK>=X",
    help="Exit with 1 only for a difference at that link (or `any`) with a relative error of X or more. Repeatable.",
)
@click.option(
    "--junit",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write JUnit XML there: one test case a link.  [with no --fail-on: any>=0]",
)
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
@click.option(
    "--align-steps",
    metavar="framework|offset=N",
    help="Pair steps by the framework's counter, or the candidate's step 0 with the baseline's step N.",
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
    timing: bool,
    renames: tuple[str, ...],
    gates: tuple[str, ...],
    junit: Path | None,
    repeats: tuple[str, ...],
    precision: str | None,
    align_steps: str | None,
    format: str,
    attempt: int | None,
) -> int:
    """The first divergence of two runs: step, rank, module, Node, and why.

    Exit status: 0 the same (bit for bit, or within rounding), 1 different, 2 cannot tell. With --fail-on: 1 where it
    fails, 2 where nothing can be compared, else 0. Times do not count for it.
    """
    limits = tuple(gate_of(text) for text in gates)
    given = [rename_of(text) for text in renames]
    wanted = chosen(at, rank, module, link)
    runs = opened_runs((baseline, candidate), attempt)
    aligned = alignment_of(align_steps, *runs)
    found = compare(
        *runs,
        exact=exact,
        renames=given,
        chosen=wanted,
        with_chain=verbose,
        repeats=_opened_repeats(repeats, runs),
        precision=precision,
        aligned=aligned,
    )
    if aligned is not None:
        runs = (runs[0], runs[1].shifted(aligned.offset))
    times = compared_runs(*runs) if timing else None
    baseline_name, candidate_name = run_names(runs)
    names = (baseline_name, candidate_name)
    failed = gate_failures(found, limits)
    if junit is not None:
        all_limits = limits or (Gate(ANY, 0.0),)
        write_output(junit, junit_xml(found, names, all_limits, gate_failures(found, all_limits)))
    if format == "json":
        failures = {link: failure_words(one) for link, one in failed.items()}
        told = as_object(found) | ({"failing": failures} if limits else {})
        told |= {} if times is None else {"timing": timing_object(times, (runs[0], runs[1]))}
        answer([json_text(told, indent=2)])
    else:
        answer(lines(found, names, top))
        if times is not None:
            answer(["", *timing_lines(times, (runs[0], runs[1]), top or _PLACES)])
        if limits:
            answer(["", *(f"Fails: {failure_words(one)}" for one in failed.values())])
            if found.verdict == "incomparable":
                answer(["Too little was compared for anything to pass."])
            elif not failed:
                answer(["No difference reaches what --fail-on names."])
    return exit_status(found, failed) if limits else _EXIT[found.verdict]


def _opened_repeats(paths: Sequence[str], runs: Sequence[Run]) -> Sequence[Run]:
    """The repeats of the baseline. Raises NoRepeat for one that is a side of the comparison itself."""
    repeats = opened_runs(paths, None) if paths else ()
    for side, run in zip(SIDES, runs, strict=True):
        for path, repeat in zip(paths, repeats, strict=True):
            if is_same_recording(run, repeat):
                raise NoRepeat(
                    f"--noise {path} is the {side} itself; give another run of the baseline's job"
                )
    return repeats
