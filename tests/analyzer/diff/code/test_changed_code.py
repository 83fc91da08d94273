"""Which rows of one side alone are changed code, and what is taken out of the differences with them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import duckdb
import pytest

from gradtrace_analyzer.diff.code.changed_code import mark_code, take_out
from gradtrace_analyzer.diff.code.structure import ModelNames
from gradtrace_analyzer.failures.failed_passes import OneSidedFailure
from support.synthetic_runs.differences import Row, Rows, paired, sides

STEPS, RANKS = range(3), range(2)
EVERYWHERE = [(rank, step) for rank in RANKS for step in STEPS]
NONE: Mapping[str, Mapping[str, Collection[str]]] = {"baseline": {}, "candidate": {}}


def at(places: Iterable[tuple[int, int]], **row: Any) -> list[Row]:
    return [{"rank": rank, "step": step, **row} for rank, step in places]


CALL = {"root": 0, "module_fqn": "m", "phase": "forward", "call_index": 0}
NODE = {"root": 0, "module_fqn": "m", "call_index": 0, "backward_index": 0, "occurrence": 0}
PASS = {"backward_index": 0, "kind": "backward", "loss": 1.0}


def run(**more: list[Row]) -> dict[str, list[Row]]:
    """A module that both ranks call in every step, and its Node; `more` comes behind them."""
    rows = {
        "backward_passes": at(EVERYWHERE, **PASS),
        "module_calls": at(EVERYWHERE, **CALL),
        "node_events": at(EVERYWHERE, **NODE, node_name="MmBackward0"),
    }
    return {name: [*rows.get(name, ()), *more.get(name, ())] for name in {**rows, **more}}


def marked(
    b: Rows,
    a: Rows | None = None,
    *,
    lone: Mapping[str, Mapping[str, Collection[str]]] = NONE,
    failures: Collection[OneSidedFailure] = (),
    unjudged: Collection[tuple[int, int]] = (),
) -> duckdb.DuckDBPyConnection:
    connection = paired(a or run(), b)
    for rank, step in unjudged:
        connection.execute("INSERT INTO unjudged VALUES (?, ?)", [rank, step])
    ModelNames(connection).make_callers()
    mark_code(connection, lone, failures)
    return connection


def changed(connection: duckdb.DuckDBPyConnection, columns: str = "rank, step") -> list[Any]:
    return connection.execute(f"SELECT {columns} FROM changed_code ORDER BY ALL").fetchall()


def extra(
    places: Iterable[tuple[int, int]], name: str = "GeluBackward0", **more: Any
) -> dict[str, list[Row]]:
    return run(node_events=at(places, **{**NODE, "node_name": name, **more}))


@pytest.mark.parametrize("swapped", [False, True])
def test_node_that_one_side_alone_runs_in_every_step_and_rank_is_code(swapped: bool) -> None:
    a, b = run(), extra(EVERYWHERE)
    connection = marked(*((a, b) if swapped else (b, a)))
    side = "baseline" if swapped else "candidate"
    assert changed(connection, "rank, step, only_in, node_name, is_lone") == [
        (rank, step, side, "GeluBackward0", False) for rank, step in EVERYWHERE
    ]


@pytest.mark.parametrize(
    ("places", "is_code"),
    [
        ([p for p in EVERYWHERE if p[1] < 2], True),  # in most steps, from the first on
        ([p for p in EVERYWHERE if p[1] == 0], False),  # in one of three
        ([p for p in EVERYWHERE if p[1] > 0], False),  # from a later step on
        ([p for p in EVERYWHERE if p[0] == 0], False),  # on one of the ranks that call the module
    ],
)
def test_node_that_is_there_in_few_steps_or_ranks_happened(
    places: list[tuple[int, int]], is_code: bool
) -> None:
    assert bool(changed(marked(extra(places)))) == is_code


def test_only_the_ranks_that_run_its_module_are_asked_for() -> None:
    """A stage of a pipeline holds what others do not."""
    own = [p for p in EVERYWHERE if p[0] == 1]
    call = run(module_calls=at(own, **{**CALL, "module_fqn": "tail"}))
    node = {
        "node_events": [
            *call["node_events"],
            *at(own, **{**NODE, "module_fqn": "tail", "node_name": "A"}),
        ]
    }
    assert changed(marked(call | node, call)) == own


def test_steps_that_are_not_open_are_not_asked_for() -> None:
    """What they hold of one side alone is not known: they neither prove nor disprove."""
    places = [p for p in EVERYWHERE if p[1] == 0]
    unjudged = [p for p in EVERYWHERE if p[1] > 0]
    assert changed(marked(extra(places), unjudged=unjudged)) == places


def test_row_of_a_name_that_one_side_alone_has_is_code_wherever_it_is() -> None:
    place = [(1, 2)]
    b = run(
        module_calls=at(place, **{**CALL, "module_fqn": "new"}),
        node_events=at(place, **{**NODE, "module_fqn": "new", "node_name": "A"}),
        parameters=at(place, root=0, parameter_fqn="new.w", point="before"),
        gradients=at(place, root=0, parameter_fqn="new.w", point="local", backward_index=0),
    )
    lone = {"baseline": {}, "candidate": {"module": {"new"}, "parameter": {"new.w"}}}
    found = changed(marked(b, lone=lone), "of_table, is_lone")
    assert found == [(t, True) for t in ("gradients", "module_calls", "node_events", "parameters")]
    other_side = {"baseline": lone["candidate"], "candidate": {}}
    assert changed(marked(b, lone=other_side)) == []


def test_nodes_of_a_pass_that_one_side_alone_made_are_that_passes() -> None:
    more = at(EVERYWHERE, backward_index=1, kind="backward")
    b = extra(EVERYWHERE, backward_index=1)
    assert changed(marked({**b, "backward_passes": [*b["backward_passes"], *more]})) == []


def test_steps_with_other_passes_tell_nothing_of_a_modules_code() -> None:
    """Passes may ask for other Nodes. What is alone in the steps that are left is code in all of them."""
    more = at([(0, 1), (1, 1)], backward_index=1, kind="backward")
    b = extra([p for p in EVERYWHERE if p[1] != 1])
    rows = {**b, "backward_passes": [*b["backward_passes"], *more]}
    assert changed(marked(rows)) == [p for p in EVERYWHERE if p[1] != 1]


def test_what_a_rank_lacks_from_a_failure_on_is_no_code() -> None:
    row = {"node_name": "A", "module_fqn": "m"}
    failure = OneSidedFailure(0, 0, 0, row)
    a = extra(EVERYWHERE)
    assert changed(marked(run(), a)) == EVERYWHERE
    assert changed(marked(run(), a, failures=[failure])) == []
    late = [OneSidedFailure(rank, 2, 0, row) for rank in RANKS]
    # In front of it the Node is there alone in most steps: that is code, and what follows the failure is not.
    assert changed(marked(run(), a, failures=late)) == [p for p in EVERYWHERE if p[1] < 2]


def test_accumulation_of_a_gradient_is_no_code_of_a_module() -> None:
    assert changed(marked(extra(EVERYWHERE, "AccumulateGrad", parameter_fqn="m.w"))) == []


def left(connection: duckdb.DuckDBPyConnection, table: str) -> int:
    [(count,)] = connection.execute(f"SELECT count(*) FROM differing_{table}").fetchall()
    return int(count)


def test_changed_code_is_taken_out_and_what_happened_stays() -> None:
    b = extra(EVERYWHERE)
    b["node_events"] += at([(0, 1)], **{**NODE, "node_name": "DropoutBackward0"})
    connection = marked(b)
    take_out(connection)
    found = connection.execute("SELECT key_node_name FROM differing_node_events").fetchall()
    assert found == [("DropoutBackward0",)]


def group(names: list[str], **more: Any) -> list[Row]:
    settings = {"optimizer_class": "SGD", "learning_rate": 0.1, **more}
    return [{"optimizer_index": 0, "group_index": 0, "parameter_fqns": names, **settings}]


@pytest.mark.parametrize(
    ("names", "settings", "count"),
    [
        (["w", "new.w"], {}, 0),
        (["w", "new.w"], {"learning_rate": 0.2}, 1),
        (["new.w"], {}, 1),  # it has lost one that both have
    ],
)
def test_optimizer_that_holds_the_parameters_of_one_side_is_no_other_setting(
    names: list[str], settings: dict[str, Any], count: int
) -> None:
    lone = {"baseline": {}, "candidate": {"parameter": {"new.w"}}}
    a, b = ({**run(), "optimizer_groups": own} for own in (group(["w"]), group(names, **settings)))
    connection = marked(b, a, lone=lone)
    take_out(connection)
    assert left(connection, "optimizer_groups") == count


def work(left_by: float, gave: float = 1.0) -> tuple[dict[str, list[Row]], dict[str, list[Row]]]:
    """Both runs: the candidate runs one Node more, and what leaves the module's other Node is `left_by` times it."""
    both = []
    for n, side in enumerate((run(), extra(EVERYWHERE))):
        for row in side["node_events"]:
            if row["node_name"] == "MmBackward0":
                row |= sides(0.0, "grad_input_", times=left_by, lanes=4)[n]
        for row in side["module_calls"]:
            row |= sides(0.0, "output_", times=gave)[n]
        both.append(side)
    return both[0], both[1]


def is_excused(a: Rows, b: Rows, exceeding: str = "") -> bool:
    connection = marked(b, a)
    connection.execute(
        "UPDATE judged_node_events SET exceeds = true, beyond = true WHERE only_in IS NULL"
    )
    if exceeding:
        connection.execute(f"UPDATE judged_{exceeding} SET exceeds = true")
    take_out(connection)
    found = connection.execute(
        "SELECT bool_or(exceeds OR beyond) FROM differing_node_events WHERE only_in IS NULL"
    )
    return found.fetchall() == [(False,)]


def test_node_inside_changed_code_may_have_another_part_of_the_work() -> None:
    """Where all else agrees at the first step: what leaves the module, the loss, the gradients."""
    assert is_excused(*work(2.0))
    assert not is_excused(*work(2.0, gave=1.5), exceeding="module_calls")
    a, b = work(2.0)
    other = at(
        EVERYWHERE, **{**NODE, "module_fqn": "n", "node_name": "MmBackward0", "backward_index": 0}
    )
    for n, side in enumerate((a, b)):
        side["node_events"] += [
            row | sides(0.0, "grad_input_", times=2.0, lanes=4)[n] for row in other
        ]
    assert not is_excused(a, b)  # a Node of another module is beyond its tolerance too
