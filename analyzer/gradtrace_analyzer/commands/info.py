"""`analyzer info`: what was recorded, what is missing, what it cost."""

from __future__ import annotations

import click

from gradtrace_analyzer.commands import (
    answer,
    attempt_option,
    examples,
    format_option,
    opened_runs,
    runs_argument,
)
from gradtrace_analyzer.reports.info import SIZE_COLUMNS, info_lines, info_object, size_rows
from gradtrace_analyzer.reports.tables import Format, csv_lines, json_text
from gradtrace_analyzer.sql.inventory import inventory
from gradtrace_analyzer.sql.views import run_names


@click.command(epilog=examples("analyzer info runs/a runs/b"))
@runs_argument
@format_option
@attempt_option
def info(runs: tuple[str, ...], format: Format, attempt: int | None) -> None:
    """What was recorded: ranks, steps, tables, sizes, what is missing or dropped.

    CSV has a row per table; JSON has everything.
    """
    opened = opened_runs(runs, attempt)
    held = [(name, inventory(run)) for name, run in zip(run_names(opened), opened, strict=True)]
    if format == "json":
        answer([json_text({"runs": [info_object(name, h) for name, h in held]}, indent=2)])
    elif format == "csv":
        answer(csv_lines(SIZE_COLUMNS, [row for name, h in held for row in size_rows(name, h)]))
    else:
        for number, (name, h) in enumerate(held):
            answer([""] if number else [])
            answer(info_lines(name, h))
