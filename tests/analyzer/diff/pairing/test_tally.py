"""Steps that are counted and not kept: a few numbers each, joined, chosen and told as a spread."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gradtrace_analyzer.diff.pairing.tally import (
    Tally,
    first_step,
    joined,
    merged_spread,
    steps_of,
    tallied,
)
from support.synthetic_runs.builder import summary_columns
from support.synthetic_runs.differences import Row, each_step, paired


def tally(
    *steps: int, rank: int = 0, table: str = "node_events", point: str | None = None, **more: Any
) -> Tally:
    """Each step has two rows; its error is its number in thousandths, and `exceeds` is true of even steps."""
    arrays: dict[str, Any] = {
        "rows": np.full(len(steps), 2),
        "errors": np.array(steps, float) / 1000,
        "exceeds": np.array([step % 2 == 0 for step in steps]),
        "nonfinite": np.array([step == 7 for step in steps]),
        "unmeasured": np.zeros(len(steps), int),
        "places": np.array([f"at {step}" for step in steps], object),
    }
    return Tally(rank, table, point, np.array(steps), **{**arrays, **more})


def test_tallies_of_one_place_are_put_one_behind_the_other() -> None:
    both = joined([tally(1, 2), tally(5)])
    assert both.steps.tolist() == [1, 2, 5] and both.rows.tolist() == [2, 2, 2]
    assert both.places.tolist() == ["at 1", "at 2", "at 5"]
    one = tally(3)
    assert joined([one]) is one


def test_steps_may_be_taken_out() -> None:
    whole = tally(1, 2, 7)
    assert whole.without({2, 9}).steps.tolist() == [1, 7]
    assert whole.without({2, 9}).errors.tolist() == [0.001, 0.007]
    assert whole.among([7, 1]).tolist() == [True, False, True]
    assert whole.where(whole.nonfinite).steps.tolist() == [7]
    assert whole.without(()) is whole


def test_first_step_of_all_or_of_those_that_something_is_true_of() -> None:
    tallies = [tally(7, 3), tally(5, 6)]
    assert first_step(tallies) == {3}
    assert first_step(tallies, "exceeds") == {6}
    assert first_step(tallies, "nonfinite") == {7}
    assert first_step([tally(1)], "nonfinite") == first_step([]) == set()
    assert steps_of(tallies) == {3, 5, 6, 7} and steps_of(tallies, "exceeds") == {6}


def told(*entries: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    return [tuple(entry.values()) for entry in merged_spread(entries, ())]


def row(
    step: int,
    count: int,
    error: float | None,
    exceeds: bool | None,
    unmeasured: int,
    place: str | None,
) -> tuple[Any, ...]:
    return (0, "node_events", None, step, count, error, exceeds, unmeasured, place)


def test_entry_of_a_rank_and_link_takes_its_first_step_and_adds_the_rest_up() -> None:
    later, earlier = row(5, 2, 0.25, False, 1, "b"), row(3, 4, None, True, 2, "a")
    assert told(later, earlier) == [(0, "backward", 3, 6, 0.25, 3, True, "a")]
    assert told(earlier, later) == [(0, "backward", 3, 6, 0.25, 3, True, "a")]


@pytest.mark.parametrize(
    ("either", "beyond"),
    [
        ([False, False], False),
        ([False, None], None),  # it may be beyond: the step was not opened
        ([None, True], True),
        ([True, False], True),
    ],
)
def test_one_step_beyond_its_tolerance_tells_whatever_the_others_are(
    either: list[bool | None], beyond: bool | None
) -> None:
    entries = [row(n, 1, 0.5, exceeds, 0, None) for n, exceeds in enumerate(either)]
    [found] = merged_spread(entries, ())
    assert found["beyond_tolerance"] is beyond


def test_points_of_one_table_are_links_of_their_own() -> None:
    entries = [(0, "gradients", point, 1, 1, 0.5, False, 0, "w") for point in ("local", "final")]
    assert [e["link"] for e in merged_spread(entries, ())] == ["local_gradient", "clip"]


def test_tally_is_told_by_its_first_step_and_largest_error() -> None:
    unknown = tally(4, 2, errors=np.array([np.nan, np.nan]), unmeasured=np.array([1, 2]))
    found = merged_spread((), [tally(5, 9, 3), tally(rank=1), unknown.where(unknown.steps > 9)])
    assert [tuple(e.values()) for e in found] == [(0, "backward", 3, 6, 0.009, 0, False, "at 3")]
    [alone] = merged_spread((), [unknown])
    assert (alone["largest_error"], alone["unmeasured_count"]) == (None, 3)


@pytest.mark.parametrize(
    ("steps", "is_judged", "beyond"),
    [((3, 4), True, True), ((3, 4), False, None), ((3, 5), False, False)],
)
def test_tally_that_was_not_judged_only_proposes_what_may_be_beyond(
    steps: tuple[int, ...], is_judged: bool, beyond: bool | None
) -> None:
    [found] = merged_spread((), [tally(*steps, is_judged=is_judged)])
    assert found["beyond_tolerance"] is beyond


def test_open_steps_are_tallied_by_rank_point_and_step() -> None:
    def gradient(name: str, value: float, point: str = "local", **more: Any) -> Row:
        key = {"root": 0, "parameter_fqn": name, "point": point, "backward_index": 0}
        return {**key, **summary_columns([value, 1.0]), **more}

    names = [gradient("v", 2.0), gradient("w", 3.0), gradient("w", 3.0, "final", rank=1)]
    others = [gradient("v", 4.0), gradient("w", float("nan")), gradient("w", 6.0, "final", rank=1)]
    steps = {"steps": [{"rank": rank, "step": s} for rank in (0, 1) for s in (0, 1)]}
    connection = paired(
        {**steps, "gradients": [*each_step((0, 1), names), gradient("u", 1.0)]},
        {**steps, "gradients": each_step((0, 1), others)},
    )
    connection.execute("UPDATE judged_gradients SET exceeds = step = 1")
    found = {(t.rank, t.point): t for t in tallied(connection)}
    assert set(found) == {(0, "local"), (1, "final")}
    local = found[0, "local"]
    assert local.steps.tolist() == [0, 1] and local.exceeds.tolist() == [False, True]
    assert local.rows.tolist() == [3, 2] and local.nonfinite.tolist() == [True, True]
    assert local.unmeasured.tolist() == [1, 1]  # a row of one side alone has no error to measure
    assert local.errors.tolist()[1] == pytest.approx(2 / 17**0.5)
    assert local.places.tolist() == ["v", "v"]
    assert found[1, "final"].steps.tolist() == [0, 1]
