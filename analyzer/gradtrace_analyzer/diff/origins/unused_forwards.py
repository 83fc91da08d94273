"""Forwards of a step from which no gradient came back: what differs in them can have spoilt no gradient."""

from __future__ import annotations

import duckdb


def unused_forwards(
    connection: duckdb.DuckDBPyConnection, step: int
) -> dict[int, list[tuple[float, float]]]:
    """By rank, the stretches of the step's program order, on the baseline's side, that hold a root's forward
    of which no accumulating backward pass ran a Node, with the `autograd.grad` calls right after it."""
    calls = connection.execute(
        "SELECT rank, record_index - s.first, depth = 0, EXISTS ("
        "SELECT 1 FROM baseline.node_events n JOIN baseline.backward_passes p "
        "USING (rank, step, backward_index) WHERE p.kind = 'backward' AND n.step = ? "
        "AND n.rank = c.rank AND n.step = c.step "
        "AND n.root = c.root AND n.module_fqn = c.module_fqn AND n.call_index = c.call_index "
        "AND n.microbatch >= c.microbatch AND NOT EXISTS (SELECT 1 FROM baseline.module_calls l "
        "WHERE l.step = ? AND l.rank = c.rank AND l.step = c.step AND l.root = c.root "
        "AND l.module_fqn = c.module_fqn AND l.call_index = c.call_index AND l.phase = 'forward' "
        "AND l.microbatch > c.microbatch AND l.microbatch <= n.microbatch)) "
        "FROM baseline.module_calls c JOIN step_start s USING (rank, step) "
        "WHERE s.side = 'baseline' AND c.phase = 'forward' AND step = ?",
        [step, step, step],
    ).fetchall()
    passes = connection.execute(
        "SELECT rank, record_index - s.first, kind FROM baseline.backward_passes p "
        "JOIN step_start s USING (rank, step) WHERE s.side = 'baseline' AND step = ?",
        [step],
    ).fetchall()
    found: dict[int, list[tuple[float, float]]] = {}
    for rank in {rank for rank, *_ in calls}:
        begin, is_used, is_open = 0.0, False, False
        rows = [row[1:] for row in (*calls, *passes) if row[0] == rank]
        for place, *what in sorted(rows):  # a call's row comes after those inside it
            if len(what) == 1:
                is_open = is_open and what[0] == "grad"
                if is_open:
                    found[rank][-1] = (found[rank][-1][0], float(place))
                begin = place + 0.5
                continue
            is_root, has_nodes = what
            is_used = is_used or has_nodes
            if is_root:
                is_open = not is_used
                if is_open:
                    found.setdefault(rank, []).append((begin, float(place)))
                begin, is_used = place + 0.5, False
    return found
