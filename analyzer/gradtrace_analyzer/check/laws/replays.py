"""Whether Nodes that were run again gave the same bits: what did not disagrees with itself, whatever the data."""

from __future__ import annotations

from typing import Any

from gradtrace_analyzer.check.evidence import Evidence, Rows
from gradtrace_analyzer.check.law import Findings, Violation, law, outcome
from gradtrace_analyzer.words.nouns import listed, module_phrase
from gradtrace_analyzer.words.numbers import counted, ranks_phrase

# So many Nodes are told one by one; a nondeterministic kernel may be in every layer.
_MOST_TOLD = 20

# Ranks that ran the same Nodes again, those that disagreed, and the first place where one did.
_DISAGREEING = """
WITH runs AS (SELECT *, NOT replay_equal AS apart FROM node_events WHERE replay_equal IS NOT NULL)
SELECT node_name, root, module_fqn, count(*) AS run_count,
    count(*) FILTER (apart) AS apart_count, max(replay_error) AS error,
    list(DISTINCT rank ORDER BY rank) FILTER (apart) AS ranks,
    list(DISTINCT rank ORDER BY rank) AS all_ranks,
    min(struct_pack(step := step, backward_index := backward_index, event_index := event_index, rank := rank,
        microbatch := microbatch)) FILTER (apart) AS earliest
FROM runs GROUP BY ALL HAVING apart_count > 0
ORDER BY earliest, node_name, module_fqn
"""


@law(
    "replays_equal",
    "error",
    unit=("Node run again", "Nodes run again"),
    doc="A Node that is run again with the same gradients (GRADTRACE_REPLAY) gives the same bits. Where it does not, "
    "its kernel is nondeterministic or its device faulty; a rank that differs alone points to the device.",
    after=["forward_is_fresh"],
)
def replays_equal(evidence: Evidence) -> Findings:
    """Report each Node that gave other bits when it was run again with the same gradients."""
    [(node_count, compared)] = evidence.rows(
        "SELECT count(*), count(replay_equal) FROM node_events"
    )
    if node_count and not compared:
        return Findings()  # nobody asked for it: that is no lack
    found = evidence.rows(_DISAGREEING) if compared else []
    violations = [_disagreeing(row, order) for order, row in enumerate(found[:_MOST_TOLD])]
    notes = [_rest(found[_MOST_TOLD:])] if len(found) > _MOST_TOLD else []
    lacking = "no Node was run again (GRADTRACE_REPLAY)"
    return outcome(violations, compared, lacking, notes=notes)


def _disagreeing(row: tuple[Any, ...], order: int) -> Violation:
    name, root, module, run_count, apart_count, error, ranks, all_ranks, first = row
    by = f", by {error:.1e} at most" if error is not None else ""
    others = [rank for rank in all_ranks if rank not in ranks]
    meaning = (
        "a nondeterministic kernel, a Function that draws or keeps something, or a faulty device"
    )
    if others:
        meaning = (
            f"a faulty device of {ranks_phrase(ranks)}, or a nondeterministic kernel or Function (on "
            f"{ranks_phrase(others)} it gave the same each time)"
        )
    return replays_equal.violation(
        first["step"],
        f"Step {first['step']}, {ranks_phrase([first['rank']])}: {name} of {module_phrase(module)} gave other bits "
        f"when it was run again with the same gradients (in {apart_count:,} of {counted(run_count, 'run')} on "
        f"{ranks_phrase(all_ranks)}{by}): {meaning}, not the data.",
        rank=ranks[0] if len(ranks) == 1 else None,
        ranks=tuple(ranks),
        microbatch=first["microbatch"],
        backward_index=first["backward_index"],
        event_index=first["event_index"],
        root=root,
        module_fqn=module,
        node_name=name,
        relative_error=error,
        count=apart_count,
        order=float(order),
    )


def _rest(rows: Rows) -> str:
    names = sorted({str(row[0]) for row in rows})
    return f"{counted(len(rows), 'more Node')} disagree with themselves: {listed(names, 6)}."
