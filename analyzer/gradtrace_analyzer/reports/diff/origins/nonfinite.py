"""The first value that is finite on one side alone, told beside the origins."""

from __future__ import annotations

from gradtrace_analyzer.diff.origin import NonfiniteOrigin
from gradtrace_analyzer.reports.diff.origins.clause import clause
from gradtrace_analyzer.reports.diff.places import (
    bucket_of,
    module_of,
    node_phrase,
    row_name,
    size_phrase,
)
from gradtrace_analyzer.reports.diff.wording import Wording


@clause.register
def nonfinite(origin: NonfiniteOrigin, say: Wording) -> str:
    """What it is on both sides."""
    return f"{_what(origin)} {size_phrase(origin)}."


def _what(origin: NonfiniteOrigin) -> str:
    key, table, arrives = origin.difference.key, origin.difference.table, origin.arrives
    if table == "node_events":
        return f"the gradient {'arriving at' if arrives else 'leaving'} {node_phrase(origin)}"
    if table == "module_calls":
        return f"what {module_of(origin, key['module_fqn'])} {'receives' if arrives else 'returns'}"
    if table == "inputs":
        return f"the input {key['name']!r}"
    if table == "buckets":
        return (
            f"{bucket_of(origin)} as it {'goes into' if arrives else 'comes out of'} its reduction"
        )
    if table == "stage_events":
        return f"what stage {key['stage_index']} {'receives' if arrives else 'sends'}"
    return row_name(origin)
