"""The chains of all ranks, joined where ranks meet: which rows are origins, and what each of them reached.

Ranks meet in the buckets that they reduce together, between stages of a pipeline, and in modules and Nodes that are
collectives of their own. Where a reduction was not recorded, what a rank first differs in behind it is laid at
the door of the ranks that differed before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradtrace_analyzer.diff.difference import Difference
from gradtrace_analyzer.diff.links import LOCAL_LINKS
from gradtrace_analyzer.diff.origins.chain import MetBucket, RankChain, way_of
from gradtrace_analyzer.diff.origins.dataflow import Dataflow
from gradtrace_analyzer.diff.origins.dependency_graph import Causes
from gradtrace_analyzer.diff.origins.stage_edges import StageEdges
from gradtrace_analyzer.diff.origins.step_facts import Circumstances

# Names of Nodes whose gradients come from other ranks too.
_COLLECTIVE_NODES = ("syncbatchnorm", "allreduce", "allgather", "reducescatter", "alltoall")

# Links of which one cause changes many rows at once.
_CHANGED_TOGETHER = frozenset(
    {"parameters", "inputs", "carried_gradient", "bucket", "reduced_gradient", "clip", "optimizer"}
)


def joined(
    rows: Mapping[int, Sequence[Difference]],
    dataflow: Dataflow,
    circumstances: Circumstances,
    failed: Mapping[int, bool],
    edges: StageEdges | None = None,
    *,
    exceeding: bool,
) -> Causes:
    """The graph of each rank's rows, which must be in program order.

    A `failed` rank's rows all follow its first; where it is True, it failed while no Node ran: another rank may
    be the reason.
    """
    causes = Causes()
    chains = []
    idle = []
    for rank, own in rows.items():
        chain = RankChain(causes, rank, dataflow, circumstances, edges, exceeding=exceeding)
        if rank in failed:
            first = causes.add(own[0])
            idle += [first] * failed[rank]
            for d in own[1:]:
                causes.add(d, [first])
            continue
        for d in own:
            chain.look_ahead(d)
        for d in own:
            chain.add(d)
        chains.append(chain)
    if edges is not None:
        _through_stages(causes, chains, edges)
    _through_buckets(causes, chains)
    _through_collectives(causes, chains, circumstances, exceeding)
    _through_unseen(causes, chains, circumstances, circumstances.is_whole and not failed)
    for v in idle:
        causes.feeders[v] |= {other for other in causes.origins() if other not in idle}
    _in_groups(causes)
    return causes


def _through_stages(causes: Causes, chains: Sequence[RankChain], edges: StageEdges) -> None:
    """What an action received has come from the neighbour's, where that sent something else too."""
    sent = {(chain.rank, *place): v for chain in chains for place, v in chain.sent.items()}
    for chain in chains:
        for d, v in chain.received:
            source = edges.source_of(d)
            if source is not None:
                other = sent.get((*source, d.key["microbatch"], way_of(d)))
                if other is not None:
                    causes.feeders[v].add(other)


def _through_buckets(causes: Causes, chains: Sequence[RankChain]) -> None:
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
            causes.feeders[bucket.after] |= {
                other.before for other in given if other is not bucket and other.before is not None
            }


def _through_collectives(
    causes: Causes, chains: Sequence[RankChain], known: Circumstances, exceeding: bool
) -> None:
    """Calls and Nodes that gave another value from equal ones, where another rank put another value in."""
    tables = ("module_calls", "node_events")
    reading: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for chain in chains:
        for v in chain.waiting:
            d = causes.rows[v]
            if d is None or d.table not in tables or d.reads is None:
                continue
            if d.reads.is_apart(exceeding=exceeding):
                reading.setdefault(_same_on_ranks(d), []).append((d.rank, v))
    for chain in chains:
        for v in chain.waiting:
            d = causes.rows[v]
            if d is None or d.table not in tables or causes.feeders[v]:
                continue
            name = str(d.key.get("node_name", "")).lower().replace("_", "")
            talks = (d.key["root"], d.key["module_fqn"]) in known.collective or any(
                word in name for word in _COLLECTIVE_NODES
            )
            causes.feeders[v] |= {
                other
                for rank, other in reading.get(_same_on_ranks(d), ())
                if rank != d.rank
                and (talks or any({rank, d.rank} <= set(group) for group in known.together))
            }


def _through_unseen(
    causes: Causes, chains: Sequence[RankChain], known: Circumstances, is_whole: bool
) -> None:
    """What only ranks together can change, where nothing recorded explains it and another rank differed before.

    A bucket of which all ranks put in the same is none of these, where all of them were seen.
    """
    local: dict[int, int] = {}
    reduced = set()
    for v, row in enumerate(causes.rows):
        if row is not None and (row.link in LOCAL_LINKS or row.only_in is not None):
            local.setdefault(row.rank, v)
        if row is not None and row.link in ("bucket", "reduced_gradient"):
            reduced.add(row.rank)
    for chain in chains:
        for v in chain.waiting:
            d = causes.rows[v]
            if d is None or causes.feeders[v] or d.link in LOCAL_LINKS or d.values:
                continue
            if d.table == "buckets" and is_whole:
                continue
            if d.link == "reduced_gradient":
                if (d.rank, d.key["root"], d.key["parameter_fqn"]) in known.bucketed and is_whole:
                    continue
            elif d.table != "buckets" and d.rank in reduced | set(local):
                continue
            causes.feeders[v] |= {other for rank, other in local.items() if rank != d.rank}


def _in_groups(causes: Causes) -> None:
    """Let what one cause changes many of follow the first of its kind: parameters, reduced gradients, settings."""
    firsts: dict[tuple[object, ...], int] = {}
    for v in causes.origins():
        d = causes.rows[v]
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
            causes.feeders[v].add(first)


def _same_on_ranks(d: Difference) -> tuple[object, ...]:
    return (d.table, *(str(d.key[k]) for k in sorted(d.key)))
