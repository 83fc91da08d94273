"""Where the time of a step goes, as a colleague would tell it: sentences, then tables; JSON and CSV rows.

Times are nanoseconds in JSON and CSV, milliseconds in text. A share is a fraction in JSON and CSV.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from gradtrace_analyzer.reports.tables import table_lines
from gradtrace_analyzer.reports.timing.stragglers import (
    exposed_text,
    headlines,
    host_clock_text,
    judgement_text,
    judgement_texts,
    parameters_text,
)
from gradtrace_analyzer.timing.buckets import BucketAnswer, BucketTimes, RankTotal
from gradtrace_analyzer.timing.reductions import Bucket
from gradtrace_analyzer.timing.steps import PARTS, RankSteps
from gradtrace_analyzer.timing.stragglers import Onset, StragglerJudgement
from gradtrace_analyzer.words.numbers import bytes_text, counted, ms_text, percent_text

_MOST_RANKS = 8
_MOST_BUCKETS = 60

STEP_COLUMNS = (
    "rank",
    "step_count",
    *(f"median_{part}_ns" for part in PARTS),
    *(f"total_{part}_ns" for part in PARTS),
    "recorder_share",
)
BUCKET_COLUMNS = (
    "group",
    "root",
    "module_fqn",
    "layout_index",
    "bucket_index",
    "first_parameter_fqn",
    "parameter_count",
    "size_bytes",
    "reduction_count",
    "transport_ns",
    "rank",
    "launch_count",
    "wait_ns",
    "own_ns",
    "ready_to_launch_ns",
    "hidden_share",
    "exposed_ns",
)


def summary_lines(ranks: Sequence[RankSteps], answer: BucketAnswer | None) -> Iterator[str]:
    """The parts of the steps by rank, and the headline of the buckets where there are any."""
    if ranks:
        columns = ["rank", "steps", *PARTS, *(f"{part} total" for part in PARTS), "recorder"]
        yield from table_lines(
            columns,
            [
                (
                    own.rank,
                    own.step_count,
                    *(ms_text(ns) for ns in own.median_ns),
                    *(ms_text(ns) for ns in own.total_ns),
                    percent_text(own.recorder_share),
                )
                for own in ranks
            ],
            right=columns,
        )
        yield "(medians of a step, then totals of all; recorder: its share of the steps)"
    else:
        yield "No step was closed."
    if answer is not None:
        yield ""
        yield from headlines(answer)
        yield "More of this: --buckets."


def step_rows(ranks: Sequence[RankSteps]) -> list[tuple[Any, ...]]:
    """A row per rank, in the order of STEP_COLUMNS."""
    return [
        (own.rank, own.step_count, *own.median_ns, *own.total_ns, own.recorder_share)
        for own in ranks
    ]


def summary_object(ranks: Sequence[RankSteps], answer: BucketAnswer | None) -> dict[str, Any]:
    """The answer as JSON: a row for each rank with the columns of `step_rows`, and the headlines of the buckets."""
    return {
        "ranks": [dict(zip(STEP_COLUMNS, row, strict=True)) for row in step_rows(ranks)],
        "headlines": [] if answer is None else headlines(answer),
    }


def bucket_lines(answer: BucketAnswer) -> Iterator[str]:
    """The straggler of each group, then lags, buckets and totals, last what is missing."""
    yield from judgement_texts(answer)
    yield from exposed_text(answer.totals)
    yield from map(host_clock_text, answer.clocks)
    for section in (_lag_table(answer), _bucket_table(answer), _other_table(answer)):
        yield from _after_blank(section)
    yield from _after_blank(_total_table(answer.totals))
    if answer.notes:
        yield ""
        yield f"Not whole: {'; '.join(answer.notes)}."


def bucket_rows(answer: BucketAnswer) -> list[tuple[Any, ...]]:
    """A row per bucket and rank, in the order of BUCKET_COLUMNS."""
    return [
        (
            times.bucket.group,
            times.bucket.root,
            times.bucket.module_fqn,
            times.bucket.layout_index,
            times.bucket.bucket_index,
            next(iter(times.bucket.parameter_fqns), None),
            times.bucket.parameter_count,
            times.bucket.size_bytes,
            times.reduction_count,
            times.transport_ns,
            *asdict(own).values(),
        )
        for times in answer.buckets
        for own in times.ranks
    ]


def bucket_object(answer: BucketAnswer) -> dict[str, Any]:
    """The answer as JSON. What does not apply is null; times are nanoseconds."""
    return {
        "median_step_ns": answer.step_ns,
        "groups": [_judgement_object(answer, judgement) for judgement in answer.judgements],
        "buckets": [
            {
                **_bucket_object(times.bucket),
                "reduction_count": times.reduction_count,
                "transport_ns": times.transport_ns,
                "ready_to_launch_ns": times.ready_to_launch_ns,
                "hidden_share": times.hidden_share,
                "ranks": [asdict(own) for own in times.ranks],
            }
            for times in answer.buckets
        ],
        "other_buckets": [
            {
                "kind": other.kind,
                **_bucket_object(other.bucket),
                "rank_count": other.rank_count,
                "launch_count": other.launch_count,
                "own_ns": other.own_ns,
                "ready_to_launch_ns": other.ready_to_launch_ns,
            }
            for other in answer.others
        ],
        "totals": [asdict(total) for total in answer.totals],
        "clocks": [asdict(clock) for clock in answer.clocks],
        "notes": answer.notes,
        "explanation": " ".join([*judgement_texts(answer), *exposed_text(answer.totals)]),
    }


def _judgement_object(answer: BucketAnswer, judgement: StragglerJudgement) -> dict[str, Any]:
    straggler = judgement.straggler
    return {
        "group": judgement.team.group,
        "ranks": judgement.team.ranks,
        "missing_ranks": judgement.team.missing_ranks,
        "reduction_count": judgement.reduction_count,
        "pass_count": judgement.pass_count,
        "worst_lag_ns": judgement.worst_ns,
        "floor_ns": judgement.floor.ns,
        "floor_reason": judgement.floor.reason,
        "leaving_ns": judgement.floor.leaving_ns,
        "straggler": None if straggler is None else straggler.rank,
        "also_late": None if straggler is None else straggler.also_late,
        "onset": None if straggler is None else _onset_object(straggler.onset),
        "reason": judgement.reason,
        "lags": [asdict(lag) for lag in judgement.lags],
        "explanation": judgement_text(answer, judgement),
    }


def _onset_object(onset: Onset) -> dict[str, Any]:
    return {
        "place": onset.place,
        "bucket": _bucket_object(onset.bucket),
        "previous": None if onset.previous is None else _bucket_object(onset.previous),
        "growth_ns": onset.growth_ns,
        "lag_ns": onset.lag_ns,
        "pass_count": onset.pass_count,
        "modules": onset.bucket.modules,
        "node": None if onset.node is None else asdict(onset.node),
    }


def _bucket_object(bucket: Bucket) -> dict[str, Any]:
    return {
        "group": bucket.group,
        "root": bucket.root,
        "module_fqn": bucket.module_fqn,
        "layout_index": bucket.layout_index,
        "bucket_index": bucket.bucket_index,
        "parameter_fqns": bucket.parameter_fqns,
        "parameter_count": bucket.parameter_count,
        "size_bytes": bucket.size_bytes,
    }


def _lag_table(answer: BucketAnswer) -> Iterator[str]:
    columns = ("group", "rank", "last in", "late in", "median late", "largest", "lag of a pass")
    rows = []
    left_out = 0
    for judgement in answer.judgements:
        shown = sorted(judgement.lags, key=lambda lag: (-lag.pass_lag_ns, lag.rank))
        left_out += len(shown[_MOST_RANKS:])
        rows += [
            (
                judgement.team.group,
                lag.rank,
                f"{lag.last_count:,} of {judgement.reduction_count:,}",
                f"{lag.late_count:,}",
                ms_text(lag.median_late_ns),
                ms_text(lag.largest_late_ns),
                ms_text(lag.pass_lag_ns),
            )
            for lag in shown[:_MOST_RANKS]
        ]
    if not rows:
        return
    yield "Lag behind the first rank to launch (late: last, and beyond what is judged; of a pass: its largest, median):"
    yield from table_lines(columns, rows, right=columns[1:])
    yield from _more(left_out, "rank")


def _bucket_table(answer: BucketAnswer) -> Iterator[str]:
    if not answer.buckets:
        return
    shown = answer.buckets[:_MOST_BUCKETS]
    models = [_model(times.bucket) for times in shown]
    is_one = len(set(models)) == 1
    columns = (
        *(() if is_one else ("model",)),
        "group",
        "layout",
        "bucket",
        "parameters",
        "size",
        "reductions",
        "ready to launch",
        "longest wait",
        "transport",
        "hidden",
        "exposed",
    )
    yield (
        "Buckets (medians; wait and exposed of the rank with most, transport after the last launch, "
        "hidden behind the rest of backward):"
    )
    yield from table_lines(
        columns,
        [
            (*(() if is_one else (model,)), *_bucket_row(times))
            for model, times in zip(models, shown, strict=True)
        ],
        right=set(columns) - {"model", "group", "parameters"},
    )
    yield from _more(len(answer.buckets[_MOST_BUCKETS:]), "bucket")


def _model(bucket: Bucket) -> str:
    """The model of a bucket: `root 0`, or `root 1, trunk` where DDP wraps a part of it."""
    return ", ".join([f"root {bucket.root}", *([bucket.module_fqn] if bucket.module_fqn else [])])


def _bucket_row(times: BucketTimes) -> tuple[Any, ...]:
    bucket, waits = times.bucket, times.longest_wait
    wait = f"{ms_text(waits.wait_ns)} (rank {waits.rank})" if waits.wait_ns else ms_text(0)
    return (
        bucket.group,
        "" if bucket.layout_index is None else str(bucket.layout_index),
        str(bucket.bucket_index),
        parameters_text(bucket),
        bytes_text(bucket.size_bytes),
        f"{times.reduction_count:,}",
        ms_text(times.ready_to_launch_ns),
        wait,
        ms_text(times.transport_ns),
        percent_text(times.hidden_share),
        ms_text(times.exposed_ns),
    )


def _other_table(answer: BucketAnswer) -> Iterator[str]:
    if not answer.others:
        return
    columns = ("kind", "group", "bucket", "parameters", "size", "ranks", "launches", "own time")
    yield "Not in the answers above (medians):"
    yield from table_lines(
        columns,
        [
            (
                other.kind,
                other.bucket.group,
                str(other.bucket.bucket_index),
                parameters_text(other.bucket),
                bytes_text(other.bucket.size_bytes),
                other.rank_count,
                other.launch_count,
                ms_text(other.own_ns),
            )
            for other in answer.others[:_MOST_BUCKETS]
        ],
        right=(columns[2], *columns[4:]),
    )
    yield from _more(len(answer.others[_MOST_BUCKETS:]), "bucket")


def _total_table(totals: Sequence[RankTotal]) -> Iterator[str]:
    if not totals:
        return
    shown = sorted(totals, key=lambda total: (-total.exposed_ns, total.rank))
    columns = ("rank", "steps", "exposed", "of it waiting", "share of steps", "largest", "in step")
    yield "Exposed reduction time in a step (medians; steps in which the rank reduced):"
    yield from table_lines(
        columns,
        [
            (
                total.rank,
                total.step_count,
                ms_text(total.exposed_ns),
                ms_text(total.waiting_ns),
                percent_text(total.exposed_share),
                ms_text(total.largest_ns),
                total.largest_step,
            )
            for total in shown[:_MOST_RANKS]
        ],
        right=columns,
    )
    yield from _more(len(shown[_MOST_RANKS:]), "rank")


def _after_blank(section: Iterator[str]) -> Iterator[str]:
    for number, line in enumerate(section):
        yield from () if number else ("",)
        yield line


def _more(left_out: int, what: str) -> Iterator[str]:
    if left_out:
        yield f"and {counted(left_out, f'more {what}')} (--format json)"
