"""Why two runs cannot be compared at all, in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from gradtrace_analyzer.diff.scope.limits import nothing_to_compare
from gradtrace_analyzer.diff.scope.selection import chosen
from support.synthetic_runs.differences import cover, run_of

RUNS = {"baseline": run_of((0, 1)), "candidate": run_of((2, 3), world_size=4)}
NOWHERE: dict[str, dict[int, list[int]]] = {"both": {}, "baseline": {}, "candidate": {}}
BOTH = {"both": {0: [0]}}


def reason(
    steps: dict[str, dict[int, list[int]]] | None = None,
    compared: tuple[int, ...] = (0,),
    *,
    has_summaries: bool = True,
    rows: dict[str, int] | None = None,
    **asked: Any,
) -> str | None:
    of = cover(selection=chosen(**asked), **({} if rows is None else {"rows": rows}))
    seen = NOWHERE | (BOTH if steps is None else steps)
    return nothing_to_compare(RUNS, compared, seen, of, has_summaries=lambda: has_summaries)


def test_runs_with_rows_of_the_same_ranks_and_steps_can_be_compared() -> None:
    assert reason() is None
    assert reason(step=0, rows={"parameters": 1}) is None


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (None, "no rank was recorded on both sides: ranks 0-1 against ranks 2-3"),
        ("5,7", "ranks 5,7 were not recorded on both sides: ranks 0-1 against ranks 2-3"),
    ],
)
def test_ranks_that_are_on_one_side_alone_are_named(asked: str | None, said: str) -> None:
    assert reason(compared=(), ranks=asked) == said


@pytest.mark.parametrize(
    ("baseline", "candidate", "said"),
    [
        ({0: [0, 1]}, {0: [4]}, "no step was recorded on both sides: steps 0-1 against step 4 (GRADTRACE_STEP_OFFSET"),
        ({0: [0]}, {}, "the candidate holds no step yet: nothing was recorded before the job ended"),
        ({}, {}, "the baseline and the candidate hold no step yet"),
    ],
)  # fmt: skip
def test_sides_without_a_common_step_are_told_which_they_have(
    baseline: dict[int, list[int]], candidate: dict[int, list[int]], said: str
) -> None:
    found = reason({"both": {}, "baseline": baseline, "candidate": candidate})
    assert found is not None and found.startswith(said)


def test_step_that_was_asked_for_is_named() -> None:
    assert reason({"both": {}}, step=7) == "step 7 was not recorded on both sides"


def test_selection_without_rows_is_said_in_its_words() -> None:
    nothing = {"parameters": 0, "gradients": 0}
    assert reason(rows=nothing, modules=["a"]) == "nothing that both recorded is of module a"
    assert reason(rows=nothing) is None  # what both recorded is looked at otherwise


def test_sides_without_summaries_cannot_be_compared() -> None:
    found = reason(has_summaries=False)
    assert found is not None and found.startswith("one side recorded neither values nor norms")


def test_summaries_are_asked_for_last() -> None:
    def never() -> bool:
        raise AssertionError("it reads the tables")

    assert nothing_to_compare(RUNS, (), NOWHERE, cover(), has_summaries=never) is not None
