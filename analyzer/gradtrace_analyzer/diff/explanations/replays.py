"""Whether the Node of an origin disagrees with itself: what was recorded of running it again, on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import duckdb

from gradtrace_analyzer.diff.difference import Difference
from gradtrace_analyzer.diff.explanations.explanation import Context, Explainer, Explanation
from gradtrace_analyzer.diff.origin import NodeOrigin, Origin, Replay
from gradtrace_analyzer.words.nouns import SIDES

_SAME_NODE = ("root", "module_fqn", "call_index", "node_name", "occurrence")


@dataclass(frozen=True)
class Replays(Explanation):
    """For each origin in its place, how its Node did when it was run again; empty of one that was not."""

    of_origins: tuple[tuple[Replay, ...], ...]

    def onto(self, origins: tuple[Origin, ...]) -> tuple[Origin, ...]:
        """The Nodes, each with its replays."""
        return tuple(
            replace(o, replays=found) if isinstance(o, NodeOrigin) else o
            for o, found in zip(origins, self.of_origins, strict=True)
        )


def replayed(
    connection: duckdb.DuckDBPyConnection, difference: Difference, ranks: Sequence[int]
) -> tuple[Replay, ...]:
    """How the Node did when it was run again, for each side that did so, baseline first."""
    found = []
    same = " AND ".join(f"{name} IS NOT DISTINCT FROM ${name}" for name in _SAME_NODE)
    key = {name: difference.key.get(name) for name in _SAME_NODE}
    here = {
        "ranks": list(ranks),
        "rank": difference.rank,
        "step": difference.step,
        "pass": difference.key.get("backward_index"),
    }
    for side, index in zip(SIDES, difference.event_indices, strict=True):
        row = connection.execute(
            "SELECT bool_and(replay_equal) FILTER (here), max(replay_error) FILTER (here), count(replay_equal), "
            "count(*) FILTER (NOT replay_equal) FROM (SELECT *, rank = $rank AND step = $step AND "
            f"backward_index = $pass AND event_index = $event AS here FROM {side}.node_events "
            f"WHERE list_contains($ranks, rank) AND {same})",
            {**key, **here, "event": index},
        ).fetchone()
        if row is not None and row[2]:
            found.append(Replay(side, *row))
    return tuple(found)


def _explain(context: Context) -> Replays | None:
    found = tuple(
        replayed(context.connection, o.difference, o.ranks) if isinstance(o, NodeOrigin) else ()
        for o in context.origins
    )
    return Replays(found) if any(found) else None


EXPLAINER = Explainer(Replays, _explain, links=frozenset({"backward"}))
