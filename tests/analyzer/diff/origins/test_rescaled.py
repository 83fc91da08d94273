"""Where gradients that one factor explains stop following it, and which side multiplied its `.grad` by what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gradtrace_analyzer.diff.difference import Change, Difference
from gradtrace_analyzer.diff.origin import Rescaled
from gradtrace_analyzer.diff.origins.rescaled import first_rescaled
from support.synthetic_runs.differences import accumulating, gradient

# What each of three passes adds to `.grad` in the baseline; in the candidate three times as much.
ADDED = ([1.0, -2.0, 0.5, 3.0], [2.0, 1.0, -1.0, 0.25], [0.5, 0.5, 4.0, -1.0])
FACTOR = 3.0


def change(a: Sequence[float], b: Sequence[float]) -> Change:
    def side(lanes: Sequence[float]) -> dict[str, Any]:
        return {"sketch": list(lanes), "norm": 1.0}

    return Change(True, 1.0, 0.0, side(a), side(b))


def sums(times: float) -> list[list[float]]:
    """`.grad` after each pass, where it was multiplied by a number before the second."""
    total = [0.0] * 4
    found = []
    for n, added in enumerate(ADDED):
        total = [(times if n == 1 else 1.0) * t + a for t, a in zip(total, added, strict=True)]
        found.append(total)
    return found


def step(
    baseline: float = 1.0, candidate: float = 1.0, name: str = "w", start: int = 0
) -> list[Difference]:
    """The rows of one parameter in three passes; each side multiplied its `.grad` before the second."""
    rows: list[Difference] = []
    of_sides = zip(sums(baseline), sums(candidate), strict=True)
    for n, (a, b) in enumerate(of_sides):
        at: dict[str, Any] = {"backward_index": n}
        arrived = change(ADDED[n], [FACTOR * x for x in ADDED[n]])
        rows.append(accumulating(name, start + 10 * n + 1, reads=arrived, **at))
        rows.append(gradient(name, start + 10 * n, writes=change(a, [FACTOR * x for x in b]), **at))
    return rows


def place(found: Rescaled | None) -> tuple[Any, ...]:
    assert found is not None
    return found.parameter_fqn, found.after, found.backward_index, found.side


@pytest.mark.parametrize(
    ("side", "times", "rows"),
    [("baseline", 0.5, step(baseline=0.5)), ("candidate", 4.0, step(candidate=4.0))],
)
def test_side_that_multiplied_its_gradient_is_named_with_the_number(
    side: str, times: float, rows: list[Difference]
) -> None:
    found = first_rescaled(rows, FACTOR)
    assert place(found) == ("w", 0, 1, side)
    assert found is not None and found.times == pytest.approx(times)


def test_gradients_that_follow_the_factor_to_the_end_were_not_rescaled() -> None:
    assert first_rescaled(step(), FACTOR) is None


def test_factor_that_no_pass_follows_is_not_looked_for() -> None:
    assert first_rescaled(step(candidate=4.0), 2.0) is None


def test_first_pass_alone_shows_nothing_since_nothing_was_there_before_it() -> None:
    assert first_rescaled(step(candidate=4.0)[2:4], FACTOR) is None


def test_gradient_without_its_node_ends_the_search() -> None:
    rows = step(candidate=4.0)
    assert first_rescaled(rows[:2] + rows[3:], FACTOR) is None


def test_parameters_of_the_same_pass_are_counted() -> None:
    rows = step(candidate=4.0) + step(candidate=4.0, name="v", start=2)
    found = first_rescaled(rows, FACTOR)
    assert found is not None and (found.parameter_fqn, found.others) == ("w", 1)


def test_what_no_number_explains_names_no_side() -> None:
    """Of one parameter some elements were changed: no multiple of what was there."""
    rows = step()
    spoilt = change(sums(1.0)[1], [9.0, -7.0, 2.0, 1.0])
    rows[3] = gradient("w", 10, writes=spoilt, backward_index=1)
    assert place(first_rescaled(rows, FACTOR)) == ("w", 0, 1, None)


def test_both_sides_multiplied_alike_names_none() -> None:
    assert first_rescaled(step(baseline=0.5, candidate=0.5), FACTOR) is None
    assert place(first_rescaled(step(baseline=0.5, candidate=0.25), FACTOR)) == ("w", 0, 1, None)


def test_wide_sketches_are_folded_to_those_of_nodes() -> None:
    def wide(lanes: Sequence[float]) -> list[float]:
        return [x / 4 for _ in range(4) for x in lanes]

    rows = []
    for d in step(candidate=4.0):
        if d.table == "gradients" and d.writes is not None:
            assert d.writes.baseline is not None and d.writes.candidate is not None
            widened = change(wide(d.writes.baseline["sketch"]), wide(d.writes.candidate["sketch"]))
            rows.append(
                gradient("w", d.order, writes=widened, backward_index=d.key["backward_index"])
            )
        else:
            rows.append(d)
    found = first_rescaled(rows, FACTOR)
    assert found is not None and found.times == pytest.approx(4.0)
