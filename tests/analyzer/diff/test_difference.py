"""One pair of rows: its factor, whether it counts, and how rows of the tables become objects."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gradtrace_analyzer.diff.difference import (
    Change,
    Difference,
    changed_gradient,
    differences,
    settings_apart,
)
from gradtrace_analyzer.diff.links import LINK_TABLES, STATISTICS
from gradtrace_analyzer.diff.pairing.pairs import make_judged
from support.synthetic_runs.builder import summary_columns
from support.synthetic_runs.differences import (
    changed,
    difference,
    loss,
    node,
    paired,
    parameter,
    unchanged,
)

SKETCH = [1.0, -2.0, 3.0, 4.0]


def held(sketch: list[float] | None, norm: float = 5.0) -> dict[str, Any]:
    return {"sketch": sketch, "norm": norm}


def of(a: list[float] | None, b: list[float] | None) -> Change:
    return Change(True, 0.1, 0.0, held(a), held(b))


@pytest.mark.parametrize("factor", [2.0, 0.25, -1.0, 1.001])
def test_factor_is_that_of_the_sketches(factor: float) -> None:
    assert of(SKETCH, [factor * x for x in SKETCH]).factor == pytest.approx(factor)


def test_factor_is_told_within_noise_that_is_small_beside_it() -> None:
    assert of(SKETCH, [2 * x + 0.01 for x in SKETCH]).factor == pytest.approx(2, abs=0.01)
    assert of(SKETCH, [2 * x + 0.5 * (-1) ** n for n, x in enumerate(SKETCH)]).factor is None


@pytest.mark.parametrize(
    "other",
    [
        SKETCH,  # the same
        SKETCH[::-1],  # another direction
        [2000 * x for x in SKETCH],  # memory that was never written
        [x / 2000 for x in SKETCH],
        SKETCH[:2],  # another width
        None,
    ],
)
def test_what_is_no_plain_multiple_has_no_factor(other: list[float] | None) -> None:
    assert of(SKETCH, other).factor is None
    assert of(other, SKETCH).factor is None


def test_zeros_and_rows_of_one_side_have_no_factor() -> None:
    assert of([0.0] * 4, SKETCH).factor is None
    assert of([math.inf, 1.0, 1.0, 1.0], SKETCH).factor is None
    assert Change(True, None, 0.0, None, held(SKETCH)).factor is None


@pytest.mark.parametrize(
    ("change", "differs", "exceeds"),
    [
        (unchanged(), False, False),
        (changed(1e-3, tolerance=1e-2), True, False),
        (changed(1e-1, tolerance=1e-2), True, True),
        (changed(None, tolerance=1e-2), True, True),  # NaN on one side: no number is large enough
    ],
)
def test_change_counts_beyond_its_tolerance_or_where_it_differs_at_all(
    change: Change, differs: bool, exceeds: bool
) -> None:
    assert change.is_apart(exceeding=False) == differs
    assert change.is_apart(exceeding=True) == exceeds


def test_nodes_number_is_that_of_the_side_which_has_it() -> None:
    assert node("a", 3, event_indices=(4, 5)).event_index == 4
    assert node("a", 3, event_indices=(None, 5)).event_index == 5


def test_link_of_a_row_follows_its_table_and_point() -> None:
    assert [parameter("w", 0, point).link for point in ("before", "after")] == [
        "parameters",
        "optimizer",
    ]
    assert loss(0).link == "loss"


def test_rows_of_a_table_become_objects_with_both_sides() -> None:
    """Of a row that one side alone has the other side's statistics are None; what is the same is no value apart."""
    key = {"backward_index": 0, "root": 0, "module_fqn": "m", "call_index": 0, "occurrence": 0}
    both = {**key, "event_index": 7, "node_name": "A", **summary_columns([3.0], "grad_output_", 4)}
    alone = {**key, "event_index": 8, "node_name": "B", **summary_columns([1.0], "grad_input_", 4)}
    connection = paired(
        {"node_events": [{**both, "rank": 1, "step": 2, **summary_columns([4.0], "grad_input_", 4)}]},
        {
            "node_events": [
                {**both, "rank": 1, "step": 2, **summary_columns([8.0], "grad_input_", 4)},
                {**alone, "rank": 1, "step": 2},
            ]
        },
    )  # fmt: skip
    _judged(connection, "node_events")
    pair, lone = _objects(connection, "node_events")
    assert (pair.rank, pair.step, pair.order, pair.only_in, pair.event_indices) == (
        1,
        2,
        0.0,
        None,
        (7, 7),
    )
    assert pair.reads is not None and not pair.reads.differs
    writes = pair.writes
    assert writes is not None and writes.baseline is not None and writes.candidate is not None
    assert (writes.baseline["norm"], writes.candidate["norm"]) == (4.0, 8.0)
    assert writes.error == 0.5 and writes.factor == pytest.approx(2.0)
    assert (writes.tolerance, writes.noise, writes.shown_by) == (0.25, "measured", "length")
    assert pair.reads.shown_by is None  # lengths tell of what leaves
    assert pair.exceeds and not lone.exceeds
    assert lone.only_in == "candidate" and lone.event_indices == (None, 8)
    assert lone.writes is not None and lone.writes.baseline is None
    assert lone.writes.candidate is not None and lone.writes.candidate["norm"] == 1.0


