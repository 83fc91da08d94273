"""Which recorded counts are held against an origin's factor: passes, divisors, sizes of inputs."""

from __future__ import annotations

from typing import Any

import pytest

from gradtrace_analyzer.diff.code.structure import OneSided
from gradtrace_analyzer.diff.explanations.factor_causes import likely_causes
from gradtrace_analyzer.diff.origin import CodeOrigin, LocalGradientOrigin, Origin, ReceivedOrigin
from gradtrace_analyzer.reports.diff.explanations import cause_words
from support.synthetic_runs.differences import Row, Rows, action, changed, gradient, run_of, views


def step(passes: int = 2, divisor: int | None = 4, rows: int = 6, tokens: int = 5) -> Rows:
    """One step of a rank, with another one's, which must not be counted."""
    at = {"rank": 1, "step": 3}
    made: list[Row] = [{**at, "backward_index": n, "kind": "backward"} for n in range(passes)]
    made += [
        {**at, "backward_index": 8, "kind": "grad"},
        {**at, "backward_index": 9, "kind": "backward", "parent_backward_index": 0},
        {"rank": 0, "step": 3, "backward_index": 0, "kind": "backward"},
    ]
    bucket: Row = {**at, "kind": "all_reduce", "parameter_fqns": ["w"], "divisor": divisor}
    inputs = [{**at, "root": 0, "name": "x", "shape": [rows, tokens, 3]}]
    return {"backward_passes": made, "buckets": [bucket], "inputs": inputs}


def causes(
    factor: float,
    a: Rows,
    b: Rows,
    worlds: tuple[int, int] = (7, 7),
    kind: type[Origin] = LocalGradientOrigin,
    **more: Any,
) -> list[str]:
    d = gradient("w", 1, rank=1, step=3)
    origin = kind(d, (1,), None, changed(factor=factor), **more)
    runs = {
        side: run_of(range(n)) for side, n in zip(("baseline", "candidate"), worlds, strict=True)
    }
    found = likely_causes(views(a, b), runs, origin)
    return [] if found is None else cause_words(found)


@pytest.mark.parametrize(
    ("factor", "candidate", "said"),
    [
        (3 / 2, step(passes=3), "1.5 = 3/2: the number of backward passes in the step is 2 in the baseline and 3"),
        (8.0, step(divisor=32), "8: the divisor of the reduction is 4 in the baseline and 32 in the candidate"),
        (4 / 6, step(rows=4), "0.6667 = 2/3: the rows of input 'x' are 6 in the baseline and 4 in the candidate"),
        (11 / 5, step(tokens=11), "2.2 = 11/5: the elements of input 'x' are 90 in the baseline and 198"),
        (90.0, step(), "90: the elements of input 'x' are 90 on both sides; is it no longer divided by that"),
        (1 / 30, step(), "0.03333 = 1/30: the tokens of input 'x' are 30 on both sides; is it divided by that"),
        (7.0, step(), "7: the world size is 7 on both sides"),
    ],
)  # fmt: skip
def test_count_that_fits_the_factor_is_found(factor: float, candidate: Rows, said: str) -> None:
    assert causes(factor, step(), candidate)[0].startswith(said)


def test_divisor_that_one_side_did_not_record_is_not_held_against_it() -> None:
    assert not causes(4.0, step(), step(divisor=None))
    assert causes(4.0, step(), step())


def test_factor_that_is_no_more_than_rounding_is_not_explained() -> None:
    assert causes(1.005, step(rows=200), step(rows=201)) == []
    assert causes(1.02, step(rows=100), step(rows=102)) != []


def test_changed_code_and_the_way_between_stages_divide_nothing() -> None:
    code = (OneSided("node", "A", "candidate"),)
    assert causes(7.0, step(), step(), kind=CodeOrigin, code=code) == []
    d = action(0, 1, rank=1, step=3)
    runs = {"baseline": run_of(range(7)), "candidate": run_of(range(7))}
    between = ReceivedOrigin(d, (1,), None, changed(factor=7.0))
    assert likely_causes(views(step()), runs, between) is None


def test_difference_without_a_factor_has_no_cause() -> None:
    d = gradient("w", 1)
    runs = {"baseline": run_of(), "candidate": run_of()}
    assert likely_causes(views(step()), runs, LocalGradientOrigin(d, (0,), None, changed())) is None
