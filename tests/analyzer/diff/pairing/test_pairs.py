"""Which rows of two runs are a pair, which pairs differ, and by how much."""

from __future__ import annotations

from typing import Any

import duckdb
import pytest

from gradtrace_analyzer.diff.links import LINK_TABLES, LinkTable
from gradtrace_analyzer.diff.pairing.pairs import (
    opened,
    opened_places,
    other_values,
    pairing_of,
    place_among,
    seen,
    within,
)
from support.synthetic_runs.builder import summary_columns
from support.synthetic_runs.differences import Row, Rows, each_step, paired, started, views


def link_table(name: str) -> LinkTable:
    [found] = [table for table in LINK_TABLES if table.table == name]
    return found


PLACES = [(rank, step) for rank in range(4) for step in range(60)]


@pytest.mark.parametrize(
    ("pairs", "count"),
    [
        ([], 0),
        ([(1, 5)], 1),
        ([(1, 5), (1, 6), (1, 7)], 3),
        (
            [(1, 5), (2, 9)],
            4,
        ),  # each of these ranks in each of these steps: a condition may hold more
        ([(0, 1), (0, 5), (0, 6), (0, 30)], 4),
        ([(0, 2 * n) for n in range(16)], 16),
        ([(0, 2 * n) for n in range(17)], 33),  # too many stretches: all that lies between
        ([(0, n) for n in (*range(17), 30)], 18),  # steps in a row are one
    ],
)
def test_condition_holds_of_the_rows_that_are_asked_for_and_of_few_others(
    pairs: list[tuple[int, int]], count: int
) -> None:
    connection = duckdb.connect()
    connection.execute("CREATE TABLE t (rank INTEGER, step BIGINT)")
    connection.executemany("INSERT INTO t VALUES (?, ?)", [list(place) for place in PLACES])
    found = connection.execute(f"SELECT rank, step FROM t other WHERE {within(pairs, 'other')}")
    rows = set(found.fetchall())
    assert set(pairs) <= rows and len(rows) == count


def test_steps_of_closed_ranks_are_those_that_their_table_names() -> None:
    """A rank that was killed has no row in `steps` of what it was doing: there any row tells."""
    step: Row = {"step": 0}
    call = {"root": 0, "module_fqn": "m", "phase": "forward", "step": 1}
    rows: Rows = {
        "steps": [{**step, "rank": r} for r in (0, 1)],
        "module_calls": [{**call, "rank": r} for r in (0, 1, 2)],
    }
    connection = views(rows)
    connection.execute(
        seen({"baseline": [0], "candidate": [0]}, {"baseline": [1], "candidate": []})
    )
    assert sorted(connection.execute("FROM seen").fetchall()) == [
        ("baseline", 0, 0),
        ("baseline", 1, 0),
        ("baseline", 1, 1),
        ("candidate", 0, 0),
    ]
    assert connection.execute("FROM common").fetchall() == [(0, 0)]


def test_step_begins_with_the_first_row_of_any_table() -> None:
    rows: Rows = {
        "parameters": [{"root": 0, "parameter_fqn": "w", "point": "before", "record_index": 7}],
        "module_calls": [{"root": 0, "module_fqn": "m", "phase": "forward", "record_index": 3}],
    }
    connection = started(rows)
    assert opened_places(connection) == [(0, 0)]
    assert sorted(connection.execute("FROM step_start").fetchall()) == [
        ("baseline", 0, 0, 3),
        ("candidate", 0, 0, 3),
    ]
    connection.execute("DELETE FROM opened")
    connection.execute(opened([]))
    assert connection.execute("FROM step_start").fetchall() == []


def passes(*losses: float | None, **more: Any) -> Rows:
    rows = [
        {"backward_index": n, "kind": "backward", "loss": x, **more} for n, x in enumerate(losses)
    ]
    return {"backward_passes": rows}


def test_steps_without_the_same_values_are_found_whatever_their_order() -> None:
    old = each_step((0, 1, 2), passes(0.5, 0.25)["backward_passes"])
    new = [{**row, "loss": 9.0} if (row["step"], row["loss"]) == (1, 0.25) else row for row in old]
    connection = started({"backward_passes": old}, {"backward_passes": new[::-1]})
    query = other_values(link_table("backward_passes"))
    assert connection.execute(query).fetchall() == [(0, 1)]
    at_another = other_values(link_table("backward_passes"), 2)
    assert connection.execute(at_another).fetchall() == []


def test_value_that_one_side_has_more_often_is_another() -> None:
    group = {"optimizer_index": 0, "group_index": 0, "learning_rate": 0.1, "parameter_fqns": ["w"]}
    connection = started(
        {"optimizer_groups": [group], "steps": [{}]},
        {"optimizer_groups": [group, group], "steps": [{}]},
    )
    assert connection.execute(other_values(link_table("optimizer_groups"))).fetchall() == [(0, 0)]
    twice: Rows = {"optimizer_groups": [group, group], "steps": [{}]}
    assert started(twice).execute(other_values(link_table("optimizer_groups"))).fetchall() == []


