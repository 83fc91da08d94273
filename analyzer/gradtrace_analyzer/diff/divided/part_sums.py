"""Two runs of the same training whose work is divided otherwise: more ranks, shards, stages or accumulation.

Rows do not pair one to one then, but what they add up to does. Activations and the gradients that reach Nodes are parts
of one batch: squared norms, sums and counts of the parts add up to the whole's. Parameters and final gradients pair by
their name: replicas are equal, shards add up. Loss and gradients may be divided by the number of parts: a factor
that is a number of parts is legal where the final gradients agree.

Without a sketch of the whole (which shards at unknown places do not give) an error is estimated from its norm and its
sum, of which the sum is a sketch of one lane: what permutes rows is not seen there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import duckdb

from gradtrace_analyzer.diff.difference import Change, Difference
from gradtrace_analyzer.diff.divided.division import Division
from gradtrace_analyzer.diff.divided.whole_values import (
    SUMMED,
    change_between,
    change_of_sums,
    whole_value,
)
from gradtrace_analyzer.numerics.model import MODEL
from gradtrace_analyzer.numerics.tolerance import Rule, roundoff
from gradtrace_analyzer.words.nouns import SIDES
from gradtrace_analyzer.words.numbers import counts_phrase


@dataclass(frozen=True)
class PartSums:
    """What comparing the sums gave: the differences of the first step that has one beyond tolerance, and the `largest`
    error of the steps before."""

    divisions: tuple[Division, Division]
    step: int | None
    differences: tuple[Difference, ...]
    compared: Mapping[str, int]
    largest: float
    factor: float

    def words(self) -> str:
        """What was compared, and how the work is divided."""
        a, b = self.divisions
        counts = counts_phrase({what: count for what, count in self.compared.items() if count})
        scaled = f" Loss and gradients inside a step are {self.factor:g} times the baseline's." * (
            self.factor != 1
        )
        return (
            f"The work is divided otherwise: {a.words()} in the baseline, {b.words()} in the candidate. "
            "Sums over ranks "
            f"and microbatches were compared: {counts}{self._largest()}.{scaled}"
        )

    def _largest(self) -> str:
        """The largest error, where it is not that of the difference itself."""
        if self.step is None:
            return f"; the largest relative error is {self.largest:.1e}"
        before = f"; in the steps before, the largest relative error is {self.largest:.1e}"
        return before if self.largest else ""


class PartSumComparison:
    """Compares the sums over ranks and microbatches, step by step."""

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        parts: tuple[Division, Division],
        rule: Rule,
        scale: float = 1.0,
    ) -> None:
        self._connection = connection
        self._parts = parts
        self._rule = rule
        self._scale = scale
        self._gradient_errors: dict[str, float] = {}
        self._first_record = 0
        self._times_as_many = 1.0

    def compared(self, steps: Sequence[int]) -> PartSums:
        """The sums of these steps, up to the first that has one beyond its tolerance; `steps` in ascending order."""
        counts: dict[str, int] = {}
        largest, factor = 0.0, 1.0
        for step in steps:
            pairs, factor = self._of_step(step)
            for d in pairs:
                if d.only_in is None:
                    counts[_PHRASES[d.table]] = counts.get(_PHRASES[d.table], 0) + 1
            apart = [d for d in pairs if d.exceeds]
            errors = [
                c.error
                for d in pairs
                if d.table != "parameters"
                for c in (d.reads, d.writes)
                if c and c.error
            ]
            largest = max([largest, *errors]) if not apart else largest
            if apart:
                return PartSums(self._parts, step, tuple(apart), counts, largest, factor)
        return PartSums(self._parts, None, (), counts, largest, factor)

    def _of_step(self, step: int) -> tuple[list[Difference], float]:
        row = self._connection.execute(
            "SELECT min(record_index) FROM baseline.module_calls WHERE step = ? "
            "AND rank = (SELECT min(rank) FROM baseline.module_calls)",
            [step],
        ).fetchone()
        self._first_record = row[0] if row and row[0] is not None else 0
        factor = self._factor(step)
        before = list(self._named("parameters", step, "before"))
        growth = max(
            (c.error or 0.0 for _, c, is_flat in before if not is_flat), default=0.0
        ) + 0.1 * max((c.error or 0.0 for _, c, is_flat in before if is_flat), default=0.0)
        forward = self._scale * (
            self._rule.forward() + MODEL.growth * ((1 + growth) ** self._rule.layers - 1)
        )
        calls = list(self._calls(step, forward))
        errors = sorted(d.writes.error for d in calls if d.writes is not None and d.writes.error)
        grown = errors[len(errors) // 2] if errors else 0.0
        backward = self._scale * (self._rule.backward() + MODEL.growth * grown)
        if grown:
            backward = min(backward, self._scale * (self._rule.layer() + MODEL.seen * grown))
        found = calls + list(self._loss(step, factor, forward))
        # A mean over a part's rows: each row's gradient is as many times larger as there are parts.
        rows_factor = factor * self._times_as_many
        found += self._nodes(step, rows_factor, backward)
        largest_arriving = self._largest_arriving(step)
        arrivals = self._arrivals(step)
        for name, change, is_flat in self._named("gradients", step, "final"):
            self._gradient_errors[name] = max(
                self._gradient_errors.get(name, 0.0), change.error or 0.0
            )
            # A flat parameter's gradient may be what is left of a cancellation.
            floor = largest_arriving if is_flat else 0.0
            given = _named_difference("gradients", step, name, "final", change, backward, floor)
            # It has a sketch, which sums over parts have not: it tells of its module what they may not have shown.
            found.append(replace(given, order=arrivals.get(name, given.order)))
        found += self._updates(step, before)
        found.sort(key=lambda d: d.order)
        return found, factor

    def _factor(self, step: int) -> float:
        """What a part's loss and gradients are multiplied by, where that is a number of parts; else 1."""
        means: list[float | None] = []
        counts: list[int] = []
        for side in SIDES:
            row = self._connection.execute(
                f"SELECT avg(loss), count(loss) FROM {side}.backward_passes WHERE step = ? AND kind = 'backward' "
                "AND parent_backward_index IS NULL",
                [step],
            ).fetchone()
            means.append(row[0] if row and row[1] else None)
            counts.append(row[1] if row else 0)
        a, b = means
        self._times_as_many = counts[1] / counts[0] if all(counts) else 1.0
        if not a or not b or b / a <= 0:
            return 1.0
        numbers = {n for part in self._parts for n in (part.ranks, part.passes)}
        numbers |= {x * y for x in numbers for y in numbers}
        legal = {1.0, *(float(n) for n in numbers), *(1.0 / n for n in numbers if n)}
        return min(legal, key=lambda f: abs(math.log(b / a / f)) if f > 0 else math.inf)

    def _loss(self, step: int, factor: float, allowed: float) -> list[Difference]:
        means = []
        for side in SIDES:
            row = self._connection.execute(
                f"SELECT avg(loss), min(record_index), min(backward_index) FROM {side}.backward_passes "
                "WHERE step = ? AND kind = 'backward' AND loss IS NOT NULL AND parent_backward_index IS NULL",
                [step],
            ).fetchone()
            means.append(row or (None, 0, 0))
        (a, record, index), (b, _, _) = means
        if a is None or b is None:
            return []
        b /= factor
        apart = abs(a - b) > allowed * max(abs(a), abs(b)) or math.isnan(a) != math.isnan(b)
        key = {"microbatch": None, "backward_index": index, "kind": "backward"}
        values = {"loss": (a, b)} if apart else {}
        order = self._order(record)
        return [
            Difference("backward_passes", 0, step, order, None, key, exceeds=apart, values=values)
        ]

    def _order(self, record: int) -> float:
        return float(record - self._first_record)

    def _calls(self, step: int, allowed: float) -> list[Difference]:
        key = ("root", "module_fqn", "phase", "call_index")
        return self._summed(
            "module_calls", step, key, ("input_", "output_"), 1.0, allowed, "phase = 'forward'"
        )

    def _nodes(self, step: int, factor: float, allowed: float) -> list[Difference]:
        key = ("root", "module_fqn", "call_index", "node_name", "occurrence")
        return self._summed(
            "node_events",
            step,
            key,
            ("grad_output_", "grad_input_"),
            factor,
            allowed,
            "parameter_fqn IS NULL AND module_fqn IS NOT NULL AND outcome = 'ok'",
        )

    def _summed(
        self,
        table: str,
        step: int,
        key: Sequence[str],
        prefixes: tuple[str, str],
        factor: float,
        allowed: float,
        where: str,
    ) -> list[Difference]:
        # The parts' roots and calls may be numbered otherwise where stages are roots: names alone pair there.
        names = ", ".join(key)
        sums = ", ".join(
            f"sum({p}numel) AS {p}numel, sqrt(sum({p}norm ** 2)) AS {p}norm, max({p}abs_max) AS {p}abs_max, "
            f"sum({p}sum) AS {p}sum, sum({p}nan_count) AS {p}nan_count, sum({p}inf_count) AS {p}inf_count"
            for p in prefixes
        )
        sides = [
            f"SELECT {names}, min(record_index) AS record, max(microbatch) AS microbatch, {sums} FROM {side}.{table} "
            f"WHERE step = {step} AND {where} GROUP BY {names}"
            for side in SIDES
        ]
        on = " AND ".join(f"b.{k} IS NOT DISTINCT FROM c.{k}" for k in key)
        columns = ", ".join(f"{s}.{p}{x}" for p in prefixes for x in SUMMED for s in "bc")
        rows = self._connection.execute(
            f"SELECT {', '.join(f'b.{k}' for k in key)}, b.record, {columns} FROM ({sides[0]}) b JOIN ({sides[1]}) c "
            f"ON {on} ORDER BY b.record"
        ).fetchall()
        found = []
        for row in rows:
            numbers = row[len(key) + 1 :]
            width = 2 * len(SUMMED)
            changes = [
                change_of_sums(numbers[n * width : (n + 1) * width], factor, allowed)
                for n in range(2)
            ]
            reads, writes = changes
            apart = any(c is not None and _is_decisive(c) for c in changes)
            own = dict(zip(key, row, strict=False))
            full = {"microbatch": None, "backward_index": 0, "parameter_fqn": None, **own}
            if table == "module_calls":
                full = {"microbatch": None, **own}
            found.append(
                Difference(
                    table,
                    0,
                    step,
                    self._order(row[len(key)]),
                    None,
                    full,
                    exceeds=apart,
                    reads=reads,
                    writes=writes or reads,
                )
            )
        return found

    def _arrivals(self, step: int) -> dict[str, float]:
        """Where in the step each parameter's gradient arrives at it."""
        rows = self._connection.execute(
            "SELECT parameter_fqn, min(record_index) FROM baseline.node_events WHERE step = ? "
            "AND parameter_fqn IS NOT NULL AND rank = (SELECT min(rank) FROM baseline.node_events) GROUP BY ALL",
            [step],
        ).fetchall()
        return {name: self._order(record) for name, record in rows}

    def _largest_arriving(self, step: int) -> float:
        row = self._connection.execute(
            "SELECT max(grad_output_norm) FROM baseline.node_events WHERE step = ? AND parameter_fqn IS NULL",
            [step],
        ).fetchone()
        return float(row[0] or 0.0) if row else 0.0

    def _named(self, table: str, step: int, point: str) -> list[tuple[str, Change, bool]]:
        """(name, change, whether it is flat) of all parameters at a point: replicas once, shards summed."""
        only = " AND kind = 'parameter'" * (table == "parameters")
        sides = [
            "SELECT parameter_fqn, numel, norm, abs_max, sum, nan_count, inf_count, sketch, dtype, fingerprint, "
            f"coalesce(len(shape), 0) < 2, rank FROM {side}.{table} WHERE step = ? AND point = ?{only} ORDER BY rank"
            for side in SIDES
        ]
        held: list[dict[str, list[tuple[Any, ...]]]] = []
        for query in sides:
            by_name: dict[str, list[tuple[Any, ...]]] = {}
            for name, *rest in self._connection.execute(query, [step, point]).fetchall():
                by_name.setdefault(name, []).append(tuple(rest))
            held.append(by_name)
        found = []
        for name in [n for n in held[0] if n in held[1]]:
            a, b = (whole_value(side[name], other[name]) for side, other in (held, held[::-1]))
            if a is None or b is None or a["numel"] != b["numel"]:
                continue
            found.append((name, change_between(a, b), bool(a["is_flat"])))
        return found

    def _updates(self, step: int, before: Sequence[tuple[str, Change, bool]]) -> list[Difference]:
        was = {name: change for name, change, _ in before}
        found = []
        for name, change, is_flat in self._named("parameters", step, "after"):
            old = was.get(name)
            g = self._gradient_errors.get(name)
            if old is None or g is None or change.baseline is None or old.baseline is None:
                continue
            a, b = old.baseline.get("sketch"), change.baseline.get("sketch")
            if (is_flat and g > 0) or not a or not b:
                continue
            update = math.dist(a, b)
            norm = change.baseline["norm"]
            added = max(0.0, (change.error or 0.0) - (old.error or 0.0)) * norm
            share = min(
                MODEL.unjudged, MODEL.updated + MODEL.turned_times * math.sqrt(MODEL.turned * g)
            )
            allowed = (
                update * share + MODEL.update_roundings * roundoff(change.baseline["dtype"]) * norm
            )
            found.append(
                _named_difference(
                    "parameters",
                    step,
                    name,
                    "after",
                    change,
                    self._scale * allowed / norm if norm else 0.0,
                    0.0,
                    apart=added > self._scale * MODEL.decisive_of_sums * allowed,
                )
            )
        return found


_PHRASES = {
    "module_calls": "module outputs",
    "backward_passes": "losses",
    "node_events": "gradients at Nodes",
    "gradients": "final gradients",
    "parameters": "parameters",
}

# After everything else of a step, in this order.
_LATE = {"gradients": 1e15, "parameters": 2e15}


def _named_difference(
    table: str,
    step: int,
    name: str,
    point: str,
    change: Change,
    allowed: float,
    floor: float,
    apart: bool | None = None,
) -> Difference:
    norm = max((s or {}).get("norm") or 0.0 for s in (change.baseline, change.candidate))
    share = min(1.0, norm / floor) if floor else 1.0
    judged = Change(
        change.differs,
        change.error,
        allowed / share if share else math.inf,
        change.baseline,
        change.candidate,
        shown_by="sums",
    )
    key = {"root": 0, "parameter_fqn": name, "point": point}
    if table == "gradients":
        key["backward_index"] = 0
    exceeds = _is_decisive(judged) if apart is None else apart
    return Difference(table, 0, step, _LATE[table], None, key, exceeds=exceeds, writes=judged)


def _is_decisive(change: Change) -> bool:
    if not change.differs:
        return False
    return change.error is None or change.error > MODEL.decisive_of_sums * change.tolerance
