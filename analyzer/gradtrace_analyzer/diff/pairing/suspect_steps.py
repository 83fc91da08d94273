"""Which steps of which ranks may differ, and in which tables: told by digests and by the values that are in none.

A digest is a hash over the order and the fingerprints of a step's rows in one table. Where it is the same on both
sides, that table need not be looked at; where all are, the step need not.
"""

from __future__ import annotations

from collections.abc import Mapping

import duckdb

from gradtrace_analyzer.diff.links import LINK_TABLES
from gradtrace_analyzer.diff.pairing.pairs import other_values, within
from gradtrace_analyzer.sql.footers import Counts
from gradtrace_analyzer.words.nouns import SIDES
from gradtrace_schemas.digests import TABLE_OF
from gradtrace_schemas.steps import DIGEST_LINKS

RankStep = tuple[int, int]  # (rank, step)

_POINT_OF = {"parameters": "before", "optimizer": "after"}

# Tables of which equal digests prove all that is compared: what values they have beside are compared by themselves.
PROVEN = frozenset(t.table for t in LINK_TABLES if t.table in TABLE_OF.values() and not t.digested)


def suspect_steps(
    connection: duckdb.DuckDBPyConnection, counts: Mapping[str, Counts]
) -> dict[RankStep, frozenset[str]]:
    """The steps that may differ, each with the tables in which it may. Reads `common`; `counts` are by side."""
    found: dict[RankStep, frozenset[str]] = {}
    alike: dict[tuple[bool, ...], frozenset[str]] = {}  # few sets for many steps
    unknown: dict[str, set[RankStep]] = {}
    for rank, step, *flags in connection.execute(_digests_apart(counts)).fetchall():
        place = (rank, step)
        apart = tuple(flags[::2])
        if apart not in alike:
            links = zip(DIGEST_LINKS, apart, strict=True)
            alike[apart] = frozenset(TABLE_OF[link] for link, is_apart in links if is_apart)
        if alike[apart]:
            found[place] = alike[apart]
        if any(flags[1::2]):
            for link, is_apart, has_none in zip(DIGEST_LINKS, apart, flags[1::2], strict=True):
                if has_none and not is_apart:
                    unknown.setdefault(link, set()).add(place)
    for link, places in unknown.items():
        # A link without rows has no digest, and neither has one of which a row lacks a fingerprint.
        for place in places & _with_rows(connection, link, places):
            found[place] = found.get(place, frozenset()) | {TABLE_OF[link]}
    for table, query in _other_values(connection):
        for place in connection.execute(query).fetchall():
            found[place] = found.get(place, frozenset()) | {table}
    return found


def _digests_apart(counts: Mapping[str, Counts]) -> str:
    """(rank, step, of each link whether its digests are apart, whether it has none on either side)."""
    columns = [f"digest_{link}" for link in DIGEST_LINKS]
    some = " OR ".join(f"b.{name} IS NOT NULL" for name in columns)
    flags = []
    for link, name in zip(DIGEST_LINKS, columns, strict=True):
        flags.append(f"NOT ({some}) OR b.{name} IS DISTINCT FROM c.{name} AS apart_{link}")
        has_rows = any(of_side.of(TABLE_OF[link]) for of_side in counts.values())
        none = f"b.{name} IS NULL AND c.{name} IS NULL" if has_rows else "false"
        flags.append(f"{none} AS none_{link}")
    # A step that one side has no row of, though other tables have, may differ in everything.
    told = ", ".join(
        f"coalesce(apart_{link}, true), coalesce(none_{link}, false)" for link in DIGEST_LINKS
    )
    any_of = " OR ".join(
        f"coalesce(apart_{link}, true) OR coalesce(none_{link}, false)" for link in DIGEST_LINKS
    )
    return (
        f"SELECT rank, step, {told} FROM common LEFT JOIN (SELECT rank, step, {', '.join(flags)} "
        "FROM baseline.steps b JOIN candidate.steps c USING (rank, step)) USING (rank, step) "
        f"WHERE {any_of}"
    )


def _with_rows(
    connection: duckdb.DuckDBPyConnection, link: str, places: set[RankStep]
) -> set[RankStep]:
    table = TABLE_OF[link]
    point = f" AND t.point = '{_POINT_OF[link]}'" if link in _POINT_OF else ""
    union = " UNION ".join(
        f"SELECT rank, step FROM {side}.{table} t WHERE {within(places)}{point}" for side in SIDES
    )
    return set(connection.execute(union).fetchall())


def _other_values(connection: duckdb.DuckDBPyConnection) -> list[tuple[str, str]]:
    """(table, the query for the steps that do not have the same of its values)."""
    queries = [
        (table.table, other_values(table, with_names=False))
        for table in LINK_TABLES
        if table.values and not table.digested
    ]
    [(first,)] = connection.execute("SELECT min(step) FROM common").fetchall()
    if first is not None:
        queries += [
            (table.table, other_values(table, first))
            for table in LINK_TABLES
            if "parameter_fqns" in table.values
        ]
    return queries
