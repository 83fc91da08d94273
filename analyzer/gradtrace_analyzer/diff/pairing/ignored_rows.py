"""Rows that one side alone has and that are no difference, each with its reason: `kept_<table>` goes without them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import duckdb

from gradtrace_analyzer.diff.links import LINK_TABLES, LinkTable
from gradtrace_analyzer.diff.pairing.pairs import HERE, kept
from gradtrace_analyzer.sql.derived import derived
from gradtrace_analyzer.words.nouns import SIDES, other_side

TornEnds = Mapping[str, Mapping[int, Sequence[int]]]


def ignore_rows(
    connection: duckdb.DuckDBPyConnection, torn_ends: TornEnds, *, unmatched: bool
) -> None:
    """Have the views `kept_<table>` go without them: all rows of one side without `unmatched`; of `torn_ends` (by side
    and rank) what is missing at the end."""
    everywhere = dict(_of_any_table(torn_ends, unmatched=unmatched))
    for table in LINK_TABLES:
        ignored = everywhere | dict(_of(table, connection))
        if ignored:
            connection.execute(kept(table, list(ignored.values())))


def _of_any_table(torn_ends: TornEnds, *, unmatched: bool) -> Iterator[tuple[str, str]]:
    """(reason, condition) of rows of whichever table."""
    if not unmatched:
        yield "the sides were not asked for the same", "only_in IS NOT NULL"
    for side, ends in torn_ends.items():
        for rank, steps in ends.items():
            yield (
                f"the {side} was cut off there on rank {rank}",
                f"only_in = '{other_side(side)}' AND rank = {rank} AND list_contains({list(steps)}, step)",
            )


def _of(table: LinkTable, connection: duckdb.DuckDBPyConnection) -> Iterator[tuple[str, str]]:
    """(reason, condition) of rows of one table."""
    if table.table == "gradients":
        yield (
            "a gradient of zeros that is carried into a step is none: zero_grad(set_to_none=False)",
            "only_in IS NOT NULL AND key_point = 'carried' "
            "AND coalesce(writes_b_abs_max, writes_c_abs_max) = 0 "
            "AND coalesce(writes_b_nan_count, writes_c_nan_count) = 0",
        )
    if table.table == "buckets":
        lone = "SELECT 1 FROM paired_buckets WHERE only_in IS NOT NULL LIMIT 1"
        if connection.execute(lone).fetchone() is not None:
            derived(HERE, "rebucketed").make(connection)
            yield (
                "buckets of another size or order: parameters still pair by their gradients",
                "only_in IS NOT NULL AND EXISTS (SELECT 1 FROM rebucketed o WHERE o.side <> d.only_in "
                "AND o.rank = d.rank AND o.step = d.step AND o.backward_index = d.key_backward_index)",
            )
    if table.table == "parameters":
        for side in SIDES:
            some = f"SELECT 1 FROM {side}.parameters SEMI JOIN common USING (rank, step) LIMIT 1"
            if connection.execute(some).fetchone() is None:
                yield (
                    f"the {side} did not record its parameters: the other's are no other model",
                    f"only_in = '{other_side(side)}'",
                )
