"""Which steps of a large pair of runs must be opened row by row, and a tally of those that need not be.

Where two runs differ in their last bits everywhere, every row of both must be read, but few of them must be looked
at. Here each rank's parts are read a row group at a time, and rows are paired by their place in the step: the
pairing proper (`pairs`) gives the same where all keys agree, which is checked. A step in which they do not is
`unpaired` and left to it; so is one with summaries that are not whole. What is held in memory is two row groups of
each side per thread, however many steps there are.

What may be beyond its tolerance is told by the least that a rule allows (`lower_bound`), on arrays: a step is proposed
here before it is opened there, and the spread over steps that are never opened is counted here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from gradtrace_analyzer.diff.links import LINK_TABLES, LinkTable
from gradtrace_analyzer.diff.pairing.lower_bound import RolePairs, Upstream, beyond_lower_bound
from gradtrace_analyzer.diff.pairing.rows_of_part import RowsOfPart
from gradtrace_analyzer.diff.pairing.tally import SieveResult, Tally, joined
from gradtrace_analyzer.diff.pairing.whereabouts import whereabouts
from gradtrace_analyzer.numerics.arrays import Side, codes_of, numbers_of, values_of
from gradtrace_analyzer.numerics.sketches import relative_errors
from gradtrace_analyzer.numerics.tolerance import LowerBound
from gradtrace_schemas import TABLES

# Those with summaries; the others are few rows, whose values are compared where they lie.
# Parameters come last: what they may differ by after the optimizer hangs on the errors of their gradients.
SIEVED = tuple(
    sorted((t for t in LINK_TABLES if t.sides), key=lambda table: table.table == "parameters")
)

# Few enough to stay in a processor's cache from being decoded to being judged.
_ROWS_AT_ONCE = 20_000

_STATISTICS = ("fingerprint", "norm", "nan_count", "inf_count", "numel", "dtype", "sketch")


def sieved(
    rank: int,
    parts: Mapping[str, tuple[Sequence[RowsOfPart], Sequence[RowsOfPart]]],
    steps: frozenset[int],
    lower_bound: LowerBound,
    moved: frozenset[int] = frozenset(),
) -> SieveResult:
    """What the parts of a rank, by table and side, hold in these steps.

    What is beyond the `lower_bound` of what a rule can allow is proposed. `moved` are the steps before which a
    parameter is not what the step before left.
    """
    found, upstream = SieveResult(rank), Upstream()
    for table in SIEVED:
        sides = parts.get(table.table)
        if sides is None or not any(sides):
            continue
        for chosen, blocks in _blocks(table, sides, steps):
            if blocks is None:
                found.unpaired |= chosen
            else:
                _judge(found, table, *blocks, lower_bound, moved, upstream)
    # A step that does not pair in one table is looked at in all.
    by_point = groupby(sorted(found.tallies, key=_point_of), key=_point_of)
    found.tallies = [joined(list(of_point)).without(found.unpaired) for _, of_point in by_point]
    return found


def _point_of(tally: Tally) -> tuple[str, str]:
    return tally.table, tally.point or ""


def _columns(table: LinkTable) -> list[str]:
    return list(
        dict.fromkeys(
            [
                "step",
                *table.key,
                *(p + s for _, p in table.sides for s in _STATISTICS),
                *table.values,
                *(["kind", "end_ns"] if table.kinds else []),
            ]
        )
    )


def _blocks(
    table: LinkTable,
    sides: tuple[Sequence[RowsOfPart], Sequence[RowsOfPart]],
    steps: frozenset[int],
) -> Iterator[tuple[set[int], tuple[pa.Table, pa.Table] | None]]:
    """Both sides' rows of the same whole steps, in turn; without rows where their numbers are not the same."""
    readers = [_whole_steps(table, parts, steps) for parts in sides]
    held: list[pa.Table | None] = [next(reader, None) for reader in readers]
    while held[0] is not None or held[1] is not None:
        a, b = held
        if a is None or b is None:
            left = a if a is not None else b
            assert left is not None
            yield set(np.unique(numbers_of(left, "step")).tolist()), None
            held = [next(reader, None) if side is not None else None
                    for reader, side in zip(readers, held, strict=True)]  # fmt: skip
            continue
        of_a, of_b = numbers_of(a, "step"), numbers_of(b, "step")
        last = min(of_a[-1], of_b[-1])
        cuts = [int(np.searchsorted(s, last, side="right")) for s in (of_a, of_b)]
        yield from _same_steps(a.slice(0, cuts[0]), b.slice(0, cuts[1]))
        for n, (side, cut) in enumerate(zip((a, b), cuts, strict=True)):
            rest = side.slice(cut)
            held[n] = rest if len(rest) else next(readers[n], None)


