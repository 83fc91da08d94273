"""What each differing row of a rank's step can have inherited from, within the rank: by what depends on what.

Where a fingerprint shows the way, that is the only one. Elsewhere a row can have inherited from everything before
it that its kind of row reads: a Node from the Nodes before it in its pass, and, for what it saved, from the forward
calls and parameters of its module. So a row that nothing feeds is an origin, however late it comes; a fault behind
another one is not seen.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradtrace_analyzer.diff.difference import Change, Difference, settings_apart
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


class RankChain:
    """Adds the rows of one rank to a graph, in program order, each with what feeds it inside the rank.

    `waiting` are the vertices whose feeders may lie on other ranks, `buckets`, `received` and `sent` those where
    ranks meet; `sent` is by stage, microbatch and way.
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
        self._graph = graph
        self._rank = rank
        self._edges = edges
        self._dataflow = dataflow
        self._known = step_facts
        self._exceeding = exceeding
        self._producers = Producers(dataflow, exceeding=exceeding)
        self._first_drawn: list[int] = []
        self._accumulating: dict[tuple[object, ...], Difference] = {}
        self.waiting: list[int] = []
        self._carried: dict[int, int] = {}
        self.buckets: list[MetBucket] = []
        self.received: list[tuple[Difference, int]] = []
        self.sent: dict[tuple[object, object, str], int] = {}

    def add(self, d: Difference) -> int:
        """Add the next row of the rank, in program order, and return its vertex in the graph."""
        before = self._before()
        if id(d) in self._carried:
            v = self._carried[id(d)]
        elif d.only_in is not None and d.link != "carried_gradient":
            v = self._graph.add(d, before)
            self._join(v, "structure")
            if d.table in ("module_calls", "node_events"):
                self._join_module(v, d)
            if d.table == "module_calls":
                self._join(v, "lone calls", d.key["microbatch"], d.key["root"])
            if d.table == "gradients":
                self._join(v, "gradient", d.key["root"], d.key["parameter_fqn"])
                self._join(v, "gradients")
        elif d.table == "parameters":
            v = self._parameter(d)
        elif d.table == "inputs":
            v = self._input(d)
        elif d.table == "module_calls":
            v = self._call(d)
        elif d.table == "backward_passes":
            v = self._pass(d)
        elif d.table == "node_events":
            v = self._node(d)
        elif d.table == "gradients":
            v = self._gradient(d)
        elif d.table == "buckets":
            v = self._bucket(d)
        elif d.table == "stage_events":
            v = self._stage(d)
        else:
            # A schedule may look at the loss; what else an optimizer is set to depends on no tensor.
            depends = set(settings_apart(d.values)) <= {"learning_rate"}
            v = self._graph.add(d, self._so_far("losses") if depends else ())
            self._join(v, "groups")
        if self._known.is_filtered and not self._graph.feeders[v]:
            self._graph.feeders[v] |= set(before)
        self._join(v, "any")
        self._join_place(v, d, "in action")
        return v

    def _before(self) -> list[int]:
        return self._so_far("any")

    def _so_far(self, *scope: object) -> list[int]:
        return self._graph.so_far(self._rank, *scope)

    def _join(self, v: int, *scope: object) -> None:
        self._graph.join(v, self._rank, *scope)

    def _is_apart(self, change: Change | None) -> bool:
        return change is not None and change.is_apart(exceeding=self._exceeding)

    def _parameter(self, d: Difference) -> int:
        root, name = d.key["root"], str(d.key["parameter_fqn"])
        owner = name.rpartition(".")[0]
        if d.key["point"] == "before":
            v = self._graph.add(d)
            for around in enclosing(owner):
                self._join(v, "parameters in", root, around)
            self._join(v, "own parameters", root, owner)
            self._join(v, "parameter", root, name)
            return v
        feeders = [
            *self._so_far("parameter", root, name),
            *self._so_far("gradient", root, name),
            *self._so_far("groups"),
            *self._so_far("calls in", root, owner),
        ]
        if not feeders and self._rank not in self._known.untouched:
            feeders = self._so_far("gradients")
        if not feeders and self._rank in self._known.unseen_updates:
            # Of what the optimizer saw nothing is known: it may come from anything before.
            feeders = self._before()
        v = self._graph.add(d, feeders)
        self.waiting.append(v)
        return v

    def _input(self, d: Difference) -> int:
        root, microbatch = d.key["root"], d.key["microbatch"]
        feeders = self._producers.producers_of(d) or [
            *self._so_far("forward"),
            *self._received(d, "forward"),
        ]
        v = self._graph.add(d, feeders)
        self._join(v, "inputs", microbatch, root)
        self._producers.add_outputs(v, d)
        return v

    def _call(self, d: Difference) -> int:
        root, microbatch, fqn = d.key["root"], d.key["microbatch"], str(d.key["module_fqn"])
        feeders: list[int] = []
        reads, writes = self._is_apart(d.reads), self._is_apart(d.writes)
        if reads:
            feeders = self._producers.producers_of(d)
            if not feeders and not self._producers.is_changed_on_the_way(d):
                feeders = [
                    *self._so_far("calls", microbatch, root),
                    *self._so_far("inputs", microbatch, root),
                    *self._so_far("inputs", microbatch, None),
                    *self._received(d, "forward"),
                    *self._so_far("structure"),
                ]
                for around in list(enclosing(fqn))[1:]:
                    feeders += self._so_far("own parameters", root, around)
                feeders = feeders or self._so_far("forward")
            # A call that one side alone made changes what the next one receives.
            feeders = feeders or self._so_far("lone calls", microbatch, root)
        if writes:
            feeders += self._so_far("calls in", microbatch, root, fqn)
            feeders += self._so_far("parameters in", root, fqn)
            if d.key["phase"] == "recompute":
                feeders += self._so_far("calls in", root, fqn)
            if not reads and not feeders:
                feeders = self._drawn_before(d)
        feeders = feeders or self._hardly(d)
        v = self._graph.add(d, feeders)
        self.waiting.append(v)
        if writes and not feeders and not self._first_drawn:
            self._first_drawn = [v]
        self._producers.add_outputs(v, d)
        self._join_module(v, d)
        self._join(v, "calls", microbatch, root)
        self._join(v, "forward")
        return v

    def _join_module(self, v: int, d: Difference) -> None:
        for around in enclosing(d.key["module_fqn"] or ""):
            self._join(v, "calls in", d.key["microbatch"], d.key["root"], around)
            self._join(v, "calls in", d.key["root"], around)

    def _drawn_before(self, d: Difference) -> list[int]:
        """The first forward that gave another output, where it may have drawn other numbers than before."""
        draws = (d.key["root"], d.key["module_fqn"]) in self._known.random
        return self._first_drawn if draws or self._rank in self._known.disturbed else []

    def _pass(self, d: Difference) -> int:
        index = d.key["backward_index"]
        if "ddp_sync" in d.values:
            v = self._graph.add(d)
            self._join(v, "sync", index)
            self._join(v, "syncs")
            return v
        v = self._graph.add(
            d, [*self._so_far("forward"), *self._so_far("noted"), *self._so_far("structure")]
        )
        self._join(v, "loss", index)
        self._join(v, "losses")
        self._join(v, "forward")
        return v

    def _node(self, d: Difference) -> int:
        index, root = d.key["backward_index"], d.key["root"]
        accumulates = d.key["parameter_fqn"] is not None
        feeders = (
            self._so_far("local of", index, root, d.key["parameter_fqn"]) if accumulates else []
        )
        if not feeders and self._is_apart(d.reads):
            feeders = self._arriving(d)
        if not accumulates:
            feeders += self._saved(d)
        feeders = feeders or self._half_done(d) or self._hardly(d)
        v = self._graph.add(d, feeders)
        if _gave_another_size(d):
            self._join_place(v, d, "half done")
        self.waiting.append(v)
        self._producers.add_outputs(v, d)
        self._join(v, "nodes", index)
        for numel in {moved.numel for moved in self._dataflow.left(d)}:
            self._join(v, "nodes", index, numel)
        if self._known.pass_kinds.get((self._rank, index)) == "grad":
            self._join(v, "forward")
            self._join(v, "grad passes")
        if accumulates:
            self._join(v, "accumulated", root, d.key["parameter_fqn"])
        return v

    def _arriving(self, d: Difference) -> list[int]:
        """Where the gradients that came into a Node can have come from."""
        feeders = self._producers.producers_of(d)
        if feeders or self._producers.is_changed_on_the_way(d):
            return feeders
        index = d.key["backward_index"]
        for numel in {moved.numel for moved in self._dataflow.arrived(d)}:
            feeders += self._so_far("nodes", index, numel)
        feeders = feeders or self._so_far("nodes", index)
        feeders += self._so_far("loss", index)
        feeders += self._received(d, "backward")
        return feeders or [*self._so_far("forward"), *self._so_far("structure")]

    def _saved(self, d: Difference) -> list[int]:
        """What a Node may have saved: what its module was called with, gave, and holds."""
        root, fqn = d.key["root"], d.key["module_fqn"]
        found = self._so_far("grad passes")
        if fqn is None:
            return [
                *found,
                *self._so_far("loss", d.key["backward_index"]),
                *self._so_far("forward"),
            ]
        return [
            *found,
            *self._so_far("calls in", root, fqn),
            *self._so_far("parameters in", root, fqn),
        ]

    def _gradient(self, d: Difference) -> int:
        root, name, point = d.key["root"], d.key["parameter_fqn"], d.key["point"]
        feeders: list[int] = []
        if point == "carried":
            v = self._graph.add(d)
        elif point == "local":
            feeders = [
                *self._so_far("accumulated", root, name),
                *self._so_far("gradient", root, name),
            ]
            # The row of the Node that accumulates comes after this one, which is read inside it.
            node = self._accumulating.get((d.key["backward_index"], root, name))
            if node is not None:
                feeders += self._arriving(node)
            elif not feeders and (self._rank, root, name) not in self._known.accumulated:
                feeders = self._before()
            elif not feeders and d.key["backward_index"]:
                # Between two passes one call clears or changes .grad of many parameters.
                feeders = self._so_far("between passes", d.key["backward_index"])
            alone = not feeders
            v = self._graph.add(d, feeders)
            if alone and d.key["backward_index"]:
                self._join(v, "between passes", d.key["backward_index"])
            self._join(v, "local of", d.key["backward_index"], root, name)
        elif point == "reduced":
            feeders = self._so_far("reduced from", root, name)
            if not feeders and (self._rank, root, name) not in self._known.bucketed:
                feeders = self._so_far("gradient", root, name)
            v = self._graph.add(d, feeders)
            self.waiting.append(v)
        else:
            feeders = self._so_far("gradient", root, name) or self._so_far("gradients")
            v = self._graph.add(d, feeders or self._so_far("syncs"))
            self.waiting.append(v)
        self._join(v, "gradient", root, name)
        self._join(v, "gradients")
        return v

    def _bucket(self, d: Difference) -> int:
        """Two vertices where what goes in differs: that, and what comes out, which other ranks feed too."""
        feeders: list[int] = []
        names = d.key["parameter_fqns"] or ()
        reads = self._is_apart(d.reads)
        if reads:
            for name in names:
                feeders += self._so_far("gradient", d.key["root"], name)
                feeders += self._so_far("accumulated", d.key["root"], name)
            feeders += self._so_far("sync", d.key["backward_index"])
        v = self._graph.add(d, feeders)
        out = self._graph.add(d, [v]) if reads else v
        self.buckets.append(MetBucket(d, v if reads else None, out))
        if not reads:
            self.waiting.append(v)
        for name in names:
            self._join(out, "reduced from", d.key["root"], name)
        return v

    def _stage(self, d: Difference) -> int:
        """What an action sent: its row comes after all that ran in it."""
        way, place = way_of(d), (d.key["stage_index"], d.key["microbatch"])
        feeders = [*self._so_far("received", *place, way), *self._so_far("in action", *place, way)]
        if not feeders:
            feeders = self._so_far("forward" if way == "forward" else "any")
        v = self._graph.add(d, feeders)
        if self._is_apart(d.writes):
            self.sent[(*place, way)] = v
        return v

    def _received(self, d: Difference, way: str) -> list[int]:
        """What the action around a row received."""
        place = self._edges.place(d) if self._edges is not None else None
        if place is None or place.microbatch is None:
            return self._so_far("received", way)
        return self._so_far("received", place.stage_index, place.microbatch, way)

    def _join_place(self, v: int, d: Difference, scope: str) -> None:
        """Join a scope of the action around a row."""
        place = self._edges.place(d) if self._edges is not None else None
        if place is not None and place.microbatch is not None:
            way = "forward" if place.phase == "forward" else "backward"
            self._join(v, scope, place.stage_index, place.microbatch, way)

    def _half_done(self, d: Difference) -> list[int]:
        """The first Node of its action that gave another number of elements too: a half of the pass was left out, or
        done twice, for all of them."""
        place = self._edges.place(d) if self._edges is not None else None
        if place is None or not _gave_another_size(d):
            return []
        return self._so_far("half done", place.stage_index, place.microbatch, "backward")

    def look_ahead(self, d: Difference) -> None:
        """Take note of a row whose place in the order is not that of its cause; to be called before `add`."""
        if d.table == "node_events" and d.key["parameter_fqn"] is not None and d.only_in is None:
            place = (d.key["backward_index"], d.key["root"], d.key["parameter_fqn"])
            self._accumulating[place] = d
        # What a step begins with comes before all of it, wherever its row stands.
        if d.link == "carried_gradient":
            self._carried[id(d)] = self._gradient(d)
        if d.table != "stage_events":
            return
        # What an action received comes before all that ran in it.
        if self._is_apart(d.reads) and d.only_in is None:
            v = self._graph.add(d)
            self.received.append((d, v))
            self._join(v, "received", d.key["stage_index"], d.key["microbatch"], way_of(d))
            self._join(v, "received", way_of(d))

    def _hardly(self, d: Difference) -> list[int]:
        """Among differences of rounding, what came before, where this one does not stand out."""
        before = self._before()
        if not self._exceeding or not before or d.writes is None or d.writes.error is None:
            return []
        noise = max(d.writes.tolerance, (d.reads.error or 0.0) if d.reads is not None else 0.0)
        return before if d.writes.error < _STANDS_OUT * noise else []


def _gave_another_size(d: Difference) -> bool:
    sides = (
        (d.writes.baseline or {}, d.writes.candidate or {}) if d.writes is not None else ({}, {})
    )
    return sides[0].get("numel") != sides[1].get("numel")


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
