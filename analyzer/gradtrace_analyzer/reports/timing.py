"""Where the time of a step goes, as a colleague would tell it: sentences, then tables; JSON and CSV rows.

Times are nanoseconds in JSON and CSV, milliseconds in text. A share is a fraction in JSON and CSV.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from gradtrace_analyzer.laws.phrases import counted, listed, module_phrase, upper_first
from gradtrace_analyzer.reports.tables import bytes_text, table_lines
from gradtrace_analyzer.run import ranks_phrase
from gradtrace_analyzer.timing.buckets import BucketAnswer, BucketTimes, RankTotal
from gradtrace_analyzer.timing.clocks import HostClock
from gradtrace_analyzer.timing.reductions import Bucket
from gradtrace_analyzer.timing.steps import PARTS, RankSteps
from gradtrace_analyzer.timing.stragglers import (
    LEAVINGS,
    SMALLEST_LAG_NS,
    SMALLEST_SHARE_OF_STEP,
    Floor,
    Judgement,
    Onset,
    RankLag,
)

_MOST_RANKS = 8
_MOST_BUCKETS = 60
_MOST_GROUPS = 4
_MOST_MODULES = 2

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
                    *(_ms(ns) for ns in own.median_ns),
                    *(_ms(ns) for ns in own.total_ns),
                    _percent(own.recorder_share),
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
    """The same for a program."""
    return {
        "ranks": [dict(zip(STEP_COLUMNS, row, strict=True)) for row in step_rows(ranks)],
        "headlines": [] if answer is None else headlines(answer),
    }


def headlines(answer: BucketAnswer) -> list[str]:
    """Two sentences or so: the straggler of the group where one costs most, and what is exposed."""
    costly = sorted(
        answer.judgements, key=lambda j: (j.straggler is None, -j.worst_ns, j.team.number)
    )
    first = [_judgement_text(answer, costly[0])] if costly else []
    return [*first, *_exposed_text(answer.totals)]


def bucket_lines(answer: BucketAnswer) -> Iterator[str]:
    """The straggler of each group, then lags, buckets and totals, last what is missing."""
    yield from _judgement_texts(answer)
    yield from _exposed_text(answer.totals)
    yield from map(_clock_text, answer.clocks)
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
    """The same for a program. What does not apply is null."""
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
        "explanation": " ".join([*_judgement_texts(answer), *_exposed_text(answer.totals)]),
    }


def _judgement_object(answer: BucketAnswer, judgement: Judgement) -> dict[str, Any]:
    straggler = judgement.straggler
    return {
        "group": judgement.team.group,
        "ranks": judgement.team.ranks,
        "missing_ranks": judgement.team.missing_ranks,
        "reduction_count": judgement.reduction_count,
        "pass_count": judgement.pass_count,
        "worst_lag_ns": judgement.worst_ns,
        "floor_ns": judgement.floor.ns,
        "leaving_ns": judgement.floor.leaving_ns,
        "straggler": None if straggler is None else straggler.rank,
        "also_late": None if straggler is None else straggler.also_late,
        "onset": None if straggler is None else _onset_object(straggler.onset),
        "reason": judgement.reason,
        "lags": [asdict(lag) for lag in judgement.lags],
        "explanation": _judgement_text(answer, judgement),
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


def _judgement_texts(answer: BucketAnswer) -> Iterator[str]:
    """Groups with a straggler all; of the others a few."""
    yield from (_judgement_text(answer, j) for j in answer.judgements if j.straggler is not None)
    others = [j for j in answer.judgements if j.straggler is None]
    yield from (_judgement_text(answer, j) for j in others[:_MOST_GROUPS])
    if len(others) > _MOST_GROUPS:
        more = counted(len(others) - _MOST_GROUPS, "other group")
        yield f"No straggler in {more} (--format json)."


def _judgement_text(answer: BucketAnswer, judgement: Judgement) -> str:
    if judgement.straggler is None:
        return _no_straggler_text(judgement)
    rank = judgement.straggler.rank
    lag = next(lag for lag in judgement.lags if lag.rank == rank)
    said = [
        f"Rank {rank} launches last in {lag.late_count:,} of "
        f"{counted(judgement.reduction_count, 'reduction')} of {_group(judgement)}, "
        f"{_ms(lag.median_late_ns)} after the first rank (median; largest {_ms(lag.largest_late_ns)}).",
        _onset_text(judgement.straggler.onset),
        *_waiting_text(answer.waiting_for(judgement.team, rank)),
    ]
    also = judgement.straggler.also_late
    if also:
        said.append(
            f"{upper_first(ranks_phrase(also))} {'is' if len(also) == 1 else 'are'} late as well."
        )
    return " ".join(said)


def _onset_text(onset: Onset) -> str:
    if onset.place == "begin":
        return (
            f"It enters the backward pass {_ms(onset.growth_ns)} after the first rank already: "
            "look at what comes before, its data and its forward."
        )
    if onset.place == "gradual":
        return (
            f"It falls behind little by little, by {_ms(onset.lag_ns)} in a pass, and is late from "
            f"{_bucket_phrase(onset.bucket)} on: it computes more slowly everywhere, or has more to compute."
        )
    before = (
        "the start of the backward pass"
        if onset.previous is None
        else _bucket_phrase(onset.previous)
    )
    where = f"It falls behind between {before} and {_bucket_phrase(onset.bucket)}: "
    node = onset.node
    modules = listed([module_phrase(fqn) for fqn in onset.bucket.modules], _MOST_MODULES)
    if node is None:
        return f"{where}look at the backward of {modules}, and of what runs between the two."
    return (
        f"{where}look at the backward of {modules} and at {node.node_name} of "
        f"{module_phrase(node.module_fqn)}, which takes {_ms(node.own_ns)}, against "
        f"{_ms(node.other_ns)} on rank {node.other_rank} (step {node.step})."
    )


def _waiting_text(waiting: Sequence[RankTotal]) -> Iterator[str]:
    if not waiting:
        return
    most = waiting[0]
    share = "" if most.waiting_share is None else f" ({_percent(most.waiting_share)} of its time)"
    if len(waiting) == 1:
        yield f"Rank {most.rank} waits for it {_ms(most.waiting_ns)} in a step{share}."
        return
    median = waiting[len(waiting) // 2]
    yield (
        f"The others wait for it {_ms(median.waiting_ns)} in a step (median of {len(waiting)} ranks; "
        f"most on rank {most.rank}, {_ms(most.waiting_ns)}{share})."
    )


def _no_straggler_text(judgement: Judgement) -> str:
    group, passes = _group(judgement), counted(judgement.pass_count, "backward passe")
    passes = (
        passes.replace("1 backward passe", "1 backward pass")
        if judgement.pass_count == 1
        else passes
    )
    worst, floor = _ms(judgement.worst_ns), judgement.floor
    if judgement.reason == "none":
        return f"Nothing to judge in {group}: no reduction of two recorded ranks could be paired."
    if judgement.reason == "small":
        return (
            f"No straggler in {group}: in a backward pass the last rank launches {worst} after the first "
            f"(largest lag of a pass, median of {passes}), and only beyond {_floor_text(floor)} it is judged."
            f"{_latest_text(judgement.lags)}"
        )
    latest = sorted(judgement.lags, key=lambda lag: (-lag.delaying_pass_count, lag.rank))
    if judgement.reason == "split":
        shown = [f"rank {own.rank} in {own.delaying_pass_count:,}" for own in latest[:3]]
        return (
            f"No straggler in {group}: the lags ({worst}, median) are split between ranks. "
            f"Of {passes} most delayed is {', '.join(shown)}."
        )
    if judgement.reason == "few":
        return (
            f"No straggler is named in {group}: {passes} is too few. In it rank {latest[0].rank} "
            f"launches {worst} after the first."
        )
    late = [lag.rank for lag in judgement.lags if lag.pass_lag_ns >= floor.ns]
    early = [lag.rank for lag in judgement.lags if lag.rank not in late]
    ahead = (
        f": {ranks_phrase(early)} launch{'es' if len(early) == 1 else ''} ahead" if early else ""
    )
    return (
        f"No straggler in {group}: {len(late)} of {len(judgement.lags)} ranks are late, "
        f"by {worst} (median){ahead}."
    )


def _latest_text(lags: Sequence[RankLag]) -> str:
    """The largest lag, where it is beyond the floor though lags usually are not."""
    latest = max(lags, key=lambda lag: lag.largest_late_ns or 0)
    if latest.largest_late_ns is None:
        return ""
    return f" Once it was {_ms(latest.largest_late_ns)} (rank {latest.rank}, step {latest.largest_step})."


def _floor_text(floor: Floor) -> str:
    """The floor and where it comes from."""
    if floor.ns == SMALLEST_LAG_NS:
        return _ms(SMALLEST_LAG_NS)
    if LEAVINGS * floor.leaving_ns >= floor.step_ns_needed:
        return (
            f"{_ms(floor.ns)} ({LEAVINGS} times the {_ms(floor.leaving_ns)} that lie between ranks "
            "as they leave the same reduction)"
        )
    return (
        f"{_ms(floor.ns)} ({SMALLEST_SHARE_OF_STEP:.0%} of the median step, {_ms(floor.step_ns)})"
    )


def _exposed_text(totals: Sequence[RankTotal]) -> Iterator[str]:
    if not totals:
        return
    most = max(totals, key=lambda total: (total.exposed_ns, -total.rank))
    share = "" if most.exposed_share is None else f" ({_percent(most.exposed_share)} of its time)"
    yield (
        f"Reductions that no computing hides take {_ms(most.exposed_ns)} in a step of rank {most.rank}{share}, "
        f"the most of {counted(len(totals), 'rank')}; {_ms(most.waiting_ns)} of that is waiting for the last rank."
    )


def _clock_text(clock: HostClock) -> str:
    return (
        f"The clock of {clock.host} was laid over that of {clock.reference} by the moments at which they "
        f"left {counted(clock.reduction_count, 'reduction')}; half of these lie within {_ms(clock.spread_ns)}."
    )


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
                _ms(lag.median_late_ns),
                _ms(lag.largest_late_ns),
                _ms(lag.pass_lag_ns),
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
    columns = (
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
        [_bucket_row(times) for times in answer.buckets[:_MOST_BUCKETS]],
        right=(*columns[1:3], *columns[4:]),
    )
    yield from _more(len(answer.buckets[_MOST_BUCKETS:]), "bucket")


def _bucket_row(times: BucketTimes) -> tuple[Any, ...]:
    bucket, waits = times.bucket, times.longest_wait
    wait = f"{_ms(waits.wait_ns)} (rank {waits.rank})" if waits.wait_ns else _ms(0)
    return (
        bucket.group,
        "" if bucket.layout_index is None else str(bucket.layout_index),
        str(bucket.bucket_index),
        _parameters(bucket),
        bytes_text(bucket.size_bytes),
        f"{times.reduction_count:,}",
        _ms(times.ready_to_launch_ns),
        wait,
        _ms(times.transport_ns),
        _percent(times.hidden_share),
        _ms(times.exposed_ns),
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
                _parameters(other.bucket),
                bytes_text(other.bucket.size_bytes),
                other.rank_count,
                other.launch_count,
                _ms(other.own_ns),
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
                _ms(total.exposed_ns),
                _ms(total.waiting_ns),
                _percent(total.exposed_share),
                _ms(total.largest_ns),
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


def _group(judgement: Judgement) -> str:
    return f"group {judgement.team.group}"


def _bucket_phrase(bucket: Bucket) -> str:
    return f"bucket {bucket.bucket_index} ({_parameters(bucket)})"


def _parameters(bucket: Bucket) -> str:
    first = next(iter(bucket.parameter_fqns), "no parameter")
    more = bucket.parameter_count - 1
    return f"{first} and {more:,} more" if more > 0 else first


def _ms(ns: float | None) -> str:
    """Milliseconds with as many digits as a person reads."""
    if ns is None:
        return "-"
    ms = ns / 1e6
    if ms >= 10_000:
        return f"{ms / 1000:,.1f} s"
    return f"{ms:.1f} ms" if ms >= 10 else f"{ms:.2f} ms"


def _percent(share: float | None) -> str:
    if share is None:
        return "-"
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{share:.1%}"
