"""Which rank the others wait for in a group's reductions, and where in the backward pass it falls behind.

A lag is how much later a rank launches a bucket than the first rank to launch it. Lags are judged by backward pass,
by the largest that a rank has in it: a rank that is late for the last of ten buckets alone costs as much as one that
is late for all ten. A rank is late when its lag is beyond the *floor*: 1 ms, 5% of the median step, or three times as
far apart as ranks leave the same reduction, whichever is most. The last is what the measurement itself is good for:
it holds what scheduling adds, and what is left when the clocks of hosts were laid over each other. In few passes one
rank is last by chance too, all the more since a process that takes its core away stays for several of them: there a
lag counts only beyond what schedulers take a core away for (seen on a busy machine: 12 ms in 4 passes out of 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import duckdb

from gradtrace_analyzer.timing.reductions import Bucket, Paired, Team

SMALLEST_LAG_NS = 1_000_000
SMALLEST_SHARE_OF_STEP = 0.05
LEAVINGS = 3
SURE_PASSES = 8  # the same of two ranks is last in all of them by chance once in 128 times
FEW_PASSES_LAG_NS = 25_000_000
_FEWEST_PASSES = 2
_MOST_ODD_PASSES = 0.5  # of those in which a straggler comes last


@dataclass(frozen=True)
class Floor:
    """What a lag is held against. `leaving_ns` is how far apart ranks leave, the median over backward passes."""

    step_ns: int | None
    leaving_ns: int
    pass_count: int

    @property
    def reasons(self) -> dict[Literal["smallest", "step", "leaving", "few"], int]:
        """The least lag, in nanoseconds, that counts for each reason."""
        return {
            "smallest": SMALLEST_LAG_NS,
            "step": round(SMALLEST_SHARE_OF_STEP * (self.step_ns or 0)),
            "leaving": LEAVINGS * self.leaving_ns,
            "few": FEW_PASSES_LAG_NS if self.pass_count < SURE_PASSES else 0,
        }

    @property
    def ns(self) -> int:
        """The least lag that counts: the most of what the reasons ask for."""
        return max(self.reasons.values())

    @property
    def reason(self) -> Literal["smallest", "step", "leaving", "few"]:
        """The reason that asks for most, which `ns` follows from."""
        return max(self.reasons, key=lambda reason: self.reasons[reason])


@dataclass(frozen=True)
class RankLag:
    """How a rank launches.

    `last_count` of the reductions it launches last, `late_count` of them beyond the floor; `median_late_ns` and
    `largest_late_ns` are over those. `pass_lag_ns` is the median over backward passes of its largest lag, and in
    `late_pass_count` of them that is beyond the floor; in `delaying_pass_count` no rank was later.
    """

    rank: int
    last_count: int
    late_count: int
    median_late_ns: int | None
    largest_late_ns: int | None
    largest_step: int | None
    pass_count: int
    pass_lag_ns: int
    late_pass_count: int
    delaying_pass_count: int


@dataclass(frozen=True)
class SlowNode:
    """The autograd Node that took so much longer on the late rank than on `other_rank`, in one backward pass."""

    node_name: str
    module_fqn: str | None
    step: int
    own_ns: int
    other_rank: int
    other_ns: int


@dataclass(frozen=True)
class Onset:
    """Where in a backward pass a rank falls behind.

    `begin`: before it, the rank enters it late. `bucket`: between the launches of `previous` (None: the start of the
    pass) and `bucket`. `gradual`: at no single place; `bucket` is the first at which it is late. `growth_ns` is what
    the lag grows there and `lag_ns` the largest lag of a pass, medians over the `pass_count` late passes.
    """

    place: Literal["begin", "bucket", "gradual"]
    bucket: Bucket
    previous: Bucket | None
    growth_ns: int
    lag_ns: int
    pass_count: int
    node: SlowNode | None = None


@dataclass(frozen=True)
class Straggler:
    """The rank that is waited for. `also_late` are others that are late as steadily, though less often last."""

    rank: int
    onset: Onset
    also_late: tuple[int, ...]


NoStraggler = Literal["small", "split", "most", "few", "none"]


@dataclass(frozen=True)
class StragglerJudgement:
    """A group's answer. Where `straggler` is None, `reason` says why.

    `small`: the lags are within the floor. `split`: different ranks come last. `most`: most ranks are late behind
    a few. `few`: there are too few backward passes. `none`: nothing was paired. `worst_ns` is the median over
    backward passes of the largest lag in it.
    """

    team: Team
    reduction_count: int
    pass_count: int
    worst_ns: int
    floor: Floor
    lags: tuple[RankLag, ...]
    straggler: Straggler | None
    reason: NoStraggler | None


_FLOORS = """
WITH by_pass AS (SELECT team, pass, max(leaving_ns) AS leaving_ns, max(lag_ns) AS lag_ns, count(*) AS reductions
    FROM reductions GROUP BY team, pass)