def test_only_values_that_are_not_the_same_are_kept_and_nan_is_itself() -> None:
    passes = {"backward_index": 0, "kind": "backward"}
    connection = paired(
        {"backward_passes": [passes | {"loss": math.nan, "ddp_sync": "sync"}]},
        {"backward_passes": [passes | {"loss": math.nan, "ddp_sync": "no_sync"}]},
    )
    _judged(connection, "backward_passes")
    [found] = _objects(connection, "backward_passes")
    assert found.values == {"ddp_sync": ("sync", "no_sync")}


def _judged(connection: Any, table: str) -> None:
    """The columns that a judgement adds, so that pairs are beyond their tolerance and lone rows are not."""
    [of_table] = [t for t in LINK_TABLES if t.table == table]
    tolerances = "".join(f"0.25::DOUBLE AS {role}_tolerance, " for role, _ in of_table.sides)
    rows = (
        f"SELECT *, {tolerances}'measured' AS noise, 'length' AS shown_by, only_in IS NULL AS beyond, "
        f"given AS exceeds FROM kept_{table}"
    )
    make_judged(connection, of_table, rows)


def _objects(connection: Any, table: str) -> list[Difference]:
    [of_table] = [t for t in LINK_TABLES if t.table == table]
    cursor = connection.execute(f"FROM differing_{table} ORDER BY place")
    return differences(of_table, [c[0] for c in cursor.description], cursor.fetchall())


def statistics(a: dict[str, Any], b: dict[str, Any]) -> list[Any]:
    usual = {
        "numel": 4,
        "dtype": "float32",
        "abs_max": 1.0,
        "sum": 0.0,
        "nan_count": 0,
        "inf_count": 0,
    }
    return [side[name] for name in STATISTICS for side in ({**usual, **a}, {**usual, **b})]


def test_single_gradient_is_held_against_the_tolerance_of_its_node() -> None:
    d = node("m", 0, writes=changed(tolerance=0.125))
    a, b = held([3.0, 4.0], 5.0), held([0.0, 0.0], 0.0)
    change = changed_gradient(statistics(a, b), False, d)
    assert (change.differs, change.error, change.tolerance) == (True, 1.0, 0.125)
    assert change.baseline is not None and change.baseline["norm"] == 5.0
    spoilt = changed_gradient(statistics(a, {**a, "nan_count": 1}), False, d)
    assert spoilt.error is None
    other_width = changed_gradient(statistics(a, held([1.0], 5.0)), True, d)
    assert (other_width.error, other_width.differs) == (None, False)


def test_of_a_groups_hyperparameters_those_that_differ_are_told() -> None:
    """A side may have none at all."""
    old, new = (
        '{"momentum": 0.9, "nesterov": false}',
        '{"momentum": 0.5, "nesterov": false, "b": 1}',
    )
    assert settings_apart({"learning_rate": (0.1, 0.2), "hyperparameters": (old, new)}) == {
        "learning_rate": (0.1, 0.2),
        "b": (None, 1),
        "momentum": (0.9, 0.5),
    }
    assert settings_apart({"hyperparameters": (None, '{"b": 1}')}) == {"b": (None, 1)}
    assert settings_apart(difference("optimizer_groups", 0).values) == {}