def test_names_of_parameters_count_only_where_that_is_asked() -> None:
    def side(*names: str) -> Rows:
        group = {"optimizer_index": 0, "group_index": 0, "parameter_fqns": list(names)}
        return {"optimizer_groups": [group], "steps": [{}]}

    connection = started(side("v", "w"), side("w"))
    table = link_table("optimizer_groups")
    assert connection.execute(other_values(table)).fetchall() == [(0, 0)]
    assert connection.execute(other_values(table, with_names=False)).fetchall() == []


def gradient(name: str, values: list[float] | None, **more: Any) -> Row:
    key = {"root": 0, "parameter_fqn": name, "point": "local", "backward_index": 0}
    return {**key, **(summary_columns(values) if values is not None else {}), **more}


SAME = [3.0, 4.0]
NAN = [float("nan"), 4.0]
# One row a case: name, baseline, candidate, what is found of it: side, whether it differs, its error.
GRADIENTS: list[tuple[str, Row | None, Row | None, tuple[Any, ...] | None]] = [
    ("equal", gradient("equal", SAME), gradient("equal", SAME), None),
    ("error", gradient("error", SAME), gradient("error", [3.0, 9.0]), (None, True, 5 / 90**0.5)),
    ("baseline", gradient("baseline", SAME), None, ("baseline", None, None)),
    ("candidate", None, gradient("candidate", SAME), ("candidate", None, None)),
    ("nan", gradient("nan", SAME), gradient("nan", NAN), (None, True, None)),
    ("zeros", gradient("zeros", [0.0, 0.0]), gradient("zeros", [-0.0, 0.0], fingerprint=7), (None, True, 0.0)),
    # Sketches of other widths: norms are all there is.
    ("width", gradient("width", SAME), gradient("width", [6.0, 8.0], sketch=[1.0]), (None, True, 0.5)),
    # Equal bits prove equal values, whatever the norm was summed to; without them every statistic counts.
    ("bits", gradient("bits", SAME), gradient("bits", SAME, norm=9.0), None),
    ("norms", gradient("norms", SAME, fingerprint=None), gradient("norms", SAME, abs_max=9.0), (None, True, 0.0)),
    ("no bits", gradient("no bits", SAME, fingerprint=None), gradient("no bits", SAME), None),
    ("nothing", gradient("nothing", None), gradient("nothing", None), None),
    ("size", gradient("size", SAME, fingerprint=None), gradient("size", SAME, numel=3), (None, True, 0.0)),
]  # fmt: skip


def test_pairs_that_differ_are_told_with_their_relative_error() -> None:
    old = [a for _, a, _, _ in GRADIENTS if a is not None]
    new = [b for _, _, b, _ in GRADIENTS if b is not None]
    connection = paired({"gradients": old, "steps": [{}]}, {"gradients": new, "steps": [{}]})
    found = connection.execute(
        "SELECT key_parameter_fqn, only_in, writes_differs, writes_error, given FROM paired_gradients"
    ).fetchall()
    rows = {name: tuple(rest) for name, *rest in found}
    expected = {name: row for name, _, _, row in GRADIENTS if row is not None}
    assert set(rows) == set(expected)
    for name, (only_in, differs, error) in expected.items():
        side, is_apart, by, exceeds = rows[name]
        assert side == only_in and exceeds == (only_in is not None), name
        if only_in is None:
            assert is_apart == differs, name
            assert by == (pytest.approx(error) if error is not None else None), name


@pytest.mark.parametrize(
    ("is_alike", "apart"), [(True, ["a", "b", "c", "d", "e", "f"]), (False, ["b", "d", "f"])]
)
def test_norms_that_were_added_up_otherwise_may_lie_a_little_apart(
    is_alike: bool, apart: list[str]
) -> None:
    """A norm by a millionth of it; the sum, whose terms may cancel, by what float32 gives of them without signs."""
    norms_and_sums = {
        "a": (5.0 * (1 + 1e-7), 7.0),
        "b": (5.0 * (1 + 1e-5), 7.0),
        "c": (5.0, 7.0 + 5e-6),
        "d": (5.0, 7.0 + 5e-5),
        "e": (5.0, 7.0 + 3e-5),  # of ten thousand terms
        "f": (5.0, 7.0),
    }
    old = [gradient(name, SAME, fingerprint=None) for name in norms_and_sums]
    old[4]["numel"] = 10_000
    new = [
        {**row, "norm": norm, "sum": total}
        for row, (norm, total) in zip(old, norms_and_sums.values(), strict=True)
    ]
    new[5]["abs_max"] *= 1 + 1e-7  # what is the largest does not hang on the order
    connection = started({"steps": [{}], "gradients": old}, {"steps": [{}], "gradients": new})
    connection.execute(pairing_of(link_table("gradients"), "", [(0, 0)], is_alike=is_alike))
    found = connection.execute("SELECT key_parameter_fqn FROM paired_gradients ORDER BY 1")
    assert [name for (name,) in found.fetchall()] == apart


