"""What the tables of a step's chain stand for, and which of their rows are compared."""

from __future__ import annotations

import pytest

from gradtrace_analyzer.diff.links import LINK_TABLES, LINKS, LOCAL_LINKS, Of, link_of
from gradtrace_schemas import TABLES
from support.synthetic_runs.differences import Row, views


@pytest.mark.parametrize(
    ("table", "point", "link"),
    [
        ("parameters", "before", "parameters"),
        ("parameters", "after", "optimizer"),
        ("gradients", "carried", "carried_gradient"),
        ("gradients", "final", "clip"),
        ("failures", None, "backward"),
        ("backward_passes", None, "loss"),
    ],
)
def test_row_stands_for_one_link(table: str, point: str | None, link: str) -> None:
    assert link_of(table, point) == link and link in LINKS


def test_only_what_a_rank_computes_by_itself_is_local() -> None:
    assert {"parameters", "loss", "local_gradient"} <= LOCAL_LINKS
    assert not LOCAL_LINKS & {"bucket", "stage", "reduced_gradient", "clip", "optimizer"}


def test_every_column_that_a_link_table_names_is_in_the_catalogue() -> None:
    for table in LINK_TABLES:
        known = {column.name for column in TABLES[table.table].columns}
        named = {*table.key, *table.values, *(f"{prefix}norm" for _, prefix in table.sides)}
        named |= {part.column for part in table.whereabouts if isinstance(part, Of)}
        named |= set() if table.kind is None else {table.kind}
        assert named <= known, table.table


def test_row_of_a_table_stands_for_one_link_or_for_that_of_its_point() -> None:
    for table in LINK_TABLES:
        assert (table.link is None) == ("point" in table.key) == bool(table.points), table.table
        assert {table.link_at(point) for point in table.each_point} <= set(LINKS)


def test_action_of_another_kind_or_under_way_is_not_compared() -> None:
    [stages] = [table for table in LINK_TABLES if table.table == "stage_events"]
    rows: list[Row] = [
        {"kind": "forward", "end_ns": 5, "stage_index": 0},
        {"kind": "backward_full", "end_ns": None, "stage_index": 1},
        {"kind": "wait", "end_ns": 5, "stage_index": 2},
    ]
    found = views({"stage_events": rows}).execute(
        f"SELECT stage_index FROM baseline.stage_events WHERE {stages.only}"
    )
    assert found.fetchall() == [(0,)]
    assert all(table.only == "true" for table in LINK_TABLES if table is not stages)
