"""Nodes that a pass of one side alone ran again, and what arrived at them then and before.

A graph that is kept may be run in parts: first for the inputs, then for the weights. At a Node of both parts the
same gradient must arrive; where a multiple of it does, a path was counted more than once.
"""

from __future__ import annotations

from dataclasses import dataclass

import duckdb

from gradtrace_analyzer.diff.difference import LARGEST_FACTOR
from gradtrace_analyzer.diff.explanations.explanation import Context, Explainer, Explanation
from gradtrace_analyzer.numerics.sketches import factor_between
from gradtrace_analyzer.words.nouns import SIDES


@dataclass(frozen=True)
class RerunNode:
    """A Node that ran in backward pass `before` and again in `backward_index`, which `side` alone has.

    What arrives is `times` that of before, though `equal_count` other Nodes of the pass receive the same again.
    """

    side: str
    step: int
    rank: int
    before: int
    backward_index: int
    node_name: str
    root: int | None
    module_fqn: str | None
    call_index: int | None
    times: float
    equal_count: int


@dataclass(frozen=True)
class RerunNodes(Explanation):
    """Those of the step, the first of each pass."""

    nodes: tuple[RerunNode, ...]


def repeated(connection: duckdb.DuckDBPyConnection, step: int) -> list[RerunNode]:
    """Of each pass that one side alone has in the step, the first Node that receives a multiple.

    Only where another Node of the pass receives the same bits again: then it is not the whole pass that is scaled.
    """
    found: dict[tuple[str, int, int], RerunNode] = {}
    alone = "SELECT 1 FROM differing_backward_passes WHERE step = ? AND only_in IS NOT NULL LIMIT 1"
    if connection.execute(alone, [step]).fetchone() is None:
        return []
    for side, other in (SIDES, SIDES[::-1]):
        lone = connection.execute(
            f"SELECT DISTINCT rank FROM {side}.backward_passes ANTI JOIN {other}.backward_passes "
            "USING (rank, step, backward_index) SEMI JOIN common USING (rank, step) WHERE step = ?",
            [step],
        ).fetchall()
        if not lone:
            continue
        ranks = ", ".join(str(rank) for (rank,) in lone)
        pairs = connection.execute(
            "SELECT n.rank, n.backward_index, o.backward_index, n.node_name, n.root, n.module_fqn, "
            "n.call_index, n.grad_output_fingerprint = o.grad_output_fingerprint, o.grad_output_sketch, "
            f"n.grad_output_sketch FROM {side}.node_events n JOIN {side}.backward_passes p "
            f"USING (rank, step, backward_index) ANTI JOIN {other}.backward_passes q "
            "ON q.rank = n.rank AND q.step = n.step AND q.backward_index = n.backward_index "
            f"JOIN {side}.node_events o ON o.rank = n.rank AND o.step = n.step "
            "AND o.backward_index < n.backward_index AND o.autograd_seq = n.autograd_seq "
            "AND o.node_name = n.node_name AND o.thread = n.thread AND o.parameter_fqn IS NULL "
            f"WHERE n.step = ? AND o.step = ? AND n.rank IN ({ranks}) "
            "AND p.parent_backward_index IS NULL "
            "ORDER BY n.rank, n.backward_index, n.event_index, o.backward_index DESC",
            [step, step],
        ).fetchall()
        for rank, index, before, name, root, module, call, is_equal, old, new in pairs:
            if is_equal or (side, rank, index) in found:
                continue
            times = factor_between(old, new, most=LARGEST_FACTOR)
            equal = len({p[3:7] for p in pairs if p[:2] == (rank, index) and p[7]})
            if times is not None and equal:
                place = (before, index, name, root, module, call)
                found[side, rank, index] = RerunNode(side, step, rank, *place, times, equal)
    return list(found.values())


def _explain(context: Context) -> RerunNodes | None:
    nodes = repeated(context.connection, context.origins[0].step)
    return RerunNodes(tuple(nodes)) if nodes else None


EXPLAINER = Explainer(RerunNodes, _explain)
