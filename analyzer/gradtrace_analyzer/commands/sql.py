"""`analyzer sql`: a person's own question to the tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, TextIO

import click

from gradtrace_analyzer.commands import answer, attempt_option, format_option, opened_runs, tell
from gradtrace_analyzer.reports.tables import Format, rendered
from gradtrace_analyzer.untrusted_sql import DEFAULT_MEMORY_LIMIT, answered

_TABLE_ROWS = 100
_MOST_COUNTED = 1_000_000


@click.command()
@click.argument("query_and_runs", nargs=-1, required=True, metavar="[QUERY] RUN...")
@click.option("-f", "--file", type=click.File(), help="Read the query from a file; - is stdin.")
@format_option
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    help=f"Write at most so many rows, 0 for all.  [default: {_TABLE_ROWS} for table, else all]",
)
@click.option("--timeout", type=click.FloatRange(min=0), help="Give up after so many seconds.")
@click.option("--memory-limit", default=DEFAULT_MEMORY_LIMIT, show_default=True, metavar="SIZE")
@attempt_option
def sql(
    query_and_runs: tuple[str, ...],
    file: TextIO | None,
    format: Format,
    limit: int | None,
    timeout: float | None,
    memory_limit: str,
    attempt: int | None,
) -> None:
    """Answer a SQL query over the tables of one or more runs.

    One view per table: steps, inputs, parameters, module_calls, node_events, gradients, buckets and so on;
    SHOW TABLES lists them, DESCRIBE says their columns. The column "run" tells runs apart. The query only
    reads. NaN and infinities are the texts "NaN", "Infinity" and "-Infinity" in JSON and CSV.
    """
    query, paths = (file.read(), query_and_runs) if file else _split(query_and_runs)
    most = limit if limit is not None else _TABLE_ROWS if format == "table" else 0
    runs = opened_runs(paths, attempt)
    with answered(runs, query, memory_limit=memory_limit, timeout_s=timeout) as found:
        answer(rendered(format, found.columns, itertools.islice(found.rows, most or None)))
        if most:
            _tell_the_rest(found.rows, most)


def _split(query_and_runs: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    query, *paths = query_and_runs
    if not paths:
        raise click.UsageError("Missing argument 'RUN...'.")
    return query, tuple(paths)


def _tell_the_rest(rows: Iterator[tuple[Any, ...]], shown: int) -> None:
    left = sum(1 for _ in itertools.islice(rows, _MOST_COUNTED))
    if left:
        of = f"{shown + left:,}" if left < _MOST_COUNTED else f"more than {_MOST_COUNTED:,}"
        tell(f"{shown:,} of {of} rows shown; --limit 0 shows all")
