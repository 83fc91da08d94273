"""Whether the Node of an origin disagrees with itself: what was recorded of running it again, on both sides."""

from __future__ import annotations

from collections.abc import Sequence

import duckdb

from gradtrace_analyzer.diff.difference import Difference
from gradtrace_analyzer.diff.origin import Replay
from gradtrace_analyzer.words.nouns import SIDES
from gradtrace_analyzer.words.numbers import spans

_SAME_NODE = ("root", "module_fqn", "call_index", "node_name", "occurrence")


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


def replay_sentence(found: Sequence[Replay], step: int) -> str:
    """What that says of the origin, with a space in front; nothing where the Node was not run again."""
    apart = [r for r in found if r.apart_count]
    if not found:
        return ""
    if not apart:
        sides = "both runs" if len(found) > 1 else f"the {found[0].side}"
        return (
            f" Run again with the same gradients, the Node gave the same bits in {sides}: it is deterministic where "
            "it ran, and its code, or what it saved, is where they part."
        )
    said = []
    for r in apart:
        by = f" (by {r.error:.1e})" if r.error is not None else ""
        where = f"here{by}" if r.equal is False else f"elsewhere, not in step {spans([step])}"
        said.append(f"in {r.apart_count:,} of {r.run_count:,} runs of the {r.side}, {where}")
    return (
        f" The Node disagrees with itself: run again with the same gradients it gave other bits {'; '.join(said)}. "
        "That is a nondeterministic kernel, a Function that draws or keeps something, or a faulty device, not the data."
    )
