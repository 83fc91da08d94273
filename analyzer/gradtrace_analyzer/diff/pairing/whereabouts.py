"""What a row of a link table is of, in a few words: for rows that are counted and not shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradtrace_analyzer.words.nouns import OUTSIDE

_SQL = {
    "parameters": "key_parameter_fqn",
    "inputs": "key_name",
    "module_calls": "key_module_fqn",
    "node_events": f"coalesce(key_module_fqn, '{OUTSIDE}') || ' (' || key_node_name || ')'",
    "buckets": "'the bucket of ' || key_parameter_fqns[1]",
    "gradients": "key_parameter_fqn",
}


def whereabouts_sql(table: str) -> str:
    """The words, of a row of `differing_<table>`; NULL where it has none."""
    return _SQL.get(table, "CAST(NULL AS VARCHAR)")


def whereabouts(table: str, key: Mapping[str, Any]) -> str | None:
    """The same words from the key columns of a row, by name without `key_`; None where it has none."""
    if table == "node_events":
        return f"{key['module_fqn'] or OUTSIDE} ({key['node_name']})"
    if table == "buckets":
        names = key["parameter_fqns"]
        return f"the bucket of {names[0]}" if names else None
    column = {"inputs": "name", "module_calls": "module_fqn"}.get(table, "parameter_fqn")
    return key.get(column)
