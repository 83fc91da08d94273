"""`analyzer export`: a run for other programs."""

from __future__ import annotations

from pathlib import Path

import click

from gradtrace_analyzer.commands import attempt_option, examples, opened_runs, runs_argument, tell
from gradtrace_analyzer.errors import IncompleteRun
from gradtrace_analyzer.exports.perfetto import write_trace
from gradtrace_analyzer.exports.tables import write_database, write_tables
from gradtrace_analyzer.exports.timeline import timeline
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.sql.views import connect
from gradtrace_analyzer.timing.slices import Steps, steps_of
from gradtrace_analyzer.words.numbers import ranks_phrase

_file = click.Path(path_type=Path, dir_okay=False)
_folder = click.Path(path_type=Path, file_okay=False)


@click.command(
    epilog=examples(
        "analyzer export runs/a --perfetto a.pftrace.gz",
        "analyzer export runs/a runs/b --duckdb both.duckdb",
    )
)
@runs_argument
@click.option("--duckdb", type=_file, metavar="FILE", help="A DuckDB file with every table.")
@click.option(
    "--perfetto",
    type=_file,
    metavar="FILE",
    help="A trace of the time line, for ui.perfetto.dev; compressed where the name ends in .gz.",
)
@click.option("--parquet", type=_folder, metavar="FOLDER", help="A Parquet file for each table.")
@click.option("--csv", type=_folder, metavar="FOLDER", help="A CSV file for each table.")
@click.option("--step", metavar="SLICE", help="Of the trace only these steps: 3, 10:20 or ::50.")
@attempt_option
def export(
    runs: tuple[str, ...],
    duckdb: Path | None,
    perfetto: Path | None,
    parquet: Path | None,
    csv: Path | None,
    step: str | None,
    attempt: int | None,
) -> None:
    """Write a run for other programs: its tables, or its time line.

    Tables carry the column "run" and may hold several runs; a trace is of one. A file takes its place when it is
    whole.
    """
    steps = steps_of(step)
    if not any((duckdb, perfetto, parquet, csv)):
        raise click.UsageError("Say what to write: --duckdb, --perfetto, --parquet or --csv.")
    if step is not None and perfetto is None:
        raise click.UsageError("--step is for --perfetto; tables are written whole.")
    opened = opened_runs(runs, attempt)
    if perfetto is not None and len(opened) > 1:
        raise click.UsageError("A trace is of one run.")
    if duckdb is not None:
        tell(f"{write_database(duckdb, opened):,} rows written to {duckdb}")
    if parquet is not None:
        tell(f"{write_tables(parquet, opened, 'parquet'):,} rows written to {parquet}")
    if csv is not None:
        tell(f"{write_tables(csv, opened, 'csv'):,} rows written to {csv}")
    if perfetto is not None:
        _trace(perfetto, opened[0], steps)


def _trace(path: Path, run: Run, steps: Steps) -> None:
    with connect([run]) as connection:
        found = timeline(connection, steps)
        if not found.zeros:
            raise IncompleteRun(f"{run.path} holds no rank that says when it began")
        if found.by_wall:
            tell(
                f"{ranks_phrase(found.by_wall)} share no reduction with the others: their wall clocks place them, "
                "which may be off by milliseconds"
            )
        count = write_trace(path, found)
    tell(f"{count:,} slices written to {path}")
