"""`analyzer sql`: a person's own question to the tables, or one of those that come with the analyzer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import click

from gradtrace_analyzer.commands import (
    answer,
    attempt_option,
    examples,
    format_option,
    opened_runs,
    tell,
)
from gradtrace_analyzer.errors import BadQuery
from gradtrace_analyzer.exports.rows import SUFFIXES, write_rows
from gradtrace_analyzer.progress import progress
from gradtrace_analyzer.reports.tables import Format, rendered
from gradtrace_analyzer.sql.library import NamedQuery, Value, named_queries, named_query, value_of
from gradtrace_analyzer.sql.sealed import answered

_TABLE_ROWS = 100
_MOST_COUNTED = 1_000_000


@click.command(
    epilog=examples(
        'analyzer sql "SELECT rank, max(step) FROM steps GROUP BY ALL" runs/a',
        "analyzer sql @gradient-norms runs/a",
    )
)
@click.argument("query_and_runs", nargs=-1, metavar="[QUERY | @NAME] RUN...")
@click.option("-f", "--file", type=click.File(), help="Read the query from a file; - is stdin.")
@click.option("--list", "is_list", is_flag=True, help="Name the queries that @NAME may be.")
@click.option(
    "-p",
    "--parameter",
    "given",
    multiple=True,
    metavar="NAME=VALUE",
    help="The value of what the query calls $NAME.",
)
@format_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"Write all rows to a file instead: {', '.join(SUFFIXES)}.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    help=f"Write at most so many rows, 0 for all.  [default: {_TABLE_ROWS} for table, else all]",
)
@click.option("--timeout", type=click.FloatRange(min=0), help="Give up after so many seconds.")
@click.option(
    "--memory-limit",
    metavar="SIZE",
    help="Use at most so much, such as 4GB.  [default: 80% of the memory]",
)
@attempt_option
def sql(
    query_and_runs: tuple[str, ...],
    file: TextIO | None,
    is_list: bool,
    given: tuple[str, ...],
    format: Format,
    output: Path | None,
    limit: int | None,
    timeout: float | None,
    memory_limit: str | None,
    attempt: int | None,
) -> None:
    """Answer a SQL query over the tables of one or more runs.

    One view per table: steps, inputs, parameters, module_calls, node_events, gradients, buckets and so on;
    SHOW TABLES lists them, DESCRIBE says their columns. The column "run" tells runs apart. The query only
    reads. NaN and infinities are the texts "NaN", "Infinity" and "-Infinity" in JSON and CSV.
    """
    if is_list:
        _list(format)
        return
    query, paths = (_read(file), query_and_runs) if file else _split(query_and_runs)
    if not paths:
        raise click.UsageError("Missing argument 'RUN...'.")
    values = _values(given)
    if query.startswith("@"):
        named = named_query(query[1:])
        query, values = named.sql, {**named.defaults, **values}
    most = limit if limit is not None else _TABLE_ROWS if format == "table" and not output else 0
    runs = opened_runs(paths, attempt)
    with (
        progress("answering the query"),
        answered(
            runs,
            query,
            parameters=values,
            memory_limit=memory_limit,
            timeout_s=timeout,
            is_typed=output is not None and output.suffix == ".parquet",
        ) as found,
    ):
        if output is not None:
            count = write_rows(output, found, most)
            tell(f"{count:,} rows written to {output}")
            return
        answer(rendered(format, found.columns, itertools.islice(found.rows, most or None)))
        if most:
            _tell_the_rest(found.rows, most)


def _read(file: TextIO) -> str:
    try:
        return file.read()
    except UnicodeDecodeError:
        raise BadQuery(f"{file.name} is no text in UTF-8") from None


def _split(query_and_runs: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    if not query_and_runs:
        raise click.UsageError("Missing argument 'QUERY', or --list.")
    query, *paths = query_and_runs
    return query, tuple(paths)


def _values(given: tuple[str, ...]) -> dict[str, Value]:
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise BadQuery(f"-p {text!r} is no NAME=VALUE")
        found[name] = value_of(value)
    return found


def _list(format: Format) -> None:
    queries = named_queries()
    rows = [(f"@{q.name}", q.question, _parameters(q)) for q in queries]
    if format != "table":
        answer(rendered(format, ("name", "question", "parameters"), rows))
        return
    for name, question, parameters in rows:
        answer([name, f"    {question}", *([f"    {parameters}"] if parameters else [])])


def _parameters(query: NamedQuery) -> str:
    def shown(value: Value) -> str:
        return "null" if value is None else str(value)

    return "  ".join(
        f"-p {name}={shown(value)}: {query.about[name].rstrip('.').lower()}."
        for name, value in query.defaults.items()
    )


def _tell_the_rest(rows: Iterator[tuple[Any, ...]], shown: int) -> None:
    left = sum(1 for _ in itertools.islice(rows, _MOST_COUNTED))
    if left:
        of = f"{shown + left:,}" if left < _MOST_COUNTED else f"more than {_MOST_COUNTED:,}"
        tell(f"{shown:,} of {of} rows shown; --limit 0 shows all")
