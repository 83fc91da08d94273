"""`analyzer trigger`: a flight recording that runs writes out the steps that it keeps."""

from __future__ import annotations

import click

from gradtrace_analyzer.commands import answer, attempt_option, examples, run_argument
from gradtrace_analyzer.runs.flight import triggered
from gradtrace_analyzer.runs.opening import open_run
from gradtrace_analyzer.words.numbers import steps_phrase


@click.command(epilog=examples("analyzer trigger runs/flight"))
@run_argument
@click.option(
    "--wait",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    help="Wait so many seconds for the ranks' answers.",
)
@attempt_option
def trigger(run: str, wait: float, attempt: int | None) -> int:
    """Have a job that runs in flight mode write the steps that its journals keep.

    Each rank sees it within a second or two, writes every step that has ended, and goes on. Exit status: 0 when all
    ranks have, 2 when one has not.
    """
    found = triggered(open_run(run, attempt), wait)
    for rank in found:
        if rank.steps is None:
            said = (
                f"has not answered in {wait:g} s: it was killed, is inside its first step, or holds Python's lock; "
                "what its journal keeps is read as it is"
            )
        else:
            first, last = rank.steps
            said = f"wrote {steps_phrase(range(first, last + 1))}"
        answer([f"rank {rank.rank} {said}"])
    return 0 if all(rank.steps is not None for rank in found) else 2
