"""One module per command, of the command's name: options in, exit code out. Here is what they share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from gradtrace_analyzer.exports.whole import whole_file
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.sql.history import open_history

F = TypeVar("F", bound=Callable[..., Any])


def _format_option(*formats: str) -> Callable[[F], F]:
    return click.option(
        "--format",
        "format",
        type=click.Choice(formats),
        default="table",
        show_default=True,
        help="How the answer is written.",
    )


format_option = _format_option("table", "json", "csv")
report_format_option = _format_option("table", "json")
run_argument = click.argument("run", type=click.Path(path_type=str))
attempt_option = click.option(
    "--attempt",
    type=click.IntRange(min=0),
    help="Read this start of the job alone.  [default: the newest, with those that it continues]",
)
runs_argument = click.argument(
    "runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=str)
)


def examples(*lines: str) -> str:
    """The end of a command's help: what a person would type. The reference page has them too, and a test runs them."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def opened_runs(
    paths: Sequence[str | os.PathLike[str]], attempt: int | None = None
) -> tuple[Run, ...]:
    """The runs, what they lack told on stderr."""
    runs = tuple(open_history(path, attempt) for path in paths)
    for run in runs:
        for notice in run.notices:
            tell(notice)
    return runs


def tell(notice: str) -> None:
    """Say something on stderr that is no part of the answer."""
    click.echo(f"analyzer: {notice}", err=True)


def write_output(path: Path, text: str) -> None:
    """Write a file that a person asked for: whole, or not at all. Raises CannotWrite."""
    with whole_file(path) as place:
        place.write_text(text, encoding="utf-8")


def answer(lines: Iterable[str]) -> None:
    """Write the answer's lines to stdout."""
    for line in lines:
        sys.stdout.write(line + "\n")  # click.echo flushes each line, which a million rows feel