def _same_steps(
    a: pa.Table, b: pa.Table
) -> Iterator[tuple[set[int], tuple[pa.Table, pa.Table] | None]]:
    of_a, of_b = numbers_of(a, "step"), numbers_of(b, "step")
    if np.array_equal(of_a, of_b):
        yield set(), (a, b)
        return
    for step in np.union1d(of_a, of_b).tolist():
        (a0, a1), (b0, b1) = (np.searchsorted(s, [step, step + 1]).tolist() for s in (of_a, of_b))
        if a1 - a0 == b1 - b0:
            yield set(), (a.slice(a0, a1 - a0), b.slice(b0, b1 - b0))
        else:
            yield {step}, None


def _whole_steps(
    table: LinkTable, parts: Sequence[RowsOfPart], steps: frozenset[int]
) -> Iterator[pa.Table]:
    """The rows of these steps, in tables that end where a step does; steps go up within what is read of a rank."""
    columns, kinds = _columns(table), table.kinds
    types = TABLES[table.table].arrow_schema
    texts = [name for name in columns if pa.types.is_string(types.field(name).type)]
    rest: pa.Table | None = None
    for part in parts:
        with pq.ParquetFile(part.path, read_dictionary=texts) as file:
            held = file.schema_arrow.names
            names = [name for name in columns if name in held]
            groups = [
                number
                for number in range(file.num_row_groups)
                if (bounds := _bounds(file.metadata.row_group(number))) is None
                or any(part.may_hold(*bounds, step) for step in steps)
            ]
            for batch in file.iter_batches(_ROWS_AT_ONCE, groups, names, use_threads=False):
                rows = pa.Table.from_batches([batch])
                if kinds:
                    rows = _of_kinds(rows, kinds)
                    if not len(rows):
                        continue
                rows = _renumbered(rows, part)
                if not len(rows):
                    continue
                numbers = numbers_of(rows, "step")
                if rest is not None:
                    # The step that the last row group ended in: the only rows that are copied.
                    head = int(np.searchsorted(numbers, numbers_of(rest, "step")[0], side="right"))
                    if head:
                        rest = pa.concat_tables([rest, rows.slice(0, head)]).combine_chunks()
                    rows, numbers = rows.slice(head), numbers[head:]
                    if not len(rows):
                        continue
                    yield from _chosen(rest, steps)
                start = int(np.searchsorted(numbers, numbers[-1]))
                rest = rows.slice(start)
                if start:
                    yield from _chosen(rows.slice(0, start), steps)
    if rest is not None:
        yield from _chosen(rest, steps)


def _renumbered(rows: pa.Table, part: RowsOfPart) -> pa.Table:
    """The rows that are read, with the numbers under which their steps are."""
    if not part.step_shift and part.end is None:
        return rows
    numbers = numbers_of(rows, "step") + part.step_shift
    place = rows.column_names.index("step")
    renumbered = rows.set_column(place, "step", pa.array(numbers.astype(np.int32)))
    return renumbered if part.end is None else renumbered.filter(pa.array(numbers < part.end))


def _of_kinds(rows: pa.Table, kinds: Sequence[str]) -> pa.Table:
    """The rows of these kinds that have an end: `LinkTable.only`."""
    codes, names = codes_of(rows, "kind")
    chosen = np.isin(codes, [n for n, name in enumerate(names) if name in kinds])
    _, has_end = values_of(rows, "end_ns")
    return rows.filter(pa.array(chosen & has_end))


def _bounds(group: Any) -> tuple[int, int] | None:
    for number in range(group.num_columns):
        column = group.column(number)
        if column.path_in_schema == "step":
            statistics = column.statistics
            return (statistics.min, statistics.max) if statistics is not None else None
    return None


def _chosen(rows: pa.Table, steps: frozenset[int]) -> Iterator[pa.Table]:
    numbers = numbers_of(rows, "step")
    starts = np.flatnonzero(np.r_[True, numbers[1:] != numbers[:-1]])
    wanted = [step in steps for step in numbers[starts].tolist()]
    if all(wanted):
        yield rows
    elif any(wanted):
        yield rows.filter(pa.array(np.repeat(wanted, np.diff(np.r_[starts, len(numbers)]))))