SELECT team, CAST(sum(reductions) AS BIGINT), count(*), coalesce(quantile_disc(leaving_ns, 0.5), 0),
    quantile_disc(lag_ns, 0.5)
FROM by_pass GROUP BY team
"""

_LAGS = """
WITH of_team AS (
    SELECT l.*, r.last_rank, r.step AS reduced_step FROM launches l JOIN reductions r ON r.pair = l.pair
    WHERE l.team = $team),
by_pass AS (
    SELECT rank, pass, max(lag_ns) AS lag_ns,
        row_number() OVER (PARTITION BY pass ORDER BY max(lag_ns) DESC, rank) = 1 AS is_worst
    FROM of_team GROUP BY rank, pass),
judged AS (
    SELECT rank, count(*) AS pass_count, quantile_disc(lag_ns, 0.5) AS pass_lag_ns,
        count(*) FILTER (lag_ns >= $floor) AS late_passes,
        count(*) FILTER (lag_ns >= $floor AND is_worst) AS delaying_passes
    FROM by_pass GROUP BY rank),
counted AS (
    SELECT rank, count(*) FILTER (last_rank = rank) AS last_count,
        count(*) FILTER (last_rank = rank AND lag_ns >= $floor) AS late_count,
        median(lag_ns) FILTER (last_rank = rank AND lag_ns >= $floor) AS median_ns,
        max(lag_ns) FILTER (last_rank = rank AND lag_ns >= $floor) AS largest_ns,
        arg_max(reduced_step, (lag_ns, -reduced_step)) FILTER (last_rank = rank AND lag_ns >= $floor) AS largest_step
    FROM of_team GROUP BY rank)
SELECT rank, last_count, late_count, CAST(round(median_ns) AS BIGINT), largest_ns, largest_step,
    pass_count, pass_lag_ns, late_passes, delaying_passes
FROM counted JOIN judged USING (rank) ORDER BY rank
"""

# The lag's growth from one bucket to the next, in the passes in which the rank is late.
_GROWTHS = """
CREATE OR REPLACE TEMP TABLE growths AS
WITH own AS (
    SELECT l.pass, r.position, l.bucket, l.lag_ns, l.launched_ns - l0.began_ns AS launched_ns, l.step,
        l.backward_index, b.layout_index
    FROM launches l JOIN reductions r ON r.pair = l.pair
        JOIN (SELECT c.rank, c.began_ns - o.offset_ns AS began_ns FROM clocks c JOIN offsets o ON o.host = c.host) l0
            ON l0.rank = l.rank
        JOIN (SELECT bucket, min(layout_index) AS layout_index FROM bucket_rows GROUP BY bucket) b
            ON b.bucket = l.bucket
    WHERE l.team = $team AND l.rank = $rank),
late AS (SELECT pass, max(lag_ns) AS pass_lag_ns, min(layout_index) AS layout_index
    FROM own GROUP BY pass HAVING max(lag_ns) >= $floor),
