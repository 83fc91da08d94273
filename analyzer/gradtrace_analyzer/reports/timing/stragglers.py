"""What `analyzer timing` says in sentences: who is waited for, where it falls behind, what nothing hides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gradtrace_analyzer.timing.buckets import BucketAnswer, RankTotal
from gradtrace_analyzer.timing.clocks import HostClock
from gradtrace_analyzer.timing.reductions import Bucket
from gradtrace_analyzer.timing.stragglers import (
    LEAVINGS,
    SMALLEST_SHARE_OF_STEP,
    SURE_PASSES,
    Floor,
    Onset,
    RankLag,
    StragglerJudgement,
)
from gradtrace_analyzer.words.nouns import bucket_name, listed, module_phrase, upper_first
from gradtrace_analyzer.words.numbers import counted, ms_text, percent_text, ranks_phrase, verb

_MOST_GROUPS = 4
_MOST_MODULES = 2


def headlines(answer: BucketAnswer) -> list[str]:
    """Two sentences or so: the straggler of the group where one costs most, and what is exposed."""
    costly = sorted(
        answer.judgements, key=lambda j: (j.straggler is None, -j.worst_ns, j.team.number)
    )
    first = [judgement_text(answer, costly[0])] if costly else []
    return [*first, *exposed_text(answer.totals)]


def judgement_texts(answer: BucketAnswer) -> Iterator[str]:
    """A text for each group: those with a straggler all, of the others four; the rest is counted."""
    yield from (judgement_text(answer, j) for j in answer.judgements if j.straggler is not None)
    others = [j for j in answer.judgements if j.straggler is None]
    yield from (judgement_text(answer, j) for j in others[:_MOST_GROUPS])
    if len(others) > _MOST_GROUPS:
        more = counted(len(others) - _MOST_GROUPS, "other group")
        yield f"No straggler in {more} (--format json)."


def judgement_text(answer: BucketAnswer, judgement: StragglerJudgement) -> str:
    """The straggler of a group, or why none is named."""
    if judgement.straggler is None:
        return _no_straggler_text(judgement)
    rank = judgement.straggler.rank
    lag = next(lag for lag in judgement.lags if lag.rank == rank)
    said = [
        f"Rank {rank} launches last in {lag.late_count:,} of "
        f"{counted(judgement.reduction_count, 'reduction')} of {_group(judgement)}, "
        f"{ms_text(lag.median_late_ns)} after the first rank (median; largest {ms_text(lag.largest_late_ns)}).",
        _onset_text(judgement.straggler.onset),
        *_waiting_text(answer.waiting_for(judgement.team, rank)),
    ]
    also = judgement.straggler.also_late
    if also:
        said.append(f"{upper_first(ranks_phrase(also))} {verb(also, 'is', 'are')} late as well.")
    return " ".join(said)


def _onset_text(onset: Onset) -> str:
    if onset.place == "begin":
        return (
            f"It enters the backward pass {ms_text(onset.growth_ns)} after the first rank already: "
            "look at what comes before, its data and its forward."
        )
    if onset.place == "gradual":
        return (
            f"It falls behind little by little, by {ms_text(onset.lag_ns)} in a pass, and is late from "
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
        f"{module_phrase(node.module_fqn)}, which takes {ms_text(node.own_ns)}, against "
        f"{ms_text(node.other_ns)} on rank {node.other_rank} (step {node.step})."
    )


def _waiting_text(waiting: Sequence[RankTotal]) -> Iterator[str]:
    if not waiting:
        return
    most = waiting[0]
    share = (
        "" if most.waiting_share is None else f", {percent_text(most.waiting_share)} of its time"
    )
    if len(waiting) == 1:
        yield f"Rank {most.rank} waits for it {ms_text(most.waiting_ns)} in a step{share}."
        return
    median = waiting[len(waiting) // 2]
    yield (
        f"The others wait for it {ms_text(median.waiting_ns)} in a step (median of {len(waiting)} ranks; "
        f"most on rank {most.rank}: {ms_text(most.waiting_ns)}{share})."
    )


def _no_straggler_text(judgement: StragglerJudgement) -> str:
    group = _group(judgement)
    passes = counted(judgement.pass_count, "backward pass")
    worst, floor = ms_text(judgement.worst_ns), judgement.floor
    if judgement.reason == "none":
        return f"Nothing to judge in {group}: no reduction of two recorded ranks could be paired."
    if judgement.reason == "small":
        return (
            f"No straggler in {group}: the last rank launches {worst} after the first (largest lag in a pass, "
            f"median of {passes}); only beyond {_floor_text(floor)} is one named."
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
    ahead = f": {ranks_phrase(early)} {verb(early, 'launches', 'launch')} ahead" if early else ""
    return (
        f"No straggler in {group}: {len(late)} of {len(judgement.lags)} ranks are late, "
        f"by {worst} (median){ahead}."
    )


def _latest_text(lags: Sequence[RankLag]) -> str:
    """Which rank most often delays a pass beyond the floor, though not usually; nothing where none does."""
    latest = max(lags, key=lambda lag: (lag.delaying_pass_count, -lag.rank))
    if latest.largest_late_ns is None:
        return ""
    return (
        f" Beyond it: rank {latest.rank} in {latest.delaying_pass_count:,} of "
        f"{latest.pass_count:,} passes (largest {ms_text(latest.largest_late_ns)}, step {latest.largest_step})."
    )


def _floor_text(floor: Floor) -> str:
    """The floor, and where it comes from: `1.00 ms (less is not worth a word)`."""
    why = {
        "smallest": "less is not worth a word",
        "step": f"{SMALLEST_SHARE_OF_STEP:.0%} of the median step, {ms_text(floor.step_ns)}",
        "leaving": f"{LEAVINGS} times the {ms_text(floor.leaving_ns)} between ranks as they leave the same reduction",
        "few": f"in fewer than {SURE_PASSES} passes less may be chance",
    }
    return f"{ms_text(floor.ns)} ({why[floor.reason]})"


def exposed_text(totals: Sequence[RankTotal]) -> Iterator[str]:
    """What of a step nothing hides, on the rank with most; nothing where it was not seen."""
    if not totals:
        return
    most = max(totals, key=lambda total: (total.exposed_ns, -total.rank))
    share = (
        "" if most.exposed_share is None else f" ({percent_text(most.exposed_share)} of its time)"
    )
    yield (
        f"Reductions that no computing hides take {ms_text(most.exposed_ns)} in a step of rank {most.rank}{share}, "
        f"the most of {counted(len(totals), 'rank')}; {ms_text(most.waiting_ns)} of that is waiting for the last rank."
    )


def host_clock_text(clock: HostClock) -> str:
    """That two hosts' clocks were laid over each other, and how well."""
    return (
        f"The clock of {clock.host} was laid over that of {clock.reference} by the moments at which they "
        f"left {counted(clock.reduction_count, 'reduction')}; half of these lie within {ms_text(clock.spread_ns)}."
    )


def parameters_text(bucket: Bucket) -> str:
    """A bucket's first parameter and how many more it holds: `head.weight and 3 more`."""
    first = next(iter(bucket.parameter_fqns), "no parameter")
    more = bucket.parameter_count - 1
    return f"{first} and {more:,} more" if more > 0 else first


def _group(judgement: StragglerJudgement) -> str:
    return f"group {judgement.team.group}"


def _bucket_phrase(bucket: Bucket) -> str:
    return bucket_name(bucket.bucket_index, parameters_text(bucket))
