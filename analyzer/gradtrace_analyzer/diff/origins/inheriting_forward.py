"""What rows of a step's beginning, forward and optimizer can have inherited from: one function a table.

Each adds a row to the graph with what feeds it, and returns its vertex.
"""

from __future__ import annotations

from gradtrace_analyzer.diff.difference import Difference, settings_apart
from gradtrace_analyzer.diff.origins.rank_rows import RankRows, enclosing


def whatever(rows: RankRows, d: Difference) -> int:
    """Of a table that says nothing else, from anything before it."""
    return rows.graph.add(d, rows.before())


def parameter(rows: RankRows, d: Difference) -> int:
    """As the step begins, from nothing; after the optimizer, from its value, gradient and settings before."""
    root, name = d.key["root"], str(d.key["parameter_fqn"])
    owner = name.rpartition(".")[0]
    if d.key["point"] == "before":
        v = rows.graph.add(d)
        for around in enclosing(owner):
            rows.join(v, "parameters in", root, around)
        rows.join(v, "own parameters", root, owner)
        rows.join(v, "parameter", root, name)
        return v
    v = rows.graph.add(d, _of_update(rows, root, name, owner))
    rows.waiting.append(v)
    return v


def _of_update(rows: RankRows, root: object, name: str, owner: str) -> list[int]:
    feeders = [
        *rows.so_far("parameter", root, name),
        *rows.so_far("gradient", root, name),
        *rows.so_far("groups"),
        *rows.so_far("calls in", root, owner),
    ]
    if not feeders and rows.rank not in rows.known.untouched:
        feeders = rows.so_far("gradients")
    if not feeders and rows.rank in rows.known.unseen_updates:
        # Of what the optimizer saw nothing is known: it may come from anything before.
        feeders = rows.before()
    return feeders


def given(rows: RankRows, d: Difference) -> int:
    """From what came out as the same tensor, or what the stage received."""
    root, microbatch = d.key["root"], d.key["microbatch"]
    feeders = rows.producers.producers_of(d) or [
        *rows.so_far("forward"),
        *rows.received_before(d, "forward"),
    ]
    v = rows.graph.add(d, feeders)
    rows.join(v, "inputs", microbatch, root)
    rows.producers.add_outputs(v, d)
    return v


def call(rows: RankRows, d: Difference) -> int:
    """What it reads from what came out before it, what it gives from that, its calls inside and its parameters."""
    root, microbatch = d.key["root"], d.key["microbatch"]
    reads, writes = rows.is_apart(d.reads), rows.is_apart(d.writes)
    feeders = _read_by_call(rows, d) if reads else []
    if writes:
        feeders += _given_by_call(rows, d, reads=reads, is_fed=bool(feeders))
    feeders = feeders or rows.hardly(d)
    v = rows.graph.add(d, feeders)
    rows.waiting.append(v)
    if writes and not feeders and not rows.first_drawn:
        rows.first_drawn = [v]
    rows.producers.add_outputs(v, d)
    rows.join_module(v, d)
    rows.join(v, "calls", microbatch, root)
    rows.join(v, "forward")
    return v


def _read_by_call(rows: RankRows, d: Difference) -> list[int]:
    root, microbatch, fqn = d.key["root"], d.key["microbatch"], str(d.key["module_fqn"])
    feeders = rows.producers.producers_of(d)
    if not feeders and not rows.producers.is_changed_on_the_way(d):
        feeders = [
            *rows.so_far("calls", microbatch, root),
            *rows.so_far("inputs", microbatch, root),
            *rows.so_far("inputs", microbatch, None),
            *rows.received_before(d, "forward"),
            *rows.so_far("structure"),
        ]
        for around in list(enclosing(fqn))[1:]:
            feeders += rows.so_far("own parameters", root, around)
        feeders = feeders or rows.so_far("forward")
    # A call that one side alone made changes what the next one receives.
    return feeders or rows.so_far("lone calls", microbatch, root)


def _given_by_call(rows: RankRows, d: Difference, *, reads: bool, is_fed: bool) -> list[int]:
    root, fqn = d.key["root"], str(d.key["module_fqn"])
    feeders = [
        *rows.so_far("calls in", d.key["microbatch"], root, fqn),
        *rows.so_far("parameters in", root, fqn),
    ]
    if d.key["phase"] == "recompute":
        feeders += rows.so_far("calls in", root, fqn)
    return feeders if feeders or reads or is_fed else _drawn_before(rows, d)


def _drawn_before(rows: RankRows, d: Difference) -> list[int]:
    """The first forward that gave another output, where it may have drawn other numbers than before."""
    draws = (d.key["root"], d.key["module_fqn"]) in rows.known.random
    return rows.first_drawn if draws or rows.rank in rows.known.disturbed else []


def backward_pass(rows: RankRows, d: Difference) -> int:
    """Whether it reduces, from nothing; its loss from the forward."""
    index = d.key["backward_index"]
    if "ddp_sync" in d.values:
        v = rows.graph.add(d)
        rows.join(v, "sync", index)
        rows.join(v, "syncs")
        return v
    v = rows.graph.add(
        d, [*rows.so_far("forward"), *rows.so_far("noted"), *rows.so_far("structure")]
    )
    rows.join(v, "loss", index)
    rows.join(v, "losses")
    rows.join(v, "forward")
    return v


def group(rows: RankRows, d: Difference) -> int:
    """A schedule may look at the loss; what else an optimizer is set to depends on no tensor."""
    depends = set(settings_apart(d.values)) <= {"learning_rate"}
    v = rows.graph.add(d, rows.so_far("losses") if depends else ())
    rows.join(v, "groups")
    return v
