"""What got slower or faster between two runs: places, judged against the spread within the runs over steps.

With 8 steps or more in each run a rank test decides (Mann and Whitney; chance below one in a thousand, since many
places are asked about), and the medians must be 5% apart. With fewer, the medians must lie three times further apart
than the steps of either run among themselves, so that no step of one lies among the other's. With fewer than 3 nothing
is said.
What makes less than a hundredth of a step, or of a tenth of a millisecond, is not worth a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import erfc, sqrt
from statistics import median
from typing import Literal

from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.sql.views import connect
from gradtrace_analyzer.timing.series import RunSeries, Samples, TimedPlace, What, run_series

FEWEST_STEPS = 3
SURE_STEPS = 8
CHANCE = 0.001
SMALLEST_RATIO = 0.05
SMALLEST_NS = 100_000
SMALLEST_SHARE_OF_STEP = 0.01
RANGES = 3
_MAIN_SHARE = 0.5
_COMMON_PLACES = 6
_COMMON_SHARE = 0.8
_COMMON_RATIO = 1.1

TimeVerdict = Literal["slower", "faster", "same", "no_verdict"]
# What is a reason in itself; the others wait for it, or hold it.
CAUSES: tuple[What, ...] = (
    "stage",
    "transfer",
    "module",
    "node",
    "optimizer",
    "bucket_transport",
    "between",
)


@dataclass(frozen=True)
class TimeChange:
    """A place in both runs: medians over steps. `spread_ns` is the larger of the two runs' own.

    The spread is 1.5 times the median distance from the median (a standard deviation, where times were normal); of
    fewer than 8 steps, the whole range. `per_step` is how often the time counts in a step. `ranks` are those that
    changed so, `place.rank` the one that changed most.
    """

    place: TimedPlace
    baseline_ns: int
    candidate_ns: int
    spread_ns: int
    baseline_count: int
    candidate_count: int
    per_step: float
    verdict: TimeVerdict
    ranks: tuple[int, ...] = ()

    @property
    def difference_ns(self) -> int:
        """By how much longer the candidate takes each time; negative where it is faster."""
        return self.candidate_ns - self.baseline_ns

    @property
    def step_difference_ns(self) -> float:
        """By how much longer the candidate takes in a whole step."""
        return self.difference_ns * self.per_step

    @property
    def is_cause(self) -> bool:
        """Whether it is a place that takes time itself, rather than one that waits or holds others."""
        return self.place.what in CAUSES


@dataclass(frozen=True)
class Slowdown:
    """A cause, with the Node or module inside it that explains at least half of it."""

    change: TimeChange
    inside: TimeChange | None


@dataclass(frozen=True)
class Compared:
    """Two runs' times. `changes` have the largest difference in a step first; `step` is the whole step's.

    `slower` and `faster` are the causes among them, none of which lies in another. `common_ratio` is set where nearly
    every place changed by about that factor. `unpaired` counts places that one run alone has.
    """

    baseline: RunSeries
    candidate: RunSeries
    changes: tuple[TimeChange, ...]
    step: TimeChange | None
    slower: tuple[Slowdown, ...]
    faster: tuple[Slowdown, ...]
    common_ratio: float | None
    unpaired: int

    @property
    def verdict(self) -> Literal["slower", "faster", "mixed", "same", "no_verdict"]:
        """Over all places; where some are slower and some faster, the whole step decides, if it changed."""
        verdicts = {change.verdict for change in self.changes}
        if {"slower", "faster"} <= verdicts:
            whole = "same" if self.step is None else self.step.verdict
            return whole if whole in ("slower", "faster") else "mixed"
        found: tuple[TimeVerdict, ...] = ("slower", "faster", "same")
        return next((verdict for verdict in found if verdict in verdicts), "no_verdict")


def compared_runs(baseline: Run, candidate: Run) -> Compared:
    """The times of two runs, each read by itself, on a connection of its own. See `compared_times`."""
    series = []
    for run in (baseline, candidate):
        with connect([run]) as connection:
            series.append(run_series(connection))
    return compared_times(*series)


def compared_times(baseline: RunSeries, candidate: RunSeries) -> Compared:
    """The places that both runs have, each judged against the spread of its own samples."""
    whole = baseline.places.get(TimedPlace("step"))
    floor = max(
        SMALLEST_NS, SMALLEST_SHARE_OF_STEP * median(whole.values) if whole is not None else 0
    )
    both = [place for place in baseline.places if place in candidate.places]
    judged = [
        _change(place, baseline.places[place], candidate.places[place], floor) for place in both
    ]
    changes = sorted(
        _by_rank(judged), key=lambda change: (-abs(change.step_difference_ns), str(change.place))
    )
    unpaired = len(baseline.places) + len(candidate.places) - 2 * len(both)
    return Compared(
        baseline,
        candidate,
        tuple(changes),
        next((change for change in changes if change.place.what == "step"), None),
        tuple(_causes(changes, "slower")),
        tuple(_causes(changes, "faster")),
        _common_ratio(judged, floor),
        unpaired,
    )


def _change(place: TimedPlace, before: Samples, after: Samples, floor_ns: float) -> TimeChange:
    a, b = before.values, after.values
    is_few = min(len(a), len(b)) < SURE_STEPS
    spread = max(map(_range if is_few else _deviation, (a, b)))
    difference = median(b) - median(a)
    per_step = max(before.per_step, after.per_step)
    verdict: TimeVerdict = "same"
    if min(len(a), len(b)) < FEWEST_STEPS:
        verdict = "no_verdict"
    elif abs(difference) * per_step >= floor_ns and abs(difference) >= SMALLEST_RATIO * median(a):
        is_sure = abs(difference) >= RANGES * spread if is_few else _chance(a, b) < CHANCE
        if is_sure:
            verdict = "slower" if difference > 0 else "faster"
    ranks = () if place.rank is None else (place.rank,)
    return TimeChange(
        place, round(median(a)), round(median(b)), round(spread), len(a), len(b), per_step, verdict, ranks
    )  # fmt: skip


def _deviation(values: Sequence[float]) -> float:
    middle = median(values)
    return 1.4826 * median(abs(value - middle) for value in values)


def _range(values: Sequence[float]) -> float:
    return max(values) - min(values)


def _chance(a: Sequence[float], b: Sequence[float]) -> float:
    """How likely two samples of one distribution lie so far apart in rank, or further: Mann and Whitney, both sides."""
    ordered = sorted([(value, 0) for value in a] + [(value, 1) for value in b])
    ranks, ties = 0.0, 0.0
    at = 0
    while at < len(ordered):
        end = at
        while end < len(ordered) and ordered[end][0] == ordered[at][0]:
            end += 1
        shared = (at + 1 + end) / 2
        ranks += shared * sum(side for _, side in ordered[at:end])
        ties += (end - at) ** 3 - (end - at)
        at = end
    n, m = len(a), len(b)
    u = ranks - m * (m + 1) / 2
    total = n + m
    variance = n * m / 12 * (total + 1 - ties / (total * (total - 1)))
    if variance <= 0:
        return 1.0
    z = max(0.0, abs(u - n * m / 2) - 0.5) / sqrt(variance)
    return erfc(z / sqrt(2))


def _by_rank(changes: Iterable[TimeChange]) -> list[TimeChange]:
    """One change for the same place on several ranks: that of the rank that changed most, of those of one verdict."""
    grouped: dict[tuple[TimedPlace, TimeVerdict], list[TimeChange]] = {}
    for change in changes:
        place = change.place
        anywhere = TimedPlace(
            place.what, None, place.stage_index, place.kind, place.other_stage, place.root, place.module_fqn, place.name
        )  # fmt: skip
        grouped.setdefault((anywhere, change.verdict), []).append(change)
    found = []
    for (anywhere, verdict), of_place in grouped.items():
        if verdict in ("same", "no_verdict") and any(
            (anywhere, other) in grouped for other in ("slower", "faster")
        ):
            continue  # it is told of the ranks that did change
        # Of ranks that changed equally much, the lowest: rows come in any order.
        most = max(of_place, key=lambda c: (abs(c.difference_ns), [-rank for rank in c.ranks]))
        ranks = sorted(rank for change in of_place for rank in change.ranks)
        found.append(TimeChange(**{**vars(most), "ranks": tuple(ranks)}))
    return found


def _causes(changes: Sequence[TimeChange], verdict: TimeVerdict) -> Iterable[Slowdown]:
    """The causes of that verdict, largest first, a stage's Nodes and modules within its action."""
    found = [change for change in changes if change.verdict == verdict and change.is_cause]
    staged = {(c.place.stage_index, c.place.kind) for c in found if c.place.what == "stage"}
    for change in found:
        place = change.place
        key = (place.stage_index, place.kind)
        if place.what == "stage":
            inside = [
                c
                for c in found
                if c.place.what in ("module", "node") and (c.place.stage_index, c.place.kind) == key
            ]
            yield Slowdown(change, _explaining(change, inside))
        elif place.stage_index is None or place.what == "transfer" or key not in staged:
            yield Slowdown(change, None)


def _explaining(change: TimeChange, inside: Sequence[TimeChange]) -> TimeChange | None:
    most = max(inside, key=lambda c: abs(c.difference_ns), default=None)
    if most is None or abs(most.difference_ns) < _MAIN_SHARE * abs(change.difference_ns):
        return None
    return most


def _common_ratio(changes: Sequence[TimeChange], floor_ns: float) -> float | None:
    """The median ratio, where nearly all places that take time of their own changed in the same direction."""
    ratios = [
        change.candidate_ns / change.baseline_ns
        for change in changes
        if change.place.what in ("stage", "module", "node", "optimizer")
        and change.baseline_ns * change.per_step >= floor_ns
        and change.verdict != "no_verdict"
    ]
    if len(ratios) < _COMMON_PLACES:
        return None
    middle = median(ratios)
    slower = sum(ratio >= _COMMON_RATIO for ratio in ratios)
    faster = sum(ratio <= 1 / _COMMON_RATIO for ratio in ratios)
    return middle if max(slower, faster) >= _COMMON_SHARE * len(ratios) else None
