"""Opens steps: pairs their rows one by one, in tables that lie in memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import duckdb

from gradtrace_analyzer.diff.links import LINK_TABLES, LinkTable
from gradtrace_analyzer.diff.pairing.occurrences import forget_numbers, realign
from gradtrace_analyzer.diff.pairing.pairs import opened, pairing_of, place_among
from gradtrace_analyzer.diff.pairing.step_index import StepIndex
from gradtrace_analyzer.diff.pairing.suspect_steps import PROVEN, RankStep
from gradtrace_analyzer.diff.scope.configuration import recorded_alike


@dataclass(frozen=True)
class Opened:
    """Steps whose rows are paired: the tables `opened`, `step_start` and `paired_<table>` are of these `places`.

    `is_whole`, all steps that may differ are among them.
    """

    places: frozenset[RankStep]
    is_whole: bool


def open_steps(
    connection: duckdb.DuckDBPyConnection,
    index: StepIndex,
    places: Collection[RankStep],
    *,
    unjudged: Collection[RankStep] = (),
) -> Opened:
    """Pair the rows of these steps, in place of those that were open. `unjudged` are others that may have rows of one
    side alone: what is said of changed code must do without them."""
    name_places(connection, "opened", places)
    name_places(connection, "unjudged", set(unjudged) - set(places))
    if index.realigns:
        forget_numbers(connection)
    connection.execute(opened(places))
    is_alike = recorded_alike(index.pair.runs)
    for table in LINK_TABLES:
        make = pairing_of(
            table,
            index.unread_sql(table.table),
            _apart_in(table, index, places),
            is_alike=is_alike,
        )
        connection.execute(make)
        # Where the code of a call was changed, its Nodes are not those of the same number.
        if table.table == "node_events" and index.realigns and realign(connection):
            connection.execute(make)
    place_among(connection)
    return Opened(frozenset(places), index.suspects.keys() <= set(places))


def open_again(
    connection: duckdb.DuckDBPyConnection, index: StepIndex, places: Collection[RankStep]
) -> Opened:
    """Open these steps and each rank's first, as far as both sides have them."""
    known = set(connection.execute("SELECT rank, step FROM common").fetchall())
    return open_steps(connection, index, known & {*places, *index.firsts})


def name_places(
    connection: duckdb.DuckDBPyConnection, table: str, places: Collection[RankStep]
) -> None:
    """Make a table of these (rank, step)."""
    columns = [[place[n] for place in places] for n in (0, 1)]
    connection.execute(
        f"CREATE OR REPLACE TEMP TABLE {table} AS "
        "SELECT unnest(?::INTEGER[]) AS rank, unnest(?::INTEGER[]) AS step",
        columns,
    )


def any_exceeds(connection: duckdb.DuckDBPyConnection) -> bool:
    """Whether a row of an open step exceeds its tolerance."""
    return any(
        connection.execute(
            f"SELECT 1 FROM differing_{table.table} WHERE exceeds LIMIT 1"
        ).fetchall()
        for table in LINK_TABLES
    )


def _apart_in(
    table: LinkTable, index: StepIndex, places: Collection[RankStep]
) -> Collection[RankStep]:
    """Those of these steps in which a table may differ."""
    if table.table not in PROVEN or not index.pair.has_same_names:
        return places
    return [p for p in places if table.table in index.suspects.get(p, (table.table,))]
