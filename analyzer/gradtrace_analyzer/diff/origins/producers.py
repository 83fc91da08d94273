"""Which of a rank's rows handed a tensor on, as its fingerprint shows: the way that a difference went."""

from __future__ import annotations

from gradtrace_analyzer.diff.difference import Difference
from gradtrace_analyzer.diff.origins.dataflow import Dataflow, RowKey, TensorPair, row_keys


class Producers:
    """What the rows of one rank left so far, in program order; rows are named by their vertices in a graph."""

    def __init__(self, dataflow: Dataflow, *, exceeding: bool) -> None:
        self._dataflow = dataflow
        self._exceeding = exceeding
        self._left: dict[tuple[object, TensorPair], list[int]] = {}
        self._zeros: set[tuple[object, int]] = set()
        self._apart: set[RowKey] = set()

    def add_outputs(self, vertex: int, d: Difference) -> None:
        """Remember that the tensors which left the row came from this vertex."""
        for moved in self._dataflow.left(d):
            self._left.setdefault((_pass_of(d), moved), []).append(vertex)
            if not moved.baseline:
                self._zeros.add((_pass_of(d), moved.numel))
        if d.writes is not None and d.writes.is_apart(exceeding=self._exceeding):
            self._apart.add(row_keys(d)[0])

    def producers_of(self, d: Difference) -> list[int]:
        """The rows before it which the same tensors left, on both sides: of what differs, all of it."""
        found: list[int] = []
        for moved in self._dataflow.arrived(d):
            sources = self._left.get((_pass_of(d), moved))
            if not sources:
                return []
            found += sources
        return found

    def is_changed_on_the_way(self, d: Difference) -> bool:
        """Whether what came into a row had left others equal, and was changed in between."""
        sizes = {moved.numel for moved in self._dataflow.arrived(d)}
        if any((_pass_of(d), n) in self._zeros for n in sizes):
            return False  # it may be a sum with a gradient that was zero in the baseline
        return self._dataflow.changed_on_the_way(d, self._apart)


def _pass_of(d: Difference) -> object:
    return d.key["backward_index"] if d.table == "node_events" else "forward"
