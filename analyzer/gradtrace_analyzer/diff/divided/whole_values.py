"""One value of a side from its parts (replicas, shards, microbatches), and two such values against each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gradtrace_analyzer.diff.difference import Change
from gradtrace_analyzer.numerics.sketches import relative_error

# What of a summary adds up over parts (norms by their squares).
SUMMED = ("numel", "norm", "abs_max", "sum", "nan_count", "inf_count")


def whole_value(
    rows: Sequence[tuple[Any, ...]], others: Sequence[tuple[Any, ...]]
) -> dict[str, Any] | None:
    """One parameter of a side: a replica, or the sum of its shards where that is the other side's size."""
    names = ("numel", "norm", "abs_max", "sum", "nan_count", "inf_count", "sketch", "dtype")
    sizes = {row[0] for row in rows}
    other_sizes = {sum(row[0] for row in others), others[0][0]}
    first = dict(zip((*names, "fingerprint", "is_flat"), rows[0], strict=False))
    if len(sizes) == 1 and rows[0][0] in other_sizes and rows[0][0] >= others[0][0]:
        return first
    total = sum(row[0] for row in rows)
    if total not in other_sizes or any(row[1] is None for row in rows if row[0]):
        return None
    parts = [dict(zip(names, row, strict=False)) for row in rows if row[0]]
    return {
        **first,
        "numel": total,
        "norm": math.sqrt(sum(p["norm"] ** 2 for p in parts)),
        "abs_max": max(p["abs_max"] for p in parts),
        "sum": math.fsum(p["sum"] for p in parts),
        "nan_count": sum(p["nan_count"] for p in parts),
        "inf_count": sum(p["inf_count"] for p in parts),
        "sketch": None,
        "fingerprint": None,
        "is_flat": rows[0][9],
    }


def change_between(a: Mapping[str, Any], b: Mapping[str, Any]) -> Change:
    """Two whole values of one name as a `Change` without a tolerance; without fingerprints they count as different."""
    differs = a["fingerprint"] is None or a["fingerprint"] != b["fingerprint"]
    return Change(differs, relative_error(a, b) if differs else 0.0, 0.0, a, b)


def change_of_sums(numbers: Sequence[Any], factor: float, allowed: float) -> Change | None:
    """The change of a sum, the candidate's divided by the factor; None where the wholes are of other sizes."""
    a = dict(zip(SUMMED, numbers[::2], strict=True))
    b = dict(zip(SUMMED, numbers[1::2], strict=True))
    if a["norm"] is None or b["norm"] is None or a["numel"] != b["numel"] or not a["numel"]:
        return None
    for name in ("norm", "abs_max", "sum"):
        b[name] /= factor
    error = relative_error(a, b)
    # A sum of numbers that cancel is judged by their norm: no less than rounding of a sum can show.
    return Change(error != 0.0, error, allowed, {**a, "dtype": None}, {**b, "dtype": None})
