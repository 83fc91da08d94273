"""What may exceed its tolerance, on arrays: held against the least that the rule can allow.

`Judgement` allows no row less, whatever else its step shows: what both ask is written once (`numerics/formulas.py`),
and here nothing is allowed but what every row is. So a step that is not proposed here does not exceed; one
that is may not, which is seen once it is open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gradtrace_analyzer.diff.links import LinkTable
from gradtrace_analyzer.numerics.arrays import (
    Array,
    Side,
    codes_of,
    numbers_of,
    sketches_of,
    values_of,
)
from gradtrace_analyzer.numerics.formulas import (
    gain,
    rounded_once,
    share_of_floor,
    update_allowed,
)
from gradtrace_analyzer.numerics.model import MODEL
from gradtrace_analyzer.numerics.sketches import distances
from gradtrace_analyzer.numerics.tolerance import DECISIVE, LowerBound, roundoff

Flags = npt.NDArray[np.bool_]


@dataclass
class Upstream:
    """What the judgement of a rank's rows hangs on in other tables, by step.

    `arriving` is the largest gradient that reached a Node of a module; `final` the relative errors of what the
    optimizer saw, in the order of `parameters`, NaN where a gradient is equal or was not seen.
    """

    arriving: dict[int, float] = field(default_factory=dict)
    parameters: dict[tuple[int, str], int] = field(default_factory=dict)
    final: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)


@dataclass(frozen=True)
class RolePairs:
    """One role of a table's rows: both sides, which pairs differ, and their relative errors."""

    sides: Sequence[Side]
    apart: Flags
    error: Array

    @property
    def larger(self) -> Array:
        """The larger of both sides' norms, one float64 for each pair of rows."""
        return np.asarray(np.maximum(self.sides[0].norm, self.sides[1].norm))


def beyond_lower_bound(
    table: LinkTable,
    rows: tuple[pa.Table, pa.Table],
    judged: Sequence[RolePairs],
    starts: Array,
    lower_bound: LowerBound,
    moved: frozenset[int],
    upstream: Upstream,
) -> Flags:
    """The rows that may exceed. `starts` is where steps begin; what later tables hang on is noted in `upstream`."""
    if table.table == "parameters":
        return _parameters(rows[0], judged[0], lower_bound, moved, upstream)
    if table.table == "gradients":
        _note_final(rows[0], judged[0], upstream)
    if table.table == "inputs":
        [one] = judged
        a, b = (_units(side) for side in one.sides)
        once = np.where(a != b, rounded_once(a, b), 0.0)
        return np.asarray(one.apart & ~(one.error <= once))
    if table.table == "node_events":
        _note_arriving(rows[0], judged, starts, upstream.arriving)
    is_forward = table.table == "module_calls"
    found = np.zeros(len(rows[0]), bool)
    for one in judged:
        share = _share(table, rows[0], one, starts, upstream.arriving)
        rounding = _each(one, lower_bound.forward if is_forward else lower_bound.layer)
        allowed = rounding * _decisive(one)
        found |= one.apart & ~(one.error * share <= allowed)
        if len(table.sides) == 2 and one is judged[-1] and one.sides[0].prefix == table.sides[1][1]:
            found |= _lengthened(table, rows, one, share, _each(one, lower_bound.norm))
    return found


def _each(one: RolePairs, allowed: Callable[[float], float]) -> Array:
    """What each pair is allowed by the coarser of its dtypes."""
    found = [_by_dtype(side, allowed) for side in one.sides]
    return np.asarray(np.maximum(*found))


def _units(side: Side) -> Array:
    return _by_dtype(side, lambda unit: unit)


def _by_dtype(side: Side, of: Callable[[float], float]) -> Array:
    """Of each row what follows from its dtype's unit roundoff; one number where all rows have one dtype."""
    name = f"{side.prefix}dtype"
    places, names = codes_of(side.rows, name)
    if len(names) == 1 and not side.rows.column(name).null_count:
        return np.array([of(roundoff(names[0]))])
    return np.asarray(np.array([*(of(roundoff(name)) for name in names), of(0.0)])[places])


def _decisive(one: RolePairs) -> float:
    lanes = sketches_of(one.sides[1].rows, f"{one.sides[1].prefix}sketch")[0].shape[1]
    return DECISIVE.get(lanes, 1.0)


def _lengthened(
    table: LinkTable, rows: tuple[pa.Table, pa.Table], one: RolePairs, share: Array, allowed: Array
) -> Flags:
    """Rows that hand on more or less than they received, beyond rounding."""
    reads = [values_of(side, f"{table.sides[0][1]}norm")[0] for side in rows]
    a, b = one.sides
    with np.errstate(divide="ignore", invalid="ignore"):
        lengthens = np.abs(gain(reads[0], reads[1], a.norm, b.norm))
    many = (a.numel >= MODEL.fewest_numbers) & (a.numel == b.numel)
    return np.asarray(one.apart & many & np.isfinite(lengthens) & (lengthens * share > allowed))


