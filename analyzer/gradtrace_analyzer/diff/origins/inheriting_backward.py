"""What rows of a backward pass, of gradients and of where ranks meet can have inherited from: one function a table.

Each adds a row to the graph with what feeds it, and returns its vertex.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gradtrace_analyzer.diff.difference import Difference
from gradtrace_analyzer.diff.origins.rank_rows import MetBucket, RankRows, way_of


def node(rows: RankRows, d: Difference) -> int:
    """What arrives from Nodes before it, what leaves from that and from what it saved."""
    feeders = _of_node(rows, d) or _half_done(rows, d) or rows.hardly(d)
    v = rows.graph.add(d, feeders)
    if _gave_another_size(d):
        rows.join_place(v, d, "half done")
    rows.waiting.append(v)
    rows.producers.add_outputs(v, d)
    index = d.key["backward_index"]
    rows.join(v, "nodes", index)
    for numel in {moved.numel for moved in rows.dataflow.left(d)}:
        rows.join(v, "nodes", index, numel)
    if rows.known.pass_kinds.get((rows.rank, index)) == "grad":
        rows.join(v, "forward")
        rows.join(v, "grad passes")
    if d.key["parameter_fqn"] is not None:
        rows.join(v, "accumulated", d.key["root"], d.key["parameter_fqn"])
    return v


def _of_node(rows: RankRows, d: Difference) -> list[int]:
    name, feeders = d.key["parameter_fqn"], []
    if name is not None:
        feeders = rows.so_far("local of", d.key["backward_index"], d.key["root"], name)
    if not feeders and rows.is_apart(d.reads):
        feeders = _arriving(rows, d)
    return feeders + (_saved(rows, d) if name is None else [])


def _arriving(rows: RankRows, d: Difference) -> list[int]:
    """Where the gradients that came into a Node can have come from."""
    feeders = rows.producers.producers_of(d)
    if feeders or rows.producers.is_changed_on_the_way(d):
        return feeders
    index = d.key["backward_index"]
    for numel in {moved.numel for moved in rows.dataflow.arrived(d)}:
        feeders += rows.so_far("nodes", index, numel)
    feeders = feeders or rows.so_far("nodes", index)
    feeders += rows.so_far("loss", index)
    feeders += rows.received_before(d, "backward")
    return feeders or [*rows.so_far("forward"), *rows.so_far("structure")]


def _saved(rows: RankRows, d: Difference) -> list[int]:
    """What a Node may have saved: what its module was called with, gave, and holds."""
    root, fqn = d.key["root"], d.key["module_fqn"]
    found = rows.so_far("grad passes")
    if fqn is None:
        return [
            *found,
            *rows.so_far("loss", d.key["backward_index"]),
            *rows.so_far("forward"),
        ]
    return [
        *found,
        *rows.so_far("calls in", root, fqn),
        *rows.so_far("parameters in", root, fqn),
    ]


def _half_done(rows: RankRows, d: Difference) -> list[int]:
    """The first Node of its action that gave another number of elements too: a half of the pass was left out, or
    done twice, for all of them."""
    place = rows.edges.place(d) if rows.edges is not None else None
    if place is None or not _gave_another_size(d):
        return []
    return rows.so_far("half done", place.stage_index, place.microbatch, "backward")


def gradient(rows: RankRows, d: Difference) -> int:
    """By the point at which it was read."""
    v = _AT[d.key["point"]](rows, d)
    rows.join(v, "gradient", d.key["root"], d.key["parameter_fqn"])
    rows.join(v, "gradients")
    return v


def _carried(rows: RankRows, d: Difference) -> int:
    return rows.graph.add(d)


def _local(rows: RankRows, d: Difference) -> int:
    root, name, index = d.key["root"], d.key["parameter_fqn"], d.key["backward_index"]
    feeders = [*rows.so_far("accumulated", root, name), *rows.so_far("gradient", root, name)]
    # The row of the Node that accumulates comes after this one, which is read inside it.
    node = rows.accumulating.get((index, root, name))
    if node is not None:
        feeders += _arriving(rows, node)
    elif not feeders and (rows.rank, root, name) not in rows.known.accumulated:
        feeders = rows.before()
    elif not feeders and index:
        # Between two passes one call clears or changes .grad of many parameters.
        feeders = rows.so_far("between passes", index)
    v = rows.graph.add(d, feeders)
    if not feeders and index:
        rows.join(v, "between passes", index)
    rows.join(v, "local of", index, root, name)
    return v


def _reduced(rows: RankRows, d: Difference) -> int:
    root, name = d.key["root"], d.key["parameter_fqn"]
    feeders = rows.so_far("reduced from", root, name)
    if not feeders and (rows.rank, root, name) not in rows.known.bucketed:
        feeders = rows.so_far("gradient", root, name)
    v = rows.graph.add(d, feeders)
    rows.waiting.append(v)
    return v


def _final(rows: RankRows, d: Difference) -> int:
    root, name = d.key["root"], d.key["parameter_fqn"]
    feeders = rows.so_far("gradient", root, name) or rows.so_far("gradients")
    v = rows.graph.add(d, feeders or rows.so_far("syncs"))
    rows.waiting.append(v)
    return v


_AT: Mapping[str, Callable[[RankRows, Difference], int]] = {
    "carried": _carried,
    "local": _local,
    "reduced": _reduced,
    "final": _final,
}


def bucket(rows: RankRows, d: Difference) -> int:
    """Two vertices where what goes in differs: that, and what comes out, which other ranks feed too."""
    feeders: list[int] = []
    names = d.key["parameter_fqns"] or ()
    reads = rows.is_apart(d.reads)
    if reads:
        for name in names:
            feeders += rows.so_far("gradient", d.key["root"], name)
            feeders += rows.so_far("accumulated", d.key["root"], name)
        feeders += rows.so_far("sync", d.key["backward_index"])
    v = rows.graph.add(d, feeders)
    out = rows.graph.add(d, [v]) if reads else v
    rows.buckets.append(MetBucket(d, v if reads else None, out))
    if not reads:
        rows.waiting.append(v)
    for name in names:
        rows.join(out, "reduced from", d.key["root"], name)
    return v


def action(rows: RankRows, d: Difference) -> int:
    """What an action sent: its row comes after all that ran in it."""
    way, place = way_of(d), (d.key["stage_index"], d.key["microbatch"])
    feeders = [*rows.so_far("received", *place, way), *rows.so_far("in action", *place, way)]
    if not feeders:
        feeders = rows.so_far("forward" if way == "forward" else "any")
    v = rows.graph.add(d, feeders)
    if rows.is_apart(d.writes):
        rows.sent[(*place, way)] = v
    return v


def _gave_another_size(d: Difference) -> bool:
    sides = (
        (d.writes.baseline or {}, d.writes.candidate or {}) if d.writes is not None else ({}, {})
    )
    return sides[0].get("numel") != sides[1].get("numel")
