"""Rows that one side alone has and that are no difference: they are taken out of the `differing_` tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import duckdb

from gradtrace_analyzer.diff.links import LINK_TABLES
from gradtrace_analyzer.words.nouns import SIDES, other_side


def ignore_rows(
    connection: duckdb.DuckDBPyConnection,
    torn_ends: Mapping[str, Mapping[int, Sequence[int]]],
    *,
    unmatched: bool,
) -> None:
    """Take them out: all of them without `unmatched`; of `torn_ends` (by side and rank) what is missing at the end."""
    # A gradient of zeros that is carried into a step is none: `zero_grad(set_to_none=False)`.
    connection.execute(
        "DELETE FROM differing_gradients WHERE only_in IS NOT NULL AND key_point = 'carried' "
        "AND coalesce(writes_b_abs_max, writes_c_abs_max) = 0 "
        "AND coalesce(writes_b_nan_count, writes_c_nan_count) = 0"
    )
    # Buckets of another size or order are no difference: parameters still pair by their gradients.
    connection.execute(
        "DELETE FROM differing_buckets d WHERE only_in IS NOT NULL AND EXISTS (SELECT 1 FROM "
        "(SELECT 'candidate' AS side, rank, step, backward_index FROM baseline.buckets UNION ALL "
        "SELECT 'baseline', rank, step, backward_index FROM candidate.buckets) o "
        "WHERE o.side = d.only_in AND o.rank = d.rank AND o.step = d.step "
        "AND o.backward_index = d.key_backward_index)"
    )
    # A side that holds no parameter at all did not record them: the other's are no other model.
    for side in SIDES:
        some = f"SELECT 1 FROM {side}.parameters SEMI JOIN common USING (rank, step) LIMIT 1"
        if connection.execute(some).fetchone() is None:
            connection.execute(
                "DELETE FROM differing_parameters WHERE only_in = ?", [other_side(side)]
            )
    for table in LINK_TABLES:
        name = f"differing_{table.table}"
        if not unmatched:
            connection.execute(f"DELETE FROM {name} WHERE only_in IS NOT NULL")
        for side, ends in torn_ends.items():
            for rank, steps in ends.items():
                connection.execute(
                    f"DELETE FROM {name} WHERE only_in = ? AND rank = ? AND list_contains(?, step)",
                    [other_side(side), rank, list(steps)],
                )