def _judge(
    found: SieveResult,
    table: LinkTable,
    a: pa.Table,
    b: pa.Table,
    lower_bound: LowerBound,
    moved: frozenset[int],
    upstream: Upstream,
) -> None:
    steps = numbers_of(a, "step")
    starts = np.flatnonzero(np.r_[True, steps[1:] != steps[:-1]])
    odd = ~_equal_rows(a, b, table.key)
    differs = np.zeros(len(steps), bool)
    exceeds = np.zeros(len(steps), bool)
    nonfinite = np.zeros(len(steps), bool)
    errors = np.full(len(steps), -1.0)
    judged: list[RolePairs] = []
    for _, prefix in table.sides:
        sides = [Side(rows, prefix) for rows in (a, b)]
        apart = _differing(sides)
        if not apart.any():
            continue
        odd |= apart & ~(sides[0].whole & sides[1].whole)
        nans = np.zeros(len(steps), bool)
        for count in ("nan_count", "inf_count"):
            of_a, of_b = (numbers_of(rows, prefix + count) for rows in (a, b))
            nans |= of_a != of_b
            nonfinite |= apart & ((of_a > 0) != (of_b > 0))
        error, width = relative_errors(sides, apart & ~odd)
        odd |= apart & ~width
        differs |= apart
        judged.append(RolePairs(sides, apart, error))
        exceeds |= apart & nans
        errors = np.where(apart & ~nans, np.maximum(errors, error), errors)
    if judged:
        exceeds |= beyond_lower_bound(table, (a, b), judged, starts, lower_bound, moved, upstream)
    for value in table.values:
        unequal = ~_equal_rows(a, b, (value,))
        differs |= unequal
        exceeds |= unequal
    numbers = steps[starts]
    strange = np.logical_or.reduceat(odd, starts)
    found.unpaired |= set(numbers[strange].tolist())
    codes, points = codes_of(a, "point") if "point" in table.key else (None, [])
    for code, point in enumerate(points) if codes is not None else [(0, None)]:
        mine = differs if codes is None else differs & (codes == code)
        counts = np.add.reduceat(mine, starts, dtype=np.int64)
        largest = np.maximum.reduceat(np.where(mine, errors, -1.0), starts)
        beyond = np.logical_or.reduceat(mine & exceeds, starts)
        apart = np.logical_or.reduceat(mine & nonfinite, starts)
        unmeasured = np.add.reduceat(mine & (errors < 0), starts, dtype=np.int64)
        there = np.flatnonzero(counts)
        if not len(there):
            continue
        places = np.full(len(there), None)
        # It is asked for where a link begins to differ, and steps come in order.
        if not any(t.table == table.table and t.point == point for t in found.tallies):
            places[0] = _first_place(table, a, mine, int(starts[there[0]]))
        found.tallies.append(
            Tally(
                found.rank,
                table.table,
                point,
                numbers[there].astype(np.int32),
                counts[there].astype(np.int32),
                np.where(largest[there] >= 0, largest[there], np.nan),
                beyond[there],
                apart[there],
                unmeasured[there].astype(np.int32),
                places,
                is_judged=False,
            )
        )


def _first_place(
    table: LinkTable, rows: pa.Table, mine: npt.NDArray[np.bool_], start: int
) -> str | None:
    row = start + int(np.argmax(mine[start:]))
    return whereabouts(
        table.table,
        {k: rows.column(k)[row].as_py() for k in table.key if k in rows.column_names},
    )


def _differing(sides: Sequence[Side]) -> npt.NDArray[np.bool_]:
    a, b = sides
    both = a.has_fingerprint & b.has_fingerprint
    unequal = both & (a.fingerprint != b.fingerprint)
    other = (a.has_fingerprint != b.has_fingerprint) | (a.numel != b.numel)
    return np.asarray(unequal | (~both & (other | a.has_norms_alone | b.has_norms_alone)))


def _equal_rows(a: pa.Table, b: pa.Table, columns: Sequence[str]) -> npt.NDArray[np.bool_]:
    equal = np.ones(len(a), bool)
    for name in columns:
        if (name in a.column_names) != (name in b.column_names):
            return np.zeros(len(a), bool)
        if name not in a.column_names:
            continue
        type = a.schema.field(name).type
        if pa.types.is_dictionary(type):
            (of_a, names), (of_b, others) = codes_of(a, name), codes_of(b, name)
            if names == others:
                equal &= of_a == of_b
            else:
                place = {text: n for n, text in enumerate(names)}
                moved = np.array([*(place.get(text, -2) for text in others), len(names)])
                equal &= of_a == moved[of_b]
        elif pa.types.is_list(type):
            if not a.column(name).equals(b.column(name)):
                rows = zip(a.column(name).to_pylist(), b.column(name).to_pylist(), strict=True)
                equal &= np.fromiter((x == y for x, y in rows), bool, len(a))
        else:
            (of_a, has_a), (of_b, has_b) = values_of(a, name), values_of(b, name)
            if a.column(name).null_count or b.column(name).null_count:
                equal &= (has_a == has_b) & ((of_a == of_b) | ~has_a)
            else:
                equal &= of_a == of_b
    return equal
