"""How far two summaries lie apart, and what multiple one is of the other: estimated from sketches, which are linear.

A sketch has a few lanes (`NODE_SKETCH_LANES` or `SKETCH_LANES`), each a sum over the tensor with random signs. The
distance of two sketches estimates that of their tensors (`tolerance.STANDARD_ERROR`), and a multiple of a tensor has
that multiple of its sketch. One summary is a mapping with the columns of a link table: `norm`, `sketch`, `nan_count`,
`inf_count` and `sum`; what is None was not recorded.

In SQL the same are the macros `relative_error`, `sketch_distance`, `least_squares_factor` and `on_node_lanes` of
sql/macros.sql. Python, numpy and DuckDB add up in other orders, so that the same quantity may differ in its last bit
from one to the other: each answer is computed in one of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gradtrace_analyzer.numerics.arrays import Array, Side, sketches_of
from gradtrace_schemas.table import NODE_SKETCH_LANES

# Two factors that sketches tell are the same within this share of each other.
SAME_FACTOR = 1e-3

# A factor is none this close to 1: float32's lanes would show it after rounding alone.
_NO_FACTOR = 1e-5

# What a factor leaves over must be this much smaller than what it explains. Another difference of the same size lies
# along the baseline this closely by chance about once in a thousand times with 4 lanes, and far more rarely with 16.
_LEFT_OVER = 0.05


def relative_error(
    a: Mapping[str, Any], b: Mapping[str, Any], *, from_sketches_alone: bool = False
) -> float | None:
    """|a - b| over the larger norm, of two summaries; None where their counts of NaN or of infinities differ.

    Estimated from sketches, where both have one of the same width. Else it is what norms and sums show, which is a
    lower bound (the macro `relative_error` takes norms alone there); 0.0 where both are zero. `from_sketches_alone`:
    None without such sketches, and where both are zero.
    """
    if any((a.get(s) or 0) != (b.get(s) or 0) for s in ("nan_count", "inf_count")):
        return None
    larger = max(a["norm"] or 0.0, b["norm"] or 0.0)
    s, t = a.get("sketch"), b.get("sketch")
    if larger and s and t and len(s) == len(t):
        return math.dist(s, t) / larger
    if from_sketches_alone:
        return None
    if not larger:
        return 0.0
    return float(max(abs(a["norm"] - b["norm"]), abs(a["sum"] - b["sum"])) / larger)


def relative_error_sql(a: str, b: str) -> str:
    """A call of the macro `relative_error` for two summaries whose columns begin with `a` and `b`: `b.output_`."""
    statistics = ("norm", "sketch", "nan_count", "inf_count")
    return f"relative_error({', '.join(f'{side}{s}' for s in statistics for side in (a, b))})"


def relative_errors(
    sides: Sequence[Side], where: npt.NDArray[np.bool_]
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """`relative_error` of each pair of rows from their sketches, 0.0 where both norms are zero.

    Also whether that is one: both have a sketch of the width that all have, or are not asked for (`where`). All counts
    of NaN and infinities are taken to be equal.
    """
    (a, has_a), (b, has_b) = (sketches_of(s.rows, f"{s.prefix}sketch") for s in sides)
    count = len(where)
    if a.shape[1] != b.shape[1]:
        return np.zeros(count), np.zeros(count, bool)
    larger = np.maximum(sides[0].norm, sides[1].norm)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.where(larger == 0, 0.0, distances(a, b) / larger)
    return error, np.asarray(has_a & has_b | ~where)


def distances(a: Array, b: Array) -> Array:
    """The Euclidean distance of each row of lanes to the same row of the other, in float64."""
    apart = np.subtract(a, b, dtype=np.float64)
    return np.asarray(np.sqrt(np.einsum("ij,ij->i", apart, apart)))


class Multiple(NamedTuple):
    """`factor` times a is the multiple of a that is closest to b; `left_over` is the norm of b without it, `norm` that
    of a."""

    factor: float
    left_over: float
    norm: float


def closest_multiple(a: Sequence[float], b: Sequence[float]) -> Multiple | None:
    """The least-squares fit of b along a, of as many lanes; None where a is zero or not finite."""
    square = sum(x * x for x in a)
    if square == 0 or not math.isfinite(square):
        return None
    factor = sum(x * y for x, y in zip(a, b, strict=True)) / square
    return Multiple(factor, math.dist(b, [factor * x for x in a]), math.sqrt(square))


def factor_between(
    a: Sequence[float] | None, b: Sequence[float] | None, *, most: float | None = None
) -> float | None:
    """f where b = f a within what their sketches tell, and f is not 1; None where it is no multiple.

    Factors of `most` or more, or of its inverse or less, are those of unrelated values.
    """
    if not a or not b or len(a) != len(b):
        return None
    found = closest_multiple(a, b)
    if found is None or (most is not None and not 1 / most < abs(found.factor) < most):
        return None
    away = abs(found.factor - 1)
    is_told = away > _NO_FACTOR and found.left_over / found.norm < _LEFT_OVER * away
    return found.factor if is_told else None


def is_same_factor(a: float | None, b: float) -> bool:
    """Whether two factors are equal within `SAME_FACTOR` of the second, which is not 0; no factor is none's equal."""
    return a is not None and abs(a / b - 1) < SAME_FACTOR


def on_node_lanes(lanes: Sequence[float]) -> list[float]:
    """A sketch on as many lanes as those of Nodes have; empty where it is of another width than a multiple of that.

    Exact sums, where the macro of that name adds in float32.
    """
    if not lanes or len(lanes) % NODE_SKETCH_LANES:
        return []
    return [math.fsum(lanes[lane::NODE_SKETCH_LANES]) for lane in range(NODE_SKETCH_LANES)]
