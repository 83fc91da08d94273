"""The rows of one rank on their way into a graph: what all of them ask for, and what those before them left.

`inheriting_forward` and `inheriting_backward` add the rows, table by table.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradtrace_analyzer.diff.difference import Change, Difference
from gradtrace_analyzer.diff.origins.dataflow import Dataflow
from gradtrace_analyzer.diff.origins.dependency_graph import DependencyGraph
from gradtrace_analyzer.diff.origins.producers import Producers
from gradtrace_analyzer.diff.origins.stage_edges import StageEdges
from gradtrace_analyzer.diff.origins.step_facts import StepFacts

# A second origin among differences of rounding must stand out by what 4 lanes of a sketch can tell.
_STANDS_OUT = 4


@dataclass(frozen=True)
class MetBucket:
    """A differing bucket: the vertices of what went in, None where that is equal, and of what came out."""

    row: Difference
    before: int | None
    after: int


class RankRows:
    """What is known of a rank's rows so far, in program order.

    `waiting` are the vertices whose feeders may lie on other ranks, `buckets`, `received` and `sent` those where
    ranks meet; `sent` is by stage, microbatch and way. `accumulating` are the Nodes that accumulate, by pass, root and
    parameter, and `carried` the vertices of what the step begins with, by row: both are noted ahead.
    """

    def __init__(
        self,
        graph: DependencyGraph,
        rank: int,
        dataflow: Dataflow,
        step_facts: StepFacts,
        edges: StageEdges | None = None,
        *,
        exceeding: bool,
    ) -> None:
        self.rank = rank
        self.graph = graph
        self.edges = edges
        self.dataflow = dataflow
        self.known = step_facts
        self.exceeding = exceeding
        self.producers = Producers(dataflow, exceeding=exceeding)
        self.first_drawn: list[int] = []
        self.accumulating: dict[tuple[object, ...], Difference] = {}
        self.waiting: list[int] = []
        self.carried: dict[int, int] = {}
        self.buckets: list[MetBucket] = []
        self.received: list[tuple[Difference, int]] = []
        self.sent: dict[tuple[object, object, str], int] = {}

    def before(self) -> list[int]:
        """The vertex of all rows so far, if there are any."""
        return self.so_far("any")

    def so_far(self, *scope: object) -> list[int]:
        """The vertex of the rows so far that joined a scope, if any did."""
        return self.graph.so_far(self.rank, *scope)

    def join(self, v: int, *scope: object) -> None:
        """Let a vertex feed what asks for the scope from now on."""
        self.graph.join(v, self.rank, *scope)

    def is_apart(self, change: Change | None) -> bool:
        """Whether it differs, by more than rounding where that is asked for."""
        return change is not None and change.is_apart(exceeding=self.exceeding)

    def join_module(self, v: int, d: Difference) -> None:
        """Join the calls in the row's module and in those around it."""
        for around in enclosing(d.key["module_fqn"] or ""):
            self.join(v, "calls in", d.key["microbatch"], d.key["root"], around)
            self.join(v, "calls in", d.key["root"], around)

    def received_before(self, d: Difference, way: str) -> list[int]:
        """What the action around a row received."""
        place = self.edges.place(d) if self.edges is not None else None
        if place is None or place.microbatch is None:
            return self.so_far("received", way)
        return self.so_far("received", place.stage_index, place.microbatch, way)

    def join_place(self, v: int, d: Difference, scope: str) -> None:
        """Join a scope of the action around a row."""
        place = self.edges.place(d) if self.edges is not None else None
        if place is not None and place.microbatch is not None:
            way = "forward" if place.phase == "forward" else "backward"
            self.join(v, scope, place.stage_index, place.microbatch, way)

    def hardly(self, d: Difference) -> list[int]:
        """Among differences of rounding, what came before, where this one does not stand out."""
        before = self.before()
        if not self.exceeding or not before or d.writes is None or d.writes.error is None:
            return []
        noise = max(d.writes.tolerance, (d.reads.error or 0.0) if d.reads is not None else 0.0)
        return before if d.writes.error < _STANDS_OUT * noise else []


def way_of(d: Difference) -> str:
    """Which way an action of a stage goes: what it receives comes from the stage before, or after."""
    return "forward" if d.key["kind"] == "forward" else "backward"


def enclosing(fqn: str) -> list[str]:
    """A module and those around it, outwards to the root."""
    found = [fqn]
    while fqn:
        fqn = fqn.rpartition(".")[0]
        found.append(fqn)
    return found