def test_rows_of_one_key_pair_in_their_order() -> None:
    names = [gradient("w", [float(n), 1.0]) for n in range(3)]
    connection = paired(
        {"gradients": names, "steps": [{}]}, {"gradients": names[:1] + names[2:], "steps": [{}]}
    )
    found = connection.execute(
        "SELECT place, only_in, writes_b_abs_max, writes_c_abs_max FROM paired_gradients ORDER BY ALL"
    ).fetchall()
    # The second is held against the third, and the third has no partner.
    assert [row[1:] for row in found] == [(None, 1.0, 2.0), ("baseline", 2.0, None)]


def test_null_in_a_key_pairs_with_null() -> None:
    rows = [{"root": None, "module_fqn": None, "node_name": "A", "event_index": n} for n in (0, 1)]
    connection = paired({"node_events": rows}, {"node_events": rows[:1]})
    found = connection.execute(
        "SELECT only_in, event_index_b, event_index_c FROM paired_node_events"
    )
    assert found.fetchall() == [("baseline", 1, None)]


def test_ranks_whose_rows_were_lost_and_nodes_under_way_are_left_out() -> None:
    node = {"root": 0, "module_fqn": "m", "node_name": "A"}
    running = {**node, "outcome": "running"}
    rows: Rows = {
        "node_events": [{**node, "rank": 1}, {**running, "rank": 2}],
        "steps": [{}, {"rank": 1}, {"rank": 2}],
    }
    connection = started(rows, {"steps": rows["steps"]})
    connection.execute(pairing_of(link_table("node_events"), "", [(1, 0), (2, 0)]))
    assert connection.execute("SELECT rank FROM paired_node_events").fetchall() == [(1,)]
    connection.execute(pairing_of(link_table("node_events"), "0, 1", [(1, 0), (2, 0)]))
    assert connection.execute("SELECT rank FROM paired_node_events").fetchall() == []


def test_only_the_steps_that_are_open_are_paired() -> None:
    rows = each_step((0, 1), passes(0.5)["backward_passes"])
    others = each_step((0, 1), passes(0.75)["backward_passes"])
    connection = paired({"backward_passes": rows}, {"backward_passes": others}, only=[(0, 1)])
    assert connection.execute("SELECT step FROM paired_backward_passes").fetchall() == [(1,)]


def test_setting_counts_where_it_is_more_than_another_way_to_compute_the_same() -> None:
    def side(*settings: tuple[float, str]) -> Rows:
        groups = [
            {
                "optimizer_index": 0,
                "group_index": n,
                "learning_rate": rate,
                "hyperparameters": others,
            }
            for n, (rate, others) in enumerate(settings)
        ]
        return {"optimizer_groups": groups, "steps": [{}]}

    fused, plain = '{"fused": true, "momentum": 0.9}', '{"fused": false, "momentum": 0.9}'
    other = '{"fused": false, "momentum": 0.5}'
    connection = started(
        side((0.1, plain), (0.1, plain), (0.1, fused), (0.1, fused)),
        side((0.1, plain), (0.2, plain), (0.1, plain), (0.1, other)),
    )
    connection.execute(pairing_of(link_table("optimizer_groups"), "", [(0, 0)]))
    found = connection.execute("SELECT key_group_index, given FROM paired_optimizer_groups")
    assert sorted(found.fetchall()) == [(1, True), (2, False), (3, True)]


def test_pass_without_ddp_is_no_other_pass() -> None:
    def side(*syncs: str | None) -> Rows:
        rows = passes(*[0.5] * len(syncs))["backward_passes"]
        return {
            "backward_passes": [row | {"ddp_sync": s} for row, s in zip(rows, syncs, strict=True)]
        }

    connection = started(side("sync", "sync", "sync"), side("sync", "no_sync", None))
    connection.execute(pairing_of(link_table("backward_passes"), "", [(0, 0)]))
    found = connection.execute("SELECT key_backward_index FROM paired_backward_passes")
    assert found.fetchall() == [(1,)]


def test_loss_that_differs_does_not_exceed_by_itself_and_has_a_relative_error() -> None:
    connection = started(passes(0.5), passes(2.0))
    connection.execute(pairing_of(link_table("backward_passes"), "", [(0, 0)]))
    found = connection.execute("SELECT given, error FROM paired_backward_passes").fetchall()
    assert found == [(False, 0.75)]


def test_rows_of_the_candidate_alone_stand_in_front_of_the_next_pair_that_differs() -> None:
    """Two more rows shift all that follows: their own places are those of the candidate's order."""

    def side(*names: str, times: float = 1.0) -> Rows:
        return {"steps": [{}], "gradients": [gradient(name, [times, 1.0]) for name in names]}

    connection = paired(side("a", "b"), side("a", "x", "y", "b", "z", times=2.0))
    place_among(connection)
    found = connection.execute("SELECT key_parameter_fqn FROM paired_gradients ORDER BY place")
    assert [name for (name,) in found.fetchall()] == ["a", "x", "y", "b", "z"]
    places = dict(
        connection.execute("SELECT key_parameter_fqn, place FROM paired_gradients").fetchall()
    )
    assert 1 < places["x"] < places["y"] < 2 and places["z"] == 5  # nothing follows that one
