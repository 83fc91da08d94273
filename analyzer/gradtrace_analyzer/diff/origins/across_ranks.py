"""The chains of all ranks, joined where ranks meet: which rows are origins, and what each of them reached.

Ranks meet in the buckets that they reduce together, between stages of a pipeline, and in modules and Nodes that are
collectives of their own. Where a reduction was not recorded, what a rank first differs in behind it is laid at
the door of the ranks that differed before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradtrace_analyzer.diff.difference import Difference
from gradtrace_analyzer.diff.links import LOCAL_LINKS
from gradtrace_analyzer.diff.origins.chain import RankChain
from gradtrace_analyzer.diff.origins.dataflow import Dataflow
from gradtrace_analyzer.diff.origins.dependency_graph import DependencyGraph
from gradtrace_analyzer.diff.origins.rank_rows import MetBucket, way_of
from gradtrace_analyzer.diff.origins.stage_edges import StageEdges
from gradtrace_analyzer.diff.origins.step_facts import StepFacts

# Names of Nodes whose gradients come from other ranks too.
_COLLECTIVE_NODES = ("syncbatchnorm", "allreduce", "allgather", "reducescatter", "alltoall")

# Links of which one cause changes many rows at once.
_CHANGED_TOGETHER = frozenset(
    {"parameters", "inputs", "carried_gradient", "bucket", "reduced_gradient", "clip", "optimizer"}
)


def joined(
    rows: Mapping[int, Sequence[Difference]],
    dataflow: Dataflow,
    step_facts: StepFacts,
    failed: Mapping[int, bool],
    edges: StageEdges | None = None,
    *,
    exceeding: bool,
) -> DependencyGraph:
    """The graph of each rank's rows, which must be in program order.

    A `failed` rank's rows all follow its first; where it is True, it failed while no Node ran: another rank may
    be the reason.
    """
    graph = DependencyGraph()
    chains = []
    idle = []
    for rank, own in rows.items():
        chain = RankChain(graph, rank, dataflow, step_facts, edges, exceeding=exceeding)
        if rank in failed:
            first = graph.add(own[0])
            idle += [first] * failed[rank]
            for d in own[1:]:
                graph.add(d, [first])
            continue
        for d in own:
            chain.look_ahead(d)
        for d in own:
            chain.add(d)
        chains.append(chain)
    if edges is not None:
        _through_stages(graph, chains, edges)
    _through_buckets(graph, chains)
    _through_collectives(graph, chains, step_facts, exceeding)
    _through_unseen(graph, chains, step_facts, step_facts.is_whole and not failed)
    for v in idle:
        graph.feeders[v] |= {other for other in graph.origins() if other not in idle}
    _in_groups(graph)
    return graph


def _through_stages(graph: DependencyGraph, chains: Sequence[RankChain], edges: StageEdges) -> None:
    """What an action received has come from the neighbour's, where that sent something else too."""
    sent = {(chain.rank, *place): v for chain in chains for place, v in chain.sent.items()}
    for chain in chains:
        for d, v in chain.received:
            source = edges.source_of(d)
            if source is not None:
                other = sent.get((*source, d.key["microbatch"], way_of(d)))
                if other is not None:
                    graph.feeders[v].add(other)


def _through_buckets(graph: DependencyGraph, chains: Sequence[RankChain]) -> None:
    met: dict[tuple[str, ...], list[MetBucket]] = {}
    for chain in chains:
        for bucket in chain.buckets:
            key = bucket.row.key
            place = tuple(
                str(key[k]) for k in ("backward_index", "root", "module_fqn", "parameter_fqns")
            )
            met.setdefault(place, []).append(bucket)
    for together in met.values():
        given = [bucket for bucket in together if bucket.before is not None]
        for bucket in together:
            graph.feeders[bucket.after] |= {
                other.before for other in given if other is not bucket and other.before is not None
            }


def _through_collectives(
    graph: DependencyGraph, chains: Sequence[RankChain], known: StepFacts, exceeding: bool
) -> None:
    """Calls and Nodes that gave another value from equal ones, where another rank put another value in."""
    tables = ("module_calls", "node_events")
    reading: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for chain in chains:
        for v in chain.waiting:
            d = graph.rows[v]
            if d is None or d.table not in tables or d.reads is None:
                continue
            if d.reads.is_apart(exceeding=exceeding):
                reading.setdefault(_same_on_ranks(d), []).append((d.rank, v))
    for chain in chains:
        for v in chain.waiting:
            d = graph.rows[v]
            if d is None or d.table not in tables or graph.feeders[v]:
                continue
            name = str(d.key.get("node_name", "")).lower().replace("_", "")
            talks = (d.key["root"], d.key["module_fqn"]) in known.collective or any(
                word in name for word in _COLLECTIVE_NODES
            )
            graph.feeders[v] |= {
                other
                for rank, other in reading.get(_same_on_ranks(d), ())
                if rank != d.rank
                and (talks or any({rank, d.rank} <= set(group) for group in known.together))
            }


def _through_unseen(
    graph: DependencyGraph, chains: Sequence[RankChain], known: StepFacts, is_whole: bool
) -> None:
    """What only ranks together can change, where nothing recorded explains it and another rank differed before.

    A bucket of which all ranks put in the same is none of these, where all of them were seen.
    """
    local: dict[int, int] = {}
    reduced = set()
    for v, row in enumerate(graph.rows):
        if row is not None and (row.link in LOCAL_LINKS or row.only_in is not None):
            local.setdefault(row.rank, v)
        if row is not None and row.link in ("bucket", "reduced_gradient"):
            reduced.add(row.rank)
    for chain in chains:
        for v in chain.waiting:
            d = graph.rows[v]
            if d is None or graph.feeders[v] or d.link in LOCAL_LINKS or d.values:
                continue
            if d.table == "buckets" and is_whole:
                continue
            if d.link == "reduced_gradient":
                if (d.rank, d.key["root"], d.key["parameter_fqn"]) in known.bucketed and is_whole:
                    continue
            elif d.table != "buckets" and d.rank in reduced | set(local):
                continue
            graph.feeders[v] |= {other for rank, other in local.items() if rank != d.rank}


def _in_groups(graph: DependencyGraph) -> None:
    """Let what one cause changes many of follow the first of its kind: parameters, reduced gradients, settings."""
    firsts: dict[tuple[object, ...], int] = {}
    for v in graph.origins():
        d = graph.rows[v]
        if d is None or d.link not in _CHANGED_TOGETHER:
            continue
        if d.only_in is not None and d.link != "carried_gradient":
            continue
        kind: tuple[object, ...] = (d.rank, d.link, d.table, *sorted(d.values))
        if d.table == "inputs":
            kind += (d.key["microbatch"], d.key["root"], d.key["call_index"])
        if d.table == "buckets" and d.reads is not None and d.reads.differs:
            continue
        first = firsts.setdefault(kind, v)
        if first != v:
            graph.feeders[v].add(first)


def _same_on_ranks(d: Difference) -> tuple[object, ...]:
    return (d.table, *(str(d.key[k]) for k in sorted(d.key)))
