"""What left one row and came into another: told by fingerprints, since autograd's edges are not recorded.

A tensor that is handed on unchanged has the same fingerprint where it leaves and where it arrives. Where that holds on
both sides at once, for a value that differs between them, the difference went that way. Where it holds in the baseline
alone, and what left is equal on both sides, something changed it in between. Sums of several gradients match
nothing: of these only the size is known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import duckdb

from gradtrace_analyzer.diff.difference import Difference
from gradtrace_analyzer.words.nouns import SIDES

RowKey = tuple[Any, ...]


_CALL_KEY = ("microbatch", "root", "module_fqn", "phase", "call_index")
_INPUT_KEY = ("microbatch", "root", "call_index", "name")


@dataclass(frozen=True)
class TensorId:
    """One tensor at a place: its size and its fingerprint."""

    numel: int
    fingerprint: int


@dataclass(frozen=True)
class RowTensors:
    """What came into a row and what left it, tensor by tensor; `order` counts its side's records."""

    order: int
    arrived: tuple[TensorId | None, ...] = ()
    left: tuple[TensorId | None, ...] = ()


@dataclass(frozen=True)
class TensorPair:
    """The tensors of both sides at one place: their common number of elements, and both fingerprints, which differ."""

    numel: int
    baseline: int
    candidate: int


@dataclass
class Dataflow:
    """The rows of one step of some ranks, by side and place; none where nothing can be told."""

    rows: Mapping[str, Mapping[RowKey, RowTensors]] = field(
        default_factory=lambda: {s: {} for s in SIDES}
    )
    _leaving: dict[tuple[RowKey, TensorId], list[RowKey]] = field(default_factory=dict)
    _left_candidate: set[tuple[RowKey, TensorId]] = field(default_factory=set)

    def __post_init__(self) -> None:
        for place, row in self.rows["baseline"].items():
            for tensor in set(row.left):
                if tensor is not None:
                    self._leaving.setdefault((_scope(place), tensor), []).append(place)
        for place, row in self.rows["candidate"].items():
            self._left_candidate |= {(_scope(place), p) for p in row.left if p is not None}

    def call(
        self, side: str, rank: int, microbatch: int, root: int, fqn: str, *, call_index: int
    ) -> RowTensors | None:
        """What came into and left one forward call of a module; None where it was not recorded."""
        place = ("module_calls", rank, microbatch, root, fqn, "forward", call_index)
        return self.rows[side].get(place)

    def arrived(self, d: Difference) -> list[TensorPair]:
        """What came into a row and is another tensor on both sides."""
        return self._apart(d, "arrived")

    def left(self, d: Difference) -> list[TensorPair]:
        """What left a row and is another tensor on both sides."""
        return self._apart(d, "left")

    def _apart(self, d: Difference, direction: str) -> list[TensorPair]:
        own = [self.rows[side].get(place) for side, place in zip(SIDES, row_keys(d), strict=True)]
        if own[0] is None or own[1] is None:
            return []
        both = (getattr(own[0], direction), getattr(own[1], direction))
        if len(both[0]) != len(both[1]):
            return []
        pairs = zip(*both, strict=True)
        return [
            TensorPair(a.numel, a.fingerprint, b.fingerprint)
            for a, b in pairs
            if a is not None and b is not None and a != b and a.numel == b.numel
        ]

    def changed_on_the_way(self, d: Difference, apart: Collection[RowKey]) -> bool:
        """Whether what came in is, in the baseline, what rows left whose pairs agree: `apart` are those that do not.

        True only where it holds of every tensor that differs.
        """
        place = row_keys(d)[0]
        row = self.rows["baseline"].get(place)
        moved = self.arrived(d)
        if row is None or not moved:
            return False
        for tensor in moved:
            came = TensorId(tensor.numel, tensor.baseline)
            sources = [
                source
                for source in self._leaving.get((_scope(place), came), ())
                if self.rows["baseline"][source].order < row.order and source != place
            ]
            # A tensor of zeros is what any row may leave; what a row of the candidate left came as it was.
            arrived = (_scope(place), TensorId(tensor.numel, tensor.candidate))
            if not tensor.baseline or not sources or arrived in self._left_candidate:
                return False
            if any(source in apart for source in sources):
                return False
        return True


