"""`analyzer timing`: where the time of a step goes, and which rank the others wait for."""

from __future__ import annotations

from collections.abc import Iterator

import click
import duckdb

from gradtrace_analyzer.commands import (
    answer,
    attempt_option,
    examples,
    format_option,
    opened_runs,
    run_argument,
)
from gradtrace_analyzer.errors import IncompleteRun
from gradtrace_analyzer.reports.tables import Format, csv_lines, json_text
from gradtrace_analyzer.reports.timing import stages as stage_report
from gradtrace_analyzer.reports.timing import text as report
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.sql.views import connect, run_names
from gradtrace_analyzer.timing.buckets import bucket_answer
from gradtrace_analyzer.timing.gantt import chart
from gradtrace_analyzer.timing.slices import Steps, steps_of
from gradtrace_analyzer.timing.stages import stage_answer
from gradtrace_analyzer.timing.steps import rank_steps
from gradtrace_analyzer.words.numbers import spans


@click.command(
    epilog=examples("analyzer timing runs/a --buckets", "analyzer timing runs/pipe --stages")
)
@run_argument
@click.option(
    "--buckets", is_flag=True, help="The reductions of gradient buckets, and who is late."
)
@click.option(
    "--stages", is_flag=True, help="Pipeline stages: which is slow, who is idle, a chart of a step."
)
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="How many rows of a long table to show (--stages).",
)
@format_option
@attempt_option
@click.option("--step", metavar="SLICE", help="Only these steps: 3, 10:20 or ::50, with commas.")
def timing(
    run: str,
    buckets: bool,
    stages: bool,
    top: int,
    format: Format,
    attempt: int | None,
    step: str | None,
) -> None:
    """Where the time of a step goes: its parts by rank, and the rank that the others wait for.

    Exit status: 0, or 2 where what was asked for was not recorded.
    """
    if buckets and stages:
        raise click.UsageError("--buckets and --stages are two questions; ask one at a time")
    steps = steps_of(step)
    [opened] = opened_runs((run,), attempt)
    with connect([opened]) as connection:
        if stages:
            answer(_stages(opened, connection, steps, format, top))
        else:
            section = _buckets if buckets else _summary
            answer(section(opened, connection, steps, format))


def _summary(
    run: Run, connection: duckdb.DuckDBPyConnection, steps: Steps, format: Format
) -> Iterator[str]:
    ranks = rank_steps(connection, steps)
    if format == "csv":
        yield from csv_lines(report.STEP_COLUMNS, report.step_rows(ranks))
        return
    found = bucket_answer(connection, steps)
    staged = stage_answer(connection, steps)
    said = [] if staged is None else stage_report.headlines(staged)
    if format == "json":
        summary = report.summary_object(ranks, found)
        yield _json(run, steps, "summary", summary | {"stage_headlines": said})
        return
    yield from report.summary_lines(ranks, found)
    if said:
        yield from ("", *said, "More of this: --stages.")


def _buckets(
    run: Run, connection: duckdb.DuckDBPyConnection, steps: Steps, format: Format
) -> Iterator[str]:
    found = bucket_answer(connection, steps)
    if found is None:
        raise IncompleteRun(_no_buckets(run, connection, steps))
    if format == "csv":
        yield from csv_lines(report.BUCKET_COLUMNS, report.bucket_rows(found))
    elif format == "json":
        yield _json(run, steps, "buckets", report.bucket_object(found))
    else:
        yield from report.bucket_lines(found)


def _stages(
    run: Run, connection: duckdb.DuckDBPyConnection, steps: Steps, format: Format, top: int
) -> Iterator[str]:
    found = stage_answer(connection, steps)
    if found is None:
        recorded = [
            step
            for (step,) in connection.execute(
                "SELECT DISTINCT step FROM stage_events WHERE stage_index IS NOT NULL"
            ).fetchall()
        ]
        if steps.text and recorded:
            raise IncompleteRun(
                f"{run.path} holds no action of a pipeline stage of steps {steps.text}; it holds those of steps "
                f"{spans(recorded)}"
            )
        raise IncompleteRun(
            f"{run.path} holds no action of a pipeline stage; they come from torch.distributed.pipelining or "
            "gradtrace_recorder.stage(...), recorded with GRADTRACE_DETAIL params or finer"
        )
    if format == "csv":
        yield from csv_lines(stage_report.KIND_COLUMNS, stage_report.kind_rows(found))
    elif format == "json":
        yield _json(run, steps, "stages", stage_report.stage_object(found, chart(connection)))
    else:
        yield from stage_report.stage_lines(found, chart(connection), top)


def _json(run: Run, steps: Steps, section: str, content: object) -> str:
    about = {"run": run_names([run])[0], "attempt": run.attempt, "steps": steps.text or None}
    return json_text({**about, section: content}, indent=2)


def _no_buckets(run: Run, connection: duckdb.DuckDBPyConnection, steps: Steps) -> str:
    """One sentence, with the reason that the recorder gave."""
    where = f" of steps {steps.text}" if steps.text else ""
    row = connection.execute("SELECT min(unobserved) FROM groups").fetchone()
    why = (
        row[0]
        if row is not None and row[0]
        else (
            "buckets come from DDP or FSDP2 models, recorded with GRADTRACE_DETAIL params or finer"
        )
    )
    return f"{run.path} holds no bucket{where}; {why}"
