"""What a comparison covers: the steps of both sides, the rows that were held against each other, any values at all."""

from __future__ import annotations

import duckdb

from gradtrace_analyzer.diff.covering import has_summaries, rows_compared, steps_seen
from gradtrace_analyzer.diff.scope.selection import Selection, chosen
from support.synthetic_runs.differences import Row, judged_rows, three_calls, views


def compared(connection: duckdb.DuckDBPyConnection, **options: object) -> dict[str, int]:
    return rows_compared(connection, judged_rows(connection, **options).judged)  # type: ignore[arg-type]


def test_steps_are_told_by_where_they_were_seen() -> None:
    connection = views(three_calls(0, {}, range(3)), three_calls(1, {}, range(1, 4)))
    judged_rows(connection)
    assert steps_seen(connection, Selection()) == {
        "both": {0: [1, 2]},
        "baseline": {0: [0]},
        "candidate": {0: [3]},
    }
    assert steps_seen(connection, chosen(step=2))["both"] == {0: [2]}


def test_rows_that_were_held_against_each_other_are_counted() -> None:
    extra: Row = {"root": 0, "module_fqn": "d", "phase": "forward", "call_index": 0, "step": 1}
    a, b = three_calls(0, {}, range(3)), three_calls(1, {}, range(1, 3))
    counts = compared(views({"module_calls": [*a["module_calls"], extra]}, b))
    # Of common steps, but the lone one.
    assert counts["module_calls"] == 6 and counts["gradients"] == 0
    assert compared(views(a, a), chosen=chosen(modules=["b"]))["module_calls"] == 3
    assert compared(views(a, a), unread={"module_calls": [0]})["module_calls"] == 0


def test_sides_are_summarised_where_both_have_a_norm_of_anything() -> None:
    connection = views(three_calls(0, {}), three_calls(1, {}))
    judged_rows(connection)
    assert has_summaries(connection)
    names = [
        {k: v for k, v in row.items() if not k.endswith("norm")}
        for row in three_calls(1, {})["module_calls"]
    ]
    connection = views(three_calls(0, {}), {"module_calls": names})
    judged_rows(connection)
    assert not has_summaries(connection)
