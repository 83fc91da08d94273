"""Whether a reduced bucket is the mean of what went in, and what would explain that it is not: pure arithmetic.

Everything is linear, so it is done on sketches: vectors of a few lanes that stand for the whole bucket. Where there
are only norms, a single lane stands for it: the sum over the square root of the element count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Lanes = npt.NDArray[np.float64]
CauseKind = Literal["factor", "contribution", "unreduced", "share", "subset", "unexplained"]

_SLACK = 4  # a cause has to fit within this many tolerances
_MOST_SOLVED = 12  # ranks whose weights can be told from the lanes of a sketch


@dataclass(frozen=True)
class DeviationCause:
    """Why a bucket is not the mean.

    `factor` of the mean (factor), or of one rank's contribution beyond what it should be (contribution), whose
    group rank `contributor` is; the mean of the group ranks in `subset` alone (subset). `relative_error` is the
    deviation over the mean, or over the scale where the mean is zero.
    """

    kind: CauseKind
    relative_error: float
    factor: float | None = None
    contributor: int | None = None
    subset: tuple[int, ...] = ()


def scales(before_norms: Lanes, after_norms: Lanes, counts: npt.NDArray[Any]) -> Lanes:
    """What deviations are relative to, for each row: the mean norm of what went in, or what came out if larger.

    Rows of one reduction lie together, `counts` of them each.
    """
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    means = np.add.reduceat(before_norms, starts) / counts
    larger: Lanes = np.maximum(np.repeat(means, counts), after_norms)
    return larger


def means(before: Lanes, divisors: Lanes, counts: npt.NDArray[Any]) -> Lanes:
    """The mean of each reduction, one line per row."""
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    sums = np.add.reduceat(before, starts, axis=0)
    lines: Lanes = np.repeat(sums, counts, axis=0) / divisors[:, None]
    return lines


def deviation_cause(
    before: Lanes, after: Lanes, divisor: float, own: int, slack: float, differs: bool
) -> DeviationCause:
    """What explains that group rank `own` came out with `after`.

    `before` has a line per rank; `slack` is the deviation that is allowed. `differs`: other ranks came out with
    something else, so that a bucket never reduced is likelier than a contribution that all lack.
    """
    mean = before.sum(axis=0) / divisor
    deviation = after - mean
    room = _SLACK * slack
    size = float(np.linalg.norm(deviation) / (np.linalg.norm(mean) or np.linalg.norm(after) or 1.0))
    for kind in ("factor", "own", "contribution") if differs else ("factor", "contribution", "own"):
        found: DeviationCause | None
        if kind == "factor":
            found = _factor(mean, after, room, size)
        elif kind == "own":
            found = _own(before[own], after, divisor, room, size)
        else:
            found = _contribution(before, deviation, divisor, room, size)
        if found is not None:
            return found
    return _subset(before, after, own, room, size) or DeviationCause("unexplained", size)


def _factor(mean: Lanes, after: Lanes, room: float, size: float) -> DeviationCause | None:
    square = float(mean @ mean)
    if square == 0:
        return None
    factor = float(after @ mean) / square
    if np.linalg.norm(after - factor * mean) > room * max(1.0, abs(factor)):
        return None
    if len(mean) == 1 and not _is_round(factor):
        return None  # one number is always a multiple of another
    return DeviationCause("factor", size, factor)


def _is_round(factor: float) -> bool:
    whole = factor if abs(factor) >= 1 else 1 / factor if factor else 0.0
    return abs(whole) < 1e6 and abs(whole - round(whole)) < 1e-4


def _own(
    own: Lanes, after: Lanes, divisor: float, room: float, size: float
) -> DeviationCause | None:
    if np.linalg.norm(after - own) <= room:
        return DeviationCause("unreduced", size)
    if np.linalg.norm(after - own / divisor) <= room:
        return DeviationCause("share", size)
    return None


def _contribution(
    before: Lanes, deviation: Lanes, divisor: float, room: float, size: float
) -> DeviationCause | None:
    if before.shape[1] == 1:
        return None  # any rank's would fit
    squares = np.einsum("rl,rl->r", before, before)
    usable = squares > 0
    factors = np.where(usable, divisor * (before @ deviation) / np.where(usable, squares, 1), 0.0)
    residuals = np.linalg.norm(deviation - factors[:, None] * before / divisor, axis=1)
    residuals = np.where(usable, residuals, np.inf)
    best = int(np.argmin(residuals))
    if residuals[best] > room:
        return None
    return DeviationCause("contribution", size, float(factors[best]), best)


def _subset(
    before: Lanes, after: Lanes, own: int, room: float, size: float
) -> DeviationCause | None:
    if before.shape[1] == 1:
        return None  # one number fits anything
    for chosen in _candidates(before, after, own):
        if np.linalg.norm(after - before[list(chosen)].mean(axis=0)) <= room:
            return DeviationCause("subset", size, subset=chosen)
    return None


def _candidates(before: Lanes, after: Lanes, own: int) -> Iterator[tuple[int, ...]]:
    """Sets of ranks over which a rank may have reduced: solved for among few, else neighbours and strides."""
    size = len(before)
    if size <= _MOST_SOLVED:
        weights = np.linalg.lstsq(before.T, after, rcond=None)[0]
        chosen = tuple(int(rank) for rank in np.flatnonzero(weights > 0.5 / size))
        if 1 < len(chosen) < size:
            yield chosen
        return
    for width in (w for w in range(2, size) if size % w == 0):
        start = own - own % width
        yield tuple(range(start, start + width))
        yield tuple(range(own % width, size, width))