usual AS (SELECT layout_index FROM late GROUP BY layout_index ORDER BY count(*) DESC, layout_index DESC LIMIT 1)
SELECT o.pass, o.position, o.bucket, o.lag_ns, o.launched_ns, o.step, o.backward_index, late.pass_lag_ns,
    lag(o.bucket) OVER w AS previous, lag(o.launched_ns) OVER w AS previous_launched_ns,
    coalesce(p.begin_lag_ns, 0) AS begin_lag_ns,
    o.lag_ns - coalesce(lag(o.lag_ns) OVER w, p.begin_lag_ns, 0) AS growth_ns
FROM own o JOIN late ON late.pass = o.pass
    JOIN usual ON usual.layout_index IS NOT DISTINCT FROM late.layout_index
    LEFT JOIN passes p ON p.pass = o.pass AND p.rank = $rank AND p.step = o.step
        AND p.backward_index = o.backward_index
WINDOW w AS (PARTITION BY o.pass ORDER BY o.position)
"""

_LATE_PASSES = """
WITH by_pass AS (SELECT pass, min(begin_lag_ns) AS begin_lag_ns, min(pass_lag_ns) AS pass_lag_ns,
    arg_min(bucket, position) AS first_bucket, arg_min(bucket, position) FILTER (lag_ns >= $floor) AS late_bucket
    FROM growths GROUP BY pass)
SELECT count(*), median(begin_lag_ns), median(pass_lag_ns),
    (SELECT first_bucket FROM by_pass GROUP BY first_bucket ORDER BY count(*) DESC, first_bucket LIMIT 1),
    (SELECT late_bucket FROM by_pass GROUP BY late_bucket ORDER BY count(*) DESC, late_bucket LIMIT 1)
FROM by_pass
"""

_PLACES = """
SELECT bucket, previous, median(growth_ns) AS growth_ns FROM growths
GROUP BY bucket, previous HAVING 2 * count(*) >= $passes ORDER BY growth_ns DESC, min(position), bucket LIMIT 1
"""

# One pass stands for all: that whose growth is nearest to the median.
_SLOWEST_NODE = """
WITH chosen AS (
    SELECT * FROM growths WHERE bucket = $bucket AND previous IS NOT DISTINCT FROM $previous
    ORDER BY abs(growth_ns - $growth), pass LIMIT 1),
others AS (
    SELECT l.rank AS other_rank, l.step AS other_step, l.backward_index AS other_backward_index
    FROM launches l JOIN chosen c ON c.pass = l.pass AND c.bucket = l.bucket
    WHERE l.team = $team ORDER BY l.lag_ns, l.rank LIMIT 1),
own AS (
    SELECT n.* FROM node_events n JOIN chosen c ON n.step = c.step AND n.backward_index = c.backward_index
    WHERE n.rank = $rank AND n.start_ns < c.launched_ns AND n.end_ns > coalesce(c.previous_launched_ns, n.start_ns)),
compared AS (
    SELECT own.*, o.other_rank, n.end_ns - n.start_ns AS other_ns
    FROM own CROSS JOIN others o JOIN node_events n ON n.rank = o.other_rank AND n.step = o.other_step
        AND n.backward_index = o.other_backward_index AND n.node_name = own.node_name
        AND n.root IS NOT DISTINCT FROM own.root AND n.module_fqn IS NOT DISTINCT FROM own.module_fqn
        AND n.call_index IS NOT DISTINCT FROM own.call_index AND n.occurrence IS NOT DISTINCT FROM own.occurrence
        AND n.parameter_fqn IS NOT DISTINCT FROM own.parameter_fqn)
