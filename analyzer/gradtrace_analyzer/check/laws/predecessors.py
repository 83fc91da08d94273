"""Whether what came before a place was recorded: else no sentence says that it was finite there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradtrace_analyzer.check.evidence import Evidence
from gradtrace_analyzer.check.laws.birthplaces import Birthplace

# What came before a kind of place, where it was recorded with values: a table and its condition, of the place's rank.
_FED: Mapping[str, tuple[str, str]] = {
    "before": (
        "parameters",
        "step = $step - 1 AND point = 'after' AND {same} AND norm IS NOT NULL",
    ),
    "module": ("module_calls", "record_index = $record AND input_norm IS NOT NULL"),
    "loss": ("module_calls", "step = $step AND output_norm IS NOT NULL"),
    "node": ("node_events", "record_index = $record AND grad_output_norm IS NOT NULL"),
    "bucket": ("buckets", "record_index = $record AND before_norm IS NOT NULL"),
    "reduced": ("gradients", "step = $step AND point = 'local' AND {same} AND norm IS NOT NULL"),
    "final": (
        "gradients",
        "step = $step AND point IN ('local', 'reduced') AND {same} AND norm IS NOT NULL",
    ),
    "after": ("gradients", "step = $step AND point = 'final' AND {same} AND norm IS NOT NULL"),
}


def is_fed(evidence: Evidence, place: Birthplace) -> bool:
    """Whether what came before a place was recorded with values; of data nothing does."""
    if place.source not in _FED:
        return True
    table, condition = _FED[place.source]
    known: dict[str, Any] = {
        "rank": place.rank,
        "step": place.step,
        "record": place.record_index,
        "root": place.root,
        "name": place.parameter_fqn,
    }
    where = condition.format(same="root = $root AND parameter_fqn = $name")
    used = {name: value for name, value in known.items() if f"${name}" in f"$rank {where}"}
    return bool(
        evidence.rows(f"SELECT 1 FROM {table} WHERE rank = $rank AND {where} LIMIT 1", used)
    )
