"""Nodes of one module call in two runs whose code is not the same: which is which.

Nodes pair by name and occurrence. One more `MulBackward0` in the middle of a call shifts those made after it, so where
the Nodes of a call are not the same on both sides they are aligned as two sequences, in the order in which forward made
them, and the candidate's occurrences are renumbered to the baseline's. Sizes, and in the first such call the gradients'
bits, tell equal names apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import duckdb

from gradtrace_analyzer.words.nouns import SIDES

# Beyond this many cells the alignment is left to a heuristic.
_MOST_CELLS = 1_000_000
_SAME_NAME, _SAME_SIZE, _SAME_BITS = 1, 4, 6

_GROUP = ("rank", "step", "microbatch", "backward_index", "root", "module_fqn", "call_index")

_SHIFTED = f"""
CREATE OR REPLACE TEMP TABLE shifted_call AS
SELECT DISTINCT rank, step, {", ".join(f"key_{name} AS {name}" for name in _GROUP[2:])}
FROM paired_node_events WHERE key_parameter_fqn IS NULL AND (
    (only_in IS NOT NULL AND key_occurrence > 0)
    OR (only_in IS NULL AND (reads_b_numel <> reads_c_numel OR writes_b_numel <> writes_c_numel)))
"""

_SAME_GROUP = " AND ".join(f"{{a}}.{name} IS NOT DISTINCT FROM {{b}}.{name}" for name in _GROUP[4:])


@dataclass(frozen=True)
class MadeNode:
    """A Node of a call, in the order in which forward made them."""

    name: str
    size: int | None
    bits: tuple[int | None, int | None] = (None, None)


def realign(connection: duckdb.DuckDBPyConnection) -> bool:
    """Renumber the candidate's Nodes where the calls' Nodes are not the same. Whether any row was renumbered.

    `paired_node_events` says where to look, and has to be made again afterwards.
    """
    connection.execute(_SHIFTED)
    if connection.execute("SELECT 1 FROM shifted_call LIMIT 1").fetchone() is None:
        return False
    for side in SIDES:
        connection.execute(_sequences(side))
    on = " AND ".join(f"b.{name} = c.{name}" for name in _GROUP[:4])
    same = _SAME_GROUP.format(a="b", b="c")
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE call_pair AS SELECT dense_rank() OVER (ORDER BY b.names, b.sizes, c.names, "
        f"c.sizes) AS pair, b.* FROM sequence_baseline b JOIN sequence_candidate c ON {on} AND {same}"
    )
    examples = connection.execute(
        "SELECT pair, b.names, b.sizes, b.arrived, b.given, c.names, c.sizes, c.arrived, c.given FROM ("
        "SELECT *, row_number() OVER (PARTITION BY pair ORDER BY step, rank) AS nth FROM call_pair) b "
        f"JOIN sequence_candidate c ON {on} AND {same} WHERE nth = 1"
    ).fetchall()
    changes: list[tuple[int, str, int, int]] = []
    for pair, *both in examples:
        old, new = (
            [MadeNode(n, s, (a, g)) for n, s, a, g in zip(*lists, strict=True)]
            for lists in (both[:4], both[4:])
        )
        changes += [(pair, *change) for change in renumbered(old, new)]
    if not changes:
        return False
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE renumbering (pair BIGINT, node_name VARCHAR, occurrence INTEGER, was INTEGER)"
    )
    connection.executemany("INSERT INTO renumbering VALUES (?, ?, ?, ?)", changes)
    connection.execute(
        f"CREATE OR REPLACE TEMP TABLE renumbered AS SELECT {', '.join(_GROUP)}, node_name, occurrence, was "
        "FROM call_pair JOIN renumbering USING (pair)"
    )
    _show_renumbered(connection)
    return True


def forget_numbers(connection: duckdb.DuckDBPyConnection) -> None:
    """Show the candidate's Nodes as they were numbered again: other steps are opened."""
    shown = connection.execute(
        "SELECT 1 FROM duckdb_views() WHERE schema_name = 'candidate' AND view_name = 'node_events_as_numbered'"
    ).fetchone()
    if shown is not None:
        connection.execute("DROP VIEW candidate.node_events")
        connection.execute("ALTER VIEW candidate.node_events_as_numbered RENAME TO node_events")


