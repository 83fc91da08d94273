"""Nodes of a call whose code changed are renumbered in the candidate's view, and shown as they were again."""

from __future__ import annotations

import duckdb

from gradtrace_analyzer.diff.pairing.occurrences import forget_numbers, realign
from support.synthetic_runs.differences import Row, paired


def nodes(text: str, rank: int = 0, module: str = "m", **more: int) -> list[Row]:
    """`Mul.4 Add.4`: names and sizes in the order in which forward made them; backward runs the last first."""
    made = [word.split(".") for word in text.split()]
    counts: dict[str, int] = {}
    rows: list[Row] = []
    for number, (name, size) in enumerate(made):
        counts[name] = counts.get(name, -1) + 1
        rows.append(
            {
                "rank": rank,
                "root": 0,
                "module_fqn": module,
                "call_index": 0,
                "backward_index": 0,
                "node_name": name,
                "occurrence": counts[name],
                "autograd_seq": number,
                "event_index": len(made) - number,
                "grad_output_numel": int(size),
                "grad_input_numel": int(size),
                **more,
            }
        )
    return rows


OLD = "Mul.4 Gelu.4 Mul.8"
NEW = "Mul.2 Mul.4 Gelu.4 Mul.8"


def pairs(a: list[Row], b: list[Row]) -> duckdb.DuckDBPyConnection:
    return paired({"node_events": a}, {"node_events": b})


def occurrences(connection: duckdb.DuckDBPyConnection, rank: int = 0) -> list[tuple[int, int]]:
    """(size, occurrence) of the candidate's Mul Nodes as they are shown."""
    return connection.execute(
        "SELECT grad_output_numel, occurrence FROM candidate.node_events WHERE node_name = 'Mul' AND rank = ? "
        "ORDER BY autograd_seq",
        [rank],
    ).fetchall()


def test_nodes_take_the_numbers_of_those_that_they_are_and_new_ones_come_last() -> None:
    connection = pairs([*nodes(OLD), *nodes(OLD, 1)], [*nodes(NEW), *nodes(OLD, 1)])
    assert realign(connection)
    assert occurrences(connection) == [(2, 2), (4, 0), (8, 1)]
    assert occurrences(connection, 1) == [
        (4, 0),
        (8, 1),
    ]  # a call that is the same keeps its numbers


def test_numbers_are_forgotten_when_other_steps_are_opened() -> None:
    connection = pairs(nodes(OLD), nodes(NEW))
    forget_numbers(connection)  # nothing to forget yet
    before = occurrences(connection)
    realign(connection)
    forget_numbers(connection)
    assert occurrences(connection) == before == [(2, 0), (4, 1), (8, 2)]
    assert realign(connection)  # and can be found again


def test_same_change_on_all_ranks_is_found_out_once() -> None:
    connection = pairs(
        [*nodes(OLD), *nodes(OLD, 1), *nodes("A.1", 2)],
        [*nodes(NEW), *nodes(NEW, 1), *nodes("A.1", 2)],
    )
    assert realign(connection)
    assert connection.execute("SELECT count(DISTINCT pair) FROM renumbering").fetchall() == [(1,)]
    assert occurrences(connection, 1) == [(2, 2), (4, 0), (8, 1)]


def test_calls_that_are_the_same_are_left_alone() -> None:
    assert not realign(pairs(nodes(OLD), nodes(OLD)))


def test_new_node_of_another_name_shifts_nothing() -> None:
    connection = pairs(nodes("Mul.4"), nodes("Mul.4 Gelu.4"))
    assert not realign(connection)


def test_node_that_is_only_another_value_shifts_nothing() -> None:
    connection = pairs(nodes(OLD, grad_output_fingerprint=1), nodes(OLD, grad_output_fingerprint=2))
    assert not realign(connection)


def test_nodes_of_equal_number_and_other_sizes_are_looked_at() -> None:
    """One Mul was taken out in front and one put in behind: their count is the same."""
    connection = pairs(nodes("Mul.2 Mul.4 Mul.8"), nodes("Mul.4 Mul.8 Mul.16"))
    assert realign(connection)
    assert occurrences(connection) == [(4, 1), (8, 2), (16, 3)]


def test_nodes_that_add_to_parameters_and_those_outside_any_module_keep_their_place() -> None:
    extra = [row | {"parameter_fqn": "m.w"} for row in nodes("Mul.4")]
    connection = pairs([*nodes(OLD), *extra], [*nodes(NEW), *extra])
    realign(connection)
    shown = connection.execute(
        "SELECT occurrence FROM candidate.node_events WHERE parameter_fqn IS NOT NULL"
    )
    assert shown.fetchall() == [(0,)]