SELECT node_name, module_fqn, step, end_ns - start_ns, other_rank, other_ns FROM compared
ORDER BY end_ns - start_ns - other_ns DESC, event_index LIMIT 1
"""


def judgements(paired: Paired, step_ns: int | None) -> tuple[StragglerJudgement, ...]:
    """Of each group, its lags held against a floor that follows from the median step, `step_ns`, where it is known."""
    measured = {row[0]: row[1:] for row in paired.connection.execute(_FLOORS).fetchall()}
    return tuple(
        _judged(paired, team, step_ns, *measured.get(team.number, (0, 0, 0, 0)))
        for team in paired.teams
    )


def _judged(
    paired: Paired,
    team: Team,
    step_ns: int | None,
    reduction_count: int,
    pass_count: int,
    leaving_ns: int,
    worst_ns: int,
) -> StragglerJudgement:
    floor = Floor(step_ns, leaving_ns, pass_count)
    asked = {"team": team.number, "floor": floor.ns}
    lags = tuple(RankLag(*row) for row in paired.connection.execute(_LAGS, asked).fetchall())
    late = _late_ranks(lags, pass_count, floor.ns)
    straggler, reason = None, None
    if isinstance(late, str):
        # Of several that take turns, worst_ns is beyond the floor though none of them is.
        reason = "small" if late == "split" and worst_ns < floor.ns else late
    else:
        first, *others = late
        onset = _onset(paired, team.number, first.rank, floor.ns)
        straggler = Straggler(first.rank, onset, tuple(sorted(lag.rank for lag in others)))
    return StragglerJudgement(
        team, reduction_count, pass_count, worst_ns, floor, lags, straggler, reason
    )


def _late_ranks(
    lags: Sequence[RankLag], pass_count: int, floor_ns: int
) -> list[RankLag] | NoStraggler:
    """The ranks that are late in most backward passes, the one that is worst most often first."""
    if not lags:
        return "none"
    late = sorted(
        (lag for lag in lags if lag.pass_lag_ns >= floor_ns),
        key=lambda lag: (-lag.delaying_pass_count, -lag.pass_lag_ns, lag.rank),
    )
    if not late:
        return "split"
    if 2 * len(late) > len(lags):
        return "most"
    if pass_count < _FEWEST_PASSES:
        return "few"
    theirs = sum(lag.delaying_pass_count for lag in late)
    odd = max((lag.delaying_pass_count for lag in lags if lag not in late), default=0)
    return "split" if odd > _MOST_ODD_PASSES * theirs else late


def _onset(paired: Paired, team: int, rank: int, floor_ns: int) -> Onset:
    """Where the lag grows by at least half of the pass's largest, at the median of the late passes.

    Passes of one layout of buckets are looked at, that of most late passes: buckets of others have other contents.
    """
    connection = paired.connection
    asked = {"team": team, "rank": rank, "floor": floor_ns}
    connection.execute(_GROWTHS, asked)
    row = connection.execute(_LATE_PASSES, {"floor": floor_ns}).fetchone()
    assert row is not None  # a rank is only asked about that is late
    pass_count, begin_ns, lag_ns, first, late = row
    bucket, previous, growth_ns = _place(connection, pass_count) or (late, None, 0)
    known = paired.buckets
    if begin_ns >= max(growth_ns, lag_ns / 2):
        return Onset("begin", known[first], None, round(begin_ns), round(lag_ns), pass_count)
    if growth_ns < lag_ns / 2:
        return Onset("gradual", known[late], None, round(growth_ns), round(lag_ns), pass_count)
    node = _slow_node(connection, team, rank, bucket, previous, growth_ns)
    return Onset(
        "bucket",
        known[bucket],
        None if previous is None else known[previous],
        round(growth_ns),
        round(lag_ns),
        pass_count,
        node,
    )


def _place(
    connection: duckdb.DuckDBPyConnection, pass_count: int
) -> tuple[int, int | None, float] | None:
    row = connection.execute(_PLACES, {"passes": pass_count}).fetchone()
    return None if row is None else (row[0], row[1], row[2])


def _slow_node(
    connection: duckdb.DuckDBPyConnection,
    team: int,
    rank: int,
    bucket: int,
    previous: int | None,
    growth_ns: float,
) -> SlowNode | None:
    """The Node that explains at least half of the growth, None where none does or Nodes were not recorded."""
    asked = {
        "team": team,
        "rank": rank,
        "bucket": bucket,
        "previous": previous,
        "growth": growth_ns,
    }
    row = connection.execute(_SLOWEST_NODE, asked).fetchone()
    if row is None or row[3] - row[5] < growth_ns / 2:
        return None
    return SlowNode(*row)