def _note_arriving(
    rows: pa.Table, judged: Sequence[RolePairs], starts: Array, arriving: dict[int, float]
) -> None:
    reads = [
        values_of(side, "grad_output_norm")
        for side in (judged[0].sides[0].rows, judged[0].sides[1].rows)
    ]
    apart = np.logical_or.reduce([one.apart for one in judged])
    of_module = _is_present(rows, "module_fqn") & ~_is_present(rows, "parameter_fqn")
    largest = np.maximum(*(np.where(has, norm, 0.0) for norm, has in reads))
    by_step = np.maximum.reduceat(np.where(apart & of_module, largest, 0.0), starts)
    for step, most in zip(numbers_of(rows, "step")[starts].tolist(), by_step.tolist(), strict=True):
        arriving[step] = max(arriving.get(step, 0.0), most)


def _note_final(rows: pa.Table, one: RolePairs, upstream: Upstream) -> None:
    """The errors of the gradients that the optimizer saw."""
    points, names = codes_of(rows, "point")
    if "final" not in names:
        return
    chosen = np.flatnonzero((points == names.index("final")) & one.apart)
    steps = numbers_of(rows, "step")[chosen]
    places = _places_of(rows, upstream)[chosen]
    for step in np.unique(steps).tolist():
        errors = upstream.final.get(step, np.empty(0, np.float32))
        missing = max(0, len(upstream.parameters) - len(errors))
        errors = np.r_[errors, np.full(missing, np.nan, np.float32)]
        of_step = steps == step
        errors[places[of_step]] = one.error[chosen][of_step]
        upstream.final[step] = errors


def _places_of(rows: pa.Table, upstream: Upstream) -> npt.NDArray[np.int64]:
    """Of each row the number under which `upstream` keeps its parameter, an int64 array as long as the rows."""
    fqns, names = codes_of(rows, "parameter_fqn")
    pairs = numbers_of(rows, "root").astype(np.int64) * (len(names) + 1) + fqns
    each, inverse = np.unique(pairs, return_inverse=True)
    numbers = [
        upstream.parameters.setdefault(
            (int(pair) // (len(names) + 1), names[int(pair) % (len(names) + 1)]),
            len(upstream.parameters),
        )
        for pair in each.tolist()
    ]
    return np.asarray(np.array(numbers, np.int64)[inverse])


def _is_present(rows: pa.Table, name: str) -> Flags:
    """Where a text is not null."""
    places, names = codes_of(rows, name)
    return np.asarray(places < len(names))


def _share(
    table: LinkTable, rows: pa.Table, one: RolePairs, starts: Array, arriving: dict[int, float]
) -> Array:
    """What part of the noise floor a gradient's norm is, at most 1."""
    if table.table not in ("gradients", "node_events"):
        return np.ones(len(rows))
    steps = numbers_of(rows, "step")[starts].tolist()
    lengths = np.diff(np.r_[starts, len(rows)])
    floors = np.repeat([MODEL.noise_floor * arriving.get(step, 0.0) for step in steps], lengths)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(floors > 0, share_of_floor(one.larger, floors), 1.0))


def _share_of_update(rows: pa.Table, lower_bound: LowerBound, upstream: Upstream) -> Array:
    """What part of its update a parameter's new difference may be, from the error of its gradient."""
    places = _places_of(rows, upstream)
    errors = np.zeros(len(rows))
    steps = numbers_of(rows, "step")
    for step in np.unique(steps).tolist():
        final = upstream.final.get(step)
        if final is not None:
            of_step = (steps == step) & (places < len(final))
            errors[of_step] = np.nan_to_num(final[places[of_step]], nan=0.0)
    return np.asarray(lower_bound.of_update(errors))


def _parameters(
    rows: pa.Table,
    one: RolePairs,
    lower_bound: LowerBound,
    moved: frozenset[int],
    upstream: Upstream,
) -> Flags:
    """Before a step what changed since the one before, or a statistic that is far off; after it what is more than what
    differed before, rounding, and a share of the update."""
    steps = numbers_of(rows, "step")
    units = np.maximum(*(_units(side) for side in one.sides))
    points, names = codes_of(rows, "point")
    is_after = points == (names.index("after") if "after" in names else -1)
    has_moved = np.isin(steps, np.fromiter(moved, np.int64, len(moved)))
    far = one.error > MODEL.wider_statistics * _each(one, lower_bound.forward)
    fqns, _ = codes_of(rows, "parameter_fqn")
    order = np.lexsort((is_after, fqns, numbers_of(rows, "root"), steps))
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    before = order[np.maximum(places - 1, 0)]
    after_it = order[np.minimum(places + 1, len(order) - 1)]
    # What the optimizer leaves is judged there: only a statistic has no row after it.
    far &= ~(is_after[after_it] & (fqns[after_it] == fqns) & (steps[after_it] == steps))
    paired = is_after & ~is_after[before] & (fqns[before] == fqns) & (steps[before] == steps)
    paired &= numbers_of(rows, "root")[before] == numbers_of(rows, "root")
    change = one.error * one.larger
    added = change - np.where(paired, np.where(one.apart, change, 0.0)[before], 0.0)
    update = np.zeros(len(order))
    for side in one.sides:
        lanes, _ = sketches_of(side.rows, f"{side.prefix}sketch")
        update = np.maximum(update, np.where(paired, distances(lanes, lanes[before]), 0.0))
    share = _share_of_update(rows, lower_bound, upstream)
    allowed = lower_bound.scale * update_allowed(units, one.larger, share, update)
    after = is_after & ~(added <= allowed)
    return np.asarray(one.apart & (after | (~is_after & (has_moved | far))))
