"""The answer of `analyzer timing --buckets`: who is waited for, what each bucket costs, what of it is exposed.

Definitions, for one rank's part in a reduction, from the columns of `buckets`:
- *ready to launch*: `launched_ns - ready_ns`, from the bucket's first gradient to its launch;
- *wait*: from its own launch until the last rank launches;
- *own time*: `done_ns - launched_ns`; that of the last rank to launch is the *transport*, nobody is waited for in it;
- *end of computing*: the largest `launched_ns` of the rank's backward pass (`backward_passes.end_ns` is no such
  moment: it comes after the reductions);
- *hidden share*: the part of `launched_ns..done_ns` before the end of computing;
- *exposed*: the part after it. For a whole pass it is counted once, until the last reduction is done, however many
  overlap; and *waiting* is what of that lies before the last rank's last launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import duckdb

from gradtrace_analyzer.timing.clocks import HostClock
from gradtrace_analyzer.timing.reductions import Bucket, Team, count, paired_reductions
from gradtrace_analyzer.timing.slices import Steps
from gradtrace_analyzer.timing.steps import median_step_ns
from gradtrace_analyzer.timing.stragglers import StragglerJudgement, judgements


@dataclass(frozen=True)
class RankBucket:
    """A rank's part in a bucket's reductions: medians, and None where a time was never seen."""

    rank: int
    launch_count: int
    wait_ns: int
    own_ns: int | None
    ready_to_launch_ns: int | None
    hidden_share: float | None
    exposed_ns: int | None


@dataclass(frozen=True)
class BucketTimes:
    """What a bucket costs. `hidden_share` is over all ranks' time in it together."""

    bucket: Bucket
    reduction_count: int
    transport_ns: int | None
    ready_to_launch_ns: int | None
    hidden_share: float | None
    ranks: tuple[RankBucket, ...]

    @property
    def longest_wait(self) -> RankBucket:
        """The rank whose median wait for the others' launches is longest."""
        return max(self.ranks, key=lambda own: own.wait_ns)

    @property
    def exposed_ns(self) -> int | None:
        """The longest exposed time of a rank: what of the reduction no computing hid. None where it was never seen."""
        return max((r.exposed_ns for r in self.ranks if r.exposed_ns is not None), default=None)


@dataclass(frozen=True)
class OtherBucket:
    """A bucket that no answer above is about: of another kind, launched `launch_count` times on all ranks."""

    kind: str
    bucket: Bucket
    rank_count: int
    launch_count: int
    own_ns: int | None
    ready_to_launch_ns: int | None


@dataclass(frozen=True)
class RankTotal:
    """Exposed time of a rank in the steps in which it reduced: medians and the largest; share of those steps.

    `waiting_ns` is the median of what of it was waiting for the last rank. The share is None where no such step
    was closed.
    """

    rank: int
    step_count: int
    exposed_ns: int
    largest_ns: int
    largest_step: int
    waiting_ns: int
    exposed_share: float | None
    waiting_share: float | None


@dataclass(frozen=True)
class BucketAnswer:
    """What is told of a run's reductions: of each group, each bucket and each rank.

    `step_ns` is the median step over all ranks, None where none was closed; `others` are the buckets that were not
    judged; `notes` say what is missing, a clause each.
    """

    step_ns: int | None
    judgements: tuple[StragglerJudgement, ...]
    buckets: tuple[BucketTimes, ...]
    others: tuple[OtherBucket, ...]
    totals: tuple[RankTotal, ...]
    clocks: tuple[HostClock, ...]
    notes: tuple[str, ...]

    def waiting_for(self, team: Team, rank: int) -> tuple[RankTotal, ...]:
        """The totals of the other ranks of a group, who waits most for the last rank first."""
        others = [t for t in self.totals if t.rank in team.recorded and t.rank != rank]
        return tuple(sorted(others, key=lambda total: (-total.waiting_ns, total.rank)))


_PARTS = """
CREATE TEMP TABLE shares AS
SELECT l.bucket, l.rank, l.pair, l.wait_ns, l.done_ns - l.launched_ns AS own_ns,
    l.launched_ns - l.ready_ns AS ready_to_launch_ns, greatest(l.done_ns - p.computed_ns, 0) AS exposed_ns,
    least(l.done_ns, p.computed_ns) - l.launched_ns AS hidden_ns
FROM launches l JOIN passes p ON p.pass = l.pass AND p.rank = l.rank AND p.step = l.step
    AND p.backward_index = l.backward_index
"""