def _sequences(side: str) -> str:
    """The statement that lists the Nodes of each shifted call, in the order in which forward made them."""
    keys = ", ".join(f"n.{name}" for name in _GROUP)
    order = "ORDER BY autograd_seq, event_index DESC"
    return (
        f"CREATE OR REPLACE TEMP TABLE sequence_{side} AS SELECT {keys}, list(node_name {order}) AS names, "
        f"list(grad_output_numel {order}) AS sizes, list(grad_output_fingerprint {order}) AS arrived, "
        f"list(grad_input_fingerprint {order}) AS given FROM {side}.node_events n JOIN shifted_call s ON "
        + " AND ".join(f"n.{name} = s.{name}" for name in _GROUP[:4])
        + f" AND {_SAME_GROUP.format(a='n', b='s')} WHERE n.parameter_fqn IS NULL "
        f"AND n.outcome IS DISTINCT FROM 'running' GROUP BY {keys}"
    )


def _show_renumbered(connection: duckdb.DuckDBPyConnection) -> None:
    """Put a view over the candidate's Nodes that shows the new numbers."""
    names = [row[0] for row in connection.execute("DESCRIBE candidate.node_events").fetchall()]
    connection.execute("ALTER VIEW candidate.node_events RENAME TO node_events_as_numbered")
    shown = ", ".join(
        "coalesce(r.occurrence, t.occurrence) AS occurrence"
        if name == "occurrence"
        else f"t.{name}"
        for name in names
    )
    connection.execute(
        f"CREATE VIEW candidate.node_events AS SELECT {shown} FROM candidate.node_events_as_numbered t "
        "LEFT JOIN renumbered r ON "
        + " AND ".join(f"r.{name} = t.{name}" for name in _GROUP[:4])
        + f" AND {_SAME_GROUP.format(a='r', b='t')} AND r.node_name = t.node_name AND r.was = t.occurrence "
        "AND t.parameter_fqn IS NULL"
    )


def renumbered(
    baseline: Sequence[MadeNode], candidate: Sequence[MadeNode]
) -> list[tuple[str, int, int]]:
    """(name, new occurrence, old one) of the candidate's Nodes whose number changes; new ones follow the baseline's."""
    partner = dict((c, b) for b, c in aligned(baseline, candidate))
    of_baseline, counts = _occurrences(baseline)
    of_candidate, _ = _occurrences(candidate)
    found = []
    for place, node in enumerate(candidate):
        if place in partner:
            new = of_baseline[partner[place]]
        else:
            new = counts[node.name]
            counts[node.name] += 1
        if new != of_candidate[place]:
            found.append((node.name, new, of_candidate[place]))
    return found


def _occurrences(nodes: Sequence[MadeNode]) -> tuple[list[int], Counter[str]]:
    counts: Counter[str] = Counter()
    found = []
    for node in nodes:
        found.append(counts[node.name])
        counts[node.name] += 1
    return found, counts


def aligned(baseline: Sequence[MadeNode], candidate: Sequence[MadeNode]) -> list[tuple[int, int]]:
    """Places of both sequences that are the same Node: of equal names, in order, as alike as can be."""
    if len(baseline) * len(candidate) > _MOST_CELLS:
        old, new = ([(n.name, n.size) for n in side] for side in (baseline, candidate))
        blocks = SequenceMatcher(a=old, b=new, autojunk=False).get_matching_blocks()
        return [(m.a + n, m.b + n) for m in blocks for n in range(m.size)]
    best = [[0] * (len(candidate) + 1) for _ in range(len(baseline) + 1)]
    for i in range(len(baseline) - 1, -1, -1):
        row, below = best[i], best[i + 1]
        for j in range(len(candidate) - 1, -1, -1):
            here = _likeness(baseline[i], candidate[j])
            row[j] = max(below[j], row[j + 1], below[j + 1] + here if here else 0)
    found, i, j = [], 0, 0
    while i < len(baseline) and j < len(candidate):
        here = _likeness(baseline[i], candidate[j])
        if here and best[i][j] == best[i + 1][j + 1] + here:
            found.append((i, j))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i][j + 1]:
            j += 1
        else:
            i += 1
    return found


def _likeness(a: MadeNode, b: MadeNode) -> int:
    if a.name != b.name:
        return 0
    same = sum(x is not None and x == y for x, y in zip(a.bits, b.bits, strict=True))
    return _SAME_NAME + _SAME_SIZE * (a.size == b.size) + _SAME_BITS * same
