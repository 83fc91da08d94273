"""What both sides recorded: the one place that is asked before anything is called equal."""

from __future__ import annotations

from typing import Any

import pytest

from gradtrace_analyzer.diff.scope.recorded import Recorded, Rows
from support.synthetic_runs.differences import Row, sides, started, views


def weight(point: str = "before", rank: int = 0, step: int = 0, **more: Any) -> Row:
    return {"rank": rank, "step": step, "root": 0, "parameter_fqn": "a.w", "point": point} | more


VALUES = sides()[0]
BEFORE = Rows("parameters", 0, (0,), "", {"point": "before"})


@pytest.mark.parametrize(
    ("baseline", "candidate", "is_held"),
    [
        ([weight(**VALUES)], [weight(**VALUES)], True),
        ([weight(**VALUES)], [], False),
        ([weight(**VALUES)], [weight()], False),  # a row without values
        ([weight(**VALUES)], [weight("after", **VALUES)], False),
        ([weight(**VALUES)], [weight(step=1, **VALUES)], False),
        ([weight(**VALUES)], [weight(rank=1, **VALUES)], False),
    ],
)
def test_rows_count_where_both_sides_hold_them_with_values(
    baseline: list[Row], candidate: list[Row], is_held: bool
) -> None:
    connection = views({"parameters": baseline}, {"parameters": candidate})
    assert Recorded(connection).both(BEFORE) == is_held
    swapped = views({"parameters": candidate}, {"parameters": baseline})
    assert Recorded(swapped).both(BEFORE) == is_held


def test_rows_must_be_there_on_each_rank_that_is_asked_for() -> None:
    recorded = Recorded(views({"parameters": [weight(**VALUES)]}))
    assert recorded.both(BEFORE)
    assert not recorded.both(Rows("parameters", 0, (0, 1), "", {"point": "before"}))
    assert recorded.both(Rows("parameters", 0, None, "", {"point": "before"}))


def test_all_rows_must_have_values_where_that_is_asked() -> None:
    both = [weight(**VALUES), weight(rank=1)]
    asked = Rows("parameters", 0, None, "")
    assert Recorded(views({"parameters": both})).both(asked)
    assert not Recorded(views({"parameters": both})).both_all(asked)
    assert Recorded(views({"parameters": both[:1]})).both_all(asked)
    assert not Recorded(views({})).both_all(asked)


@pytest.mark.parametrize(
    ("group", "is_set"),
    [
        ({"learning_rate": 0.1, "hyperparameters": "{}"}, True),
        ({"learning_rate": None, "hyperparameters": '{"eps": 1}'}, True),
        # An optimizer around others: neither its rate nor anything else was read.
        ({"learning_rate": None, "hyperparameters": "{}"}, False),
        ({"learning_rate": 0.1, "parameter_fqns": ["b.w"]}, False),
    ],
)
def test_settings_are_those_of_the_group_that_holds_the_parameter(group: Row, is_set: bool) -> None:
    row = {"optimizer_index": 0, "group_index": 0, "parameter_fqns": ["a.w"]} | group
    assert Recorded(views({"optimizer_groups": [row]})).both_set(0, (0,), "a.w") == is_set


def test_links_of_a_step_are_those_with_values_on_both_sides() -> None:
    rows = {
        "parameters": [weight(**VALUES), weight("after", step=1, **VALUES)],
        "gradients": [
            weight("local", backward_index=0, **VALUES),
            weight("final", backward_index=0),
        ],
        "backward_passes": [{"backward_index": 0, "kind": "backward", "loss": 1.0}],
        "module_calls": [
            {"root": 0, "module_fqn": "a", "phase": "forward", **sides(prefix="input_")[0]}
        ],
    }
    recorded = Recorded(views(rows))
    assert recorded.links(0) == {"parameters", "local_gradient", "loss"}
    assert recorded.links(1) == {"optimizer"}
    assert Recorded(views(rows, {})).links(0) == set()


def test_norms_alone_prove_nothing_bit_for_bit() -> None:
    norms = {**VALUES, "fingerprint": None}
    assert Recorded(views({"parameters": [weight(**VALUES)]})).bit_for_bit()
    assert not Recorded(views({"parameters": [weight(**norms)]})).bit_for_bit()


def test_tables_without_values_pair_by_name_alone() -> None:
    rows = {
        "parameters": [weight()],
        "inputs": [{"root": 0, "name": "x", "call_index": 0, **VALUES}],
    }
    assert Recorded(views(rows)).without_values() == ["parameters"]


def test_any_step_is_one_that_both_sides_recorded() -> None:
    rows = {"parameters": [weight()], "gradients": [weight("final", backward_index=0, **VALUES)]}
    assert Recorded(started(rows)).both_in_any_step("gradients", "point = 'final'", "")
    other = {"parameters": [weight(step=1)], "gradients": [weight("final", step=1, **VALUES)]}
    assert not Recorded(started(rows, other)).both_in_any_step("gradients", "point = 'final'", "")