_BY_BUCKET = """
SELECT s.bucket, count(DISTINCT s.pair), any_value(t.transport_ns), median(s.ready_to_launch_ns),
    CAST(sum(s.hidden_ns) AS DOUBLE) / nullif(sum(s.own_ns), 0)
FROM shares s JOIN (SELECT bucket, median(transport_ns) AS transport_ns FROM reductions GROUP BY bucket) t
    ON t.bucket = s.bucket
GROUP BY s.bucket ORDER BY s.bucket
"""

_BY_RANK = """
SELECT bucket, rank, count(*), median(wait_ns), median(own_ns), median(ready_to_launch_ns),
    CAST(sum(hidden_ns) AS DOUBLE) / nullif(sum(own_ns), 0), median(exposed_ns)
FROM shares GROUP BY bucket, rank ORDER BY bucket, rank
"""

_OTHERS = """
SELECT kind, bucket, count(DISTINCT rank), count(*), median(done_ns - launched_ns), median(launched_ns - ready_ns)
FROM bucket_rows WHERE kind <> 'all_reduce' GROUP BY kind, bucket ORDER BY kind, bucket
"""

_TOTALS = """
WITH ends AS (
    SELECT l.rank, l.step, l.backward_index, max(l.done_ns) AS done_ns, max(r.last_ns) AS last_ns
    FROM launches l JOIN reductions r ON r.pair = l.pair WHERE l.done_ns IS NOT NULL
    GROUP BY l.rank, l.step, l.backward_index),
computed AS (SELECT DISTINCT rank, step, backward_index, computed_ns FROM passes),
exposed AS (
    SELECT rank, step, greatest(done_ns - computed_ns, 0) AS exposed_ns,
        greatest(least(last_ns, done_ns) - computed_ns, 0) AS waiting_ns
    FROM ends JOIN computed USING (rank, step, backward_index)),
by_step AS (
    SELECT e.rank, e.step, sum(e.exposed_ns) AS exposed_ns, sum(e.waiting_ns) AS waiting_ns,
        min(s.end_ns - s.start_ns) AS step_ns
    FROM exposed e LEFT JOIN steps s ON s.rank = e.rank AND s.step = e.step GROUP BY e.rank, e.step)
SELECT rank, count(*), median(exposed_ns), max(exposed_ns), arg_max(step, (exposed_ns, -step)), median(waiting_ns),
    sum(exposed_ns) FILTER (step_ns IS NOT NULL) / CAST(sum(step_ns) AS DOUBLE),
    sum(waiting_ns) FILTER (step_ns IS NOT NULL) / CAST(sum(step_ns) AS DOUBLE)
FROM by_step GROUP BY rank ORDER BY rank
"""


def bucket_answer(connection: duckdb.DuckDBPyConnection, steps: Steps) -> BucketAnswer | None:
    """The answer for some steps of a run, None where no bucket of them was recorded."""
    if not count(connection, f"SELECT count(*) FROM buckets WHERE {steps.condition()}"):
        return None
    paired = paired_reductions(connection, steps)
    step_ns = median_step_ns(connection, steps)
    connection.execute(_PARTS)
    return BucketAnswer(
        step_ns=step_ns,
        judgements=judgements(paired, step_ns),
        buckets=_bucket_times(connection, paired.buckets),
        others=tuple(
            OtherBucket(kind, paired.buckets[number], ranks, launches, _whole(own), _whole(ready))
            for kind, number, ranks, launches, own, ready in connection.execute(_OTHERS).fetchall()
        ),
        totals=tuple(
            RankTotal(
                row[0], row[1], round(row[2]), int(row[3]), row[4], round(row[5]), row[6], row[7]
            )
            for row in connection.execute(_TOTALS).fetchall()
        ),
        clocks=paired.clocks,
        notes=paired.notes,
    )


def _bucket_times(
    connection: duckdb.DuckDBPyConnection, buckets: dict[int, Bucket]
) -> tuple[BucketTimes, ...]:
    ranks: dict[int, list[RankBucket]] = {}
    for number, rank, launches, wait, own, ready, hidden, exposed in connection.execute(
        _BY_RANK
    ).fetchall():
        ranks.setdefault(number, []).append(
            RankBucket(
                rank, launches, round(wait), _whole(own), _whole(ready), hidden, _whole(exposed)
            )
        )
    return tuple(
        BucketTimes(
            buckets[number],
            reductions,
            _whole(transport),
            _whole(ready),
            hidden,
            tuple(ranks[number]),
        )
        for number, reductions, transport, ready, hidden in connection.execute(
            _BY_BUCKET
        ).fetchall()
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
