"""Two pipelines that were scheduled otherwise: told by the order of their actions, and arranged alike."""

from __future__ import annotations

from typing import Any

import duckdb
import pytest

from gradtrace_analyzer.diff.divided.by_stage import arrange, scheduled_otherwise
from support.synthetic_runs.differences import Row, Rows, views


def actions(*ranks: str, step: int = 0, **more: Any) -> Rows:
    """Of each rank its actions in order: `0F1 0B1` is the forward of microbatch 1 of stage 0, then its backward.

    `B` is whole, `I` and `W` are its halves.
    """
    kinds = {"F": "forward", "B": "backward_full", "I": "backward_input", "W": "backward_weight"}
    rows: list[Row] = []
    for rank, text in enumerate(ranks):
        for n, word in enumerate(text.split()):
            rows.append(
                {
                    "rank": rank,
                    "step": step,
                    "stage_index": int(word[0]),
                    "kind": kinds[word[1]],
                    "microbatch": int(word[2]),
                    "occurrence": 0,
                    "start_ns": 10 * n,
                    "end_ns": 10 * n + 9,
                    **more,
                }
            )
    return {"stage_events": rows}


ONE_BY_ONE = actions("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


@pytest.mark.parametrize(
    ("candidate", "otherwise"),
    [
        (ONE_BY_ONE, False),
        (actions("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"), False),  # forwards may come as they like
        (actions("0F0 0F1 0B0 0B1", "1F0 1F1 1B1 1B0"), True),
        (actions("0F0 0F1 0B0 0B1", "1F0 1I0 1W0 1F1 1B1"), True),  # a pass in two halves
        (actions("1F0 1B0 1F1 1B1", "0F0 0F1 0B0 0B1"), True),  # other ranks
        (actions("0F0 0F1 0B0 0B1"), True),  # fewer ranks
        ({}, False),  # no pipeline
    ],
)
def test_runs_are_scheduled_otherwise_where_backwards_come_in_another_order(
    candidate: Rows, otherwise: bool
) -> None:
    assert scheduled_otherwise(views(ONE_BY_ONE, candidate)) == otherwise


def test_rank_that_one_side_lacks_is_missing_where_both_are_of_one_size() -> None:
    fewer = actions("0F0 0F1 0B0 0B1")
    assert not scheduled_otherwise(views(ONE_BY_ONE, fewer), of_one_size=True)
    assert scheduled_otherwise(views(ONE_BY_ONE, actions("0F0 0F1 0B1 0B0")), of_one_size=True)


def test_first_step_that_both_made_tells() -> None:
    early = actions("0F0 0B0", step=0)["stage_events"]
    late = actions("0F0 0F1 0B1 0B0", step=1)["stage_events"]
    a: Rows = {"stage_events": [*early, *late]}
    assert not scheduled_otherwise(views(a, {"stage_events": late}))
    # An action that failed has not been done.
    failed = [*late[:3], late[3] | {"error": "no"}]
    assert scheduled_otherwise(views(a, {"stage_events": failed}))


def pipeline(*order: str, holders: tuple[int, int] = (0, 1), split: bool = False) -> Rows:
    """Two microbatches of two stages with a module each; `order` is that of the second stage's backwards."""
    rows: dict[str, list[Row]] = {
        name: []
        for name in (
            "parameters",
            "module_calls",
            "stage_events",
            "node_events",
            "gradients",
            "steps",
            "inputs",
        )
    }
    clock = 0
    for stage, rank in enumerate(holders):
        at = {"rank": rank, "step": 3}
        name = {**at, "root": 0}
        weight = {**name, "parameter_fqn": f"s{stage}.w"}
        rows["parameters"].append({**weight, "point": "before", "kind": "parameter"})
        rows["module_calls"].append(
            {
                **name,
                "module_fqn": "probe",
                "phase": "forward",
                "call_index": 0,
                "depth": 0,
                "start_ns": 0,
                "end_ns": 1,
            }
        )
        for microbatch in (0, 1):
            clock += 10
            here = {
                **name,
                "microbatch": microbatch,
                "call_index": 0,
                "start_ns": clock + 1,
                "end_ns": clock + 2,
            }
            rows["inputs"].append(
                {**name, "microbatch": microbatch, "call_index": 0, "name": "x", "numel": stage}
            )
            rows["module_calls"].append(
                {**here, "module_fqn": f"s{stage}", "phase": "forward", "depth": 0}
            )
            rows["stage_events"].append(
                {**at, "stage_index": stage, "microbatch": microbatch, "kind": "forward", "occurrence": 0,
                 "start_ns": clock, "end_ns": clock + 9, "received_numel": 5, "sent_numel": 6}
            )  # fmt: skip
        halves = ("backward_input", "backward_weight") if split and stage else ("backward_full",)
        for number, word in enumerate(order if stage else ("0", "1")):
            microbatch = int(word)
            for half, kind in enumerate(halves):
                clock += 10
                node = {
                    **name,
                    "microbatch": microbatch,
                    "backward_index": 2 * number + half,
                    "module_fqn": f"s{stage}",
                    "call_index": 0,
                    "stage_index": stage,
                    "outcome": "ok",
                }
                rows["node_events"].append(
                    {**node, "node_name": "MmBackward0", "occurrence": number, "event_index": 0,
                     "autograd_seq": microbatch, "grad_input_count": 1, "grad_input_numel": 1,
                     "grad_input_norm": 3.0 + half, "grad_input_fingerprint": 7 + half}
                )  # fmt: skip
                if half == len(halves) - 1:
                    gradient = {
                        **weight,
                        "microbatch": microbatch,
                        "backward_index": 2 * number + half,
                    }
                    rows["gradients"].append({**gradient, "point": "local"})
                rows["stage_events"].append(
                    {**at, "stage_index": stage, "microbatch": microbatch, "kind": kind, "occurrence": number,
                     "start_ns": clock, "end_ns": clock + 9, "received_numel": 7, "sent_numel": 8}
                )  # fmt: skip
        rows["parameters"].append({**weight, "point": "after", "kind": "parameter"})
        rows["steps"].append({**at, "digest_forward": 5, "rng_fingerprint": 6})
    return rows


@pytest.fixture(scope="module")
def arranged() -> duckdb.DuckDBPyConnection:
    """The candidate has its stages on other ranks, turns the second microbatch first and splits its passes."""
    connection = views(pipeline("0", "1"), pipeline("1", "0", holders=(4, 2), split=True))
    connection.execute("CREATE TABLE told (words VARCHAR)")
    stages = arrange(connection)
    connection.execute("INSERT INTO told VALUES (?)", [repr(stages)])
    return connection


def rows_of(
    connection: duckdb.DuckDBPyConnection, table: str, columns: str
) -> list[list[tuple[Any, ...]]]:
    return [
        connection.execute(f"SELECT {columns} FROM {side}.{table} ORDER BY rank, record_index").fetchall()
        for side in ("baseline", "candidate")
    ]  # fmt: skip


def test_stages_take_the_place_of_ranks(arranged: duckdb.DuckDBPyConnection) -> None:
    said = arranged.execute("FROM told").fetchone()
    assert said == (
        "Stages(ranks={'baseline': {0: 0, 1: 1}, 'candidate': {0: 4, 1: 2}}, count=2, left_out=0)",
    )


@pytest.mark.parametrize(
    ("table", "columns"),
    [
        ("parameters", "rank, root, parameter_fqn, point"),
        ("module_calls", "rank, root, module_fqn, microbatch"),
        ("inputs", "rank, root, name, microbatch, numel"),
        ("node_events", "rank, root, module_fqn, node_name, microbatch, backward_index, event_index, occurrence"),
        ("stage_events", "rank, kind, microbatch, occurrence, received_numel, sent_numel"),
    ],
)  # fmt: skip
def test_rows_are_the_same_on_both_sides_whatever_the_schedule(
    table: str, columns: str, arranged: duckdb.DuckDBPyConnection
) -> None:
    a, b = rows_of(arranged, table, columns)
    assert a == b and a


def test_calls_outside_any_action_are_left_out(arranged: duckdb.DuckDBPyConnection) -> None:
    names, _ = rows_of(arranged, "module_calls", "module_fqn")
    assert {name for (name,) in names} == {"s0", "s1"}


def test_both_ends_of_a_pipeline_receive_and_send_nothing_there(
    arranged: duckdb.DuckDBPyConnection,
) -> None:
    found, _ = rows_of(arranged, "stage_events", "rank, kind, received_numel, sent_numel")
    assert set(found) == {
        (0, "forward", None, 6),
        (1, "forward", 5, 6),
        (1, "backward_full", None, 8),
        (0, "backward_full", 7, None),
    }


def test_rows_come_forward_then_backward_by_microbatch(arranged: duckdb.DuckDBPyConnection) -> None:
    """All of a step's places are in blocks: parameters, forwards, what is carried, backwards, and what follows."""
    for table in ("module_calls", "node_events", "gradients"):
        _, found = rows_of(arranged, table, "rank, microbatch, record_index")
        microbatches = [m for rank, m, _ in found if rank == 1]
        assert microbatches == sorted(microbatches)
    _, calls = rows_of(arranged, "module_calls", "record_index")
    _, nodes = rows_of(arranged, "node_events", "record_index")
    assert max(calls) < min(nodes)


def test_gradients_that_were_added_in_another_order_are_compared_as_the_sum_alone(
    arranged: duckdb.DuckDBPyConnection,
) -> None:
    a, b = rows_of(arranged, "gradients", "rank, point, backward_index")
    assert a == b == [(0, "local", 0), (0, "local", 1), (1, "local", 0)]
    _, last = rows_of(arranged, "gradients", "rank, microbatch")
    assert last[-1] == (1, 0)  # the candidate added microbatch 1 first


def test_step_of_a_stage_has_no_digests_nor_generator(arranged: duckdb.DuckDBPyConnection) -> None:
    a, b = rows_of(arranged, "steps", "rank, step, digest_forward, rng_fingerprint")
    assert a == b == [(0, 3, None, None), (1, 3, None, None)]


def test_what_one_side_has_no_row_of_is_left_out_of_both() -> None:
    without = {k: v for k, v in pipeline("0", "1").items() if k != "inputs"}
    connection = views(pipeline("0", "1"), without)
    arrange(connection)
    assert rows_of(connection, "inputs", "rank") == [[], []]
    assert rows_of(connection, "module_calls", "rank")[0] != []
