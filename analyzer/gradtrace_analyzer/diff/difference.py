"""One pair of rows of two runs that differ, and how: what pairing finds, and what origins are told from."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from gradtrace_analyzer.diff.links import STATISTICS, LinkTable, link_of
from gradtrace_analyzer.numerics.sketches import factor_between, relative_error

# What tells that a value is too long or too short (`Change.shown_by`): more than rounding makes it, or each time alike.
LENGTHS = ("length", "steady")

# A larger factor, or a smaller one than its inverse, is of unrelated values, such as memory that was never written.
LARGEST_FACTOR = 1e3


@dataclass(frozen=True)
class Change:
    """What one summary was on both sides. `error` is the relative error, None where finite values turned
    into non-finite ones, or one side has no summary. Statistics are None of a side that lacks the row."""

    differs: bool
    error: float | None
    tolerance: float
    baseline: Mapping[str, Any] | None
    candidate: Mapping[str, Any] | None
    noise: str | None = (
        None  # the run that the tolerance was measured from; None where it is a rule's
    )
    # What tells where not its direction: its `length`, or the same length time after time (`steady`). Where the work
    # is divided otherwise nothing but `sums` over the parts was compared before it.
    shown_by: str | None = None

    def is_apart(self, *, exceeding: bool) -> bool:
        """Whether it differs; with `exceeding`, by more than rounding."""
        beyond = self.error is None or self.error > self.tolerance
        return self.differs and (beyond or not exceeding)

    @property
    def factor(self) -> float | None:
        """f where candidate = f x baseline within what their sketches tell, and f is not 1; else None."""
        if self.baseline is None or self.candidate is None:
            return None
        sketches = self.baseline.get("sketch"), self.candidate.get("sketch")
        return factor_between(*sketches, most=LARGEST_FACTOR)


@dataclass(frozen=True)
class Difference:
    """A pair of rows that differ, or a row that one side alone has (`only_in`).

    `order` is the place in the rank's step, in program order; `exceeds`, whether it is more than rounding: the column
    `beyond`. (The column `exceeds`, whether a verdict may rest on it, is asked of tables alone.)
    `event_indices` are the rows' numbers on both sides, where they are Nodes.
    """

    table: str
    rank: int
    step: int
    order: float
    only_in: str | None
    key: Mapping[str, Any]
    exceeds: bool = True
    event_indices: tuple[int | None, int | None] = (None, None)
    bucket_index: int | None = None
    reads: Change | None = None
    writes: Change | None = None
    values: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def event_index(self) -> int | None:
        """The Node's number in its pass, of the candidate where the baseline lacks it."""
        in_baseline, in_candidate = self.event_indices
        return in_candidate if in_baseline is None else in_baseline

    @property
    def link(self) -> str:
        """The link of the chain that the row stands for."""
        return link_of(self.table, self.key.get("point"))


def differences(
    table: LinkTable, names: Sequence[str], rows: Iterable[Sequence[Any]]
) -> list[Difference]:
    """The objects of rows of `differing_<table>`, whose columns have these names."""
    at = {name: place for place, name in enumerate(names)}
    # There may be many rows: what is the same for all of them is looked up once.
    statistics = {
        (role, side): itemgetter(*(at[f"{role}_{side}_{s}"] for s in STATISTICS))
        for role, _ in table.sides
        for side in "bc"
    }
    judged = {
        role: [at[name] for name in (f"{role}_differs", f"{role}_error", f"{role}_tolerance")]
        for role, _ in table.sides
    }
    pairs = [(v, at[f"value_b_{v}"], at[f"value_c_{v}"]) for v in table.values]
    key = [(k, at[f"key_{k}"]) for k in table.key]
    indices = [at.get("event_index_b"), at.get("event_index_c"), at.get("bucket_index")]

    def change(row: Sequence[Any], role: str, only_in: str | None) -> Change:
        differs, error, tolerance = (row[place] for place in judged[role])
        sides = [
            None if only_in == other else dict(zip(STATISTICS, take(row), strict=True))
            for other, take in (
                ("candidate", statistics[role, "b"]),
                ("baseline", statistics[role, "c"]),
            )
        ]
        shown_by = row[at["shown_by"]] if role == "writes" else None
        return Change(
            bool(differs), error, tolerance, sides[0], sides[1], row[at["noise"]], shown_by
        )

    found = []
    for row in rows:
        only_in = row[at["only_in"]]
        changes = {role: change(row, role, only_in) for role, _ in table.sides}
        in_baseline, in_candidate, bucket = (None if n is None else row[n] for n in indices)
        values = {v: (row[b], row[c]) for v, b, c in pairs}
        found.append(
            Difference(
                table=table.table,
                rank=row[at["rank"]],
                step=row[at["step"]],
                order=float(row[at["place"]]),
                only_in=only_in,
                key={k: row[place] for k, place in key},
                exceeds=bool(row[at["beyond"]]),
                event_indices=(in_baseline, in_candidate),
                bucket_index=bucket,
                reads=changes.get("reads"),
                writes=changes.get("writes"),
                values={v: pair for v, pair in values.items() if not _same(*pair)},
            )
        )
    return found


def _same(a: Any, b: Any) -> bool:
    both_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
    return both_nan or a == b


def changed_gradient(values: Sequence[Any], is_equal: bool, d: Difference) -> Change:
    """One gradient on both sides; `values` are the statistics, baseline and candidate in turn."""
    baseline = dict(zip(STATISTICS, values[::2], strict=True))
    candidate = dict(zip(STATISTICS, values[1::2], strict=True))
    whole = d.writes or d.reads
    return Change(
        differs=not is_equal,
        error=relative_error(baseline, candidate, from_sketches_alone=True),
        tolerance=whole.tolerance if whole is not None else 0.0,
        baseline=baseline,
        candidate=candidate,
        noise=whole.noise if whole is not None else None,
        shown_by=whole.shown_by if whole is not None else None,
    )


def settings_apart(values: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    """A group's values that differ, of its hyperparameters only those that do."""
    found = dict(values)
    before, after = found.pop("hyperparameters", ("{}", "{}"))
    old, new = json.loads(before or "{}"), json.loads(after or "{}")
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            found[name] = (old.get(name), new.get(name))
    return found