def row_keys(d: Difference) -> tuple[RowKey, RowKey]:
    """The keys under which `Dataflow.rows` holds the difference's row, of the baseline and of the candidate."""
    if d.table == "node_events":
        pass_ = ("node", d.rank, d.key["backward_index"])
        return (*pass_, d.event_indices[0]), (*pass_, d.event_indices[1])
    names = _CALL_KEY if d.table == "module_calls" else _INPUT_KEY
    place = (d.table, d.rank, *(d.key.get(name) for name in names))
    return place, place


def _scope(place: RowKey) -> RowKey:
    """Where a row's tensors can come from: Nodes of the same pass, or calls and inputs of the same rank."""
    return place[:3] if place[0] == "node" else ("forward", place[1])


def dataflow(
    connection: duckdb.DuckDBPyConnection, step: int, ranks: Sequence[int], *, nodes: bool
) -> Dataflow:
    """The step's Nodes (where `nodes`), module calls and inputs of these ranks."""
    rows: dict[str, dict[RowKey, RowTensors]] = {side: {} for side in SIDES}
    where = f"step = {step} AND rank IN ({', '.join(map(str, ranks)) or 'NULL'})"
    for side, found in rows.items():
        if nodes:
            found.update(_nodes(connection, side, where))
        calls = connection.execute(
            f"SELECT rank, {', '.join(_CALL_KEY)}, record_index, input_numel, input_fingerprint, "
            f"output_numel, output_fingerprint FROM {side}.module_calls WHERE {where}"
        ).fetchall()
        for rank, *key, order, n, came, m, went in calls:
            found[("module_calls", rank, *key)] = RowTensors(order, _of(n, came), _of(m, went))
        inputs = connection.execute(
            f"SELECT rank, {', '.join(_INPUT_KEY)}, record_index, numel, fingerprint "
            f"FROM {side}.inputs WHERE {where}"
        ).fetchall()
        for rank, *key, order, n, value in inputs:
            found[("inputs", rank, *key)] = RowTensors(order, _of(n, value), _of(n, value))
    return Dataflow(rows)


def _nodes(
    connection: duckdb.DuckDBPyConnection, side: str, where: str
) -> Iterable[tuple[RowKey, RowTensors]]:
    single: dict[RowKey, dict[int, TensorId | None]] = {}
    for *place, direction, position, n, value in connection.execute(
        "SELECT rank, backward_index, event_index, direction, position, numel, fingerprint "
        f"FROM {side}.node_tensors WHERE {where}"
    ).fetchall():
        [tensor] = _of(n, value)
        single.setdefault((*place, direction), {})[position] = tensor

    def all_of(place: RowKey, direction: str, n: Any, value: Any) -> tuple[TensorId | None, ...]:
        known = single.get((*place, direction))
        return _of(n, value) if known is None else tuple(known[k] for k in sorted(known))

    for *place, order, n, came, m, went in connection.execute(
        "SELECT rank, backward_index, event_index, record_index, grad_output_numel, grad_output_fingerprint, "
        f"grad_input_numel, grad_input_fingerprint FROM {side}.node_events WHERE {where}"
    ).fetchall():
        arrived = all_of(tuple(place), "grad_output", n, came)
        left = all_of(tuple(place), "grad_input", m, went)
        yield ("node", *place), RowTensors(order, arrived, left)


def _of(numel: Any, fingerprint: Any) -> tuple[TensorId | None]:
    known = numel is not None and fingerprint is not None
    return (TensorId(numel, fingerprint) if known else None,)
