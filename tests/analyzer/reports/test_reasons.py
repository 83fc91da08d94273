"""Why nothing can be said, with the steps as both sides number them; and where an origin is, in a list."""

from __future__ import annotations

from gradtrace_analyzer.diff.answer import Answer
from gradtrace_analyzer.diff.origin import InputsOrigin, LossOrigin, Origin
from gradtrace_analyzer.diff.scope.cover import lacking_words
from gradtrace_analyzer.diff.scope.step_alignment import StepAlignment
from gradtrace_analyzer.reports.diff.places import place_of
from gradtrace_analyzer.reports.diff.text import explanation
from support.synthetic_runs.differences import cover, given, loss


def test_steps_that_the_baseline_cannot_have_are_told_by_the_candidates_numbers() -> None:
    lacks = cover(
        missing_steps={"baseline": {0: (-2, -1)}, "candidate": {}},
        unread={"baseline": (("gradients", 0),), "candidate": ()},
        alignment=StepAlignment(-2),
    )
    answer = Answer("incomparable", lacking_words(lacks), (), (), lacks)
    assert "the baseline lacks the candidate's steps 0-1 of rank 0" in explanation(answer)


def test_input_and_loss_are_named_so_that_they_can_differ() -> None:
    found: list[Origin] = [InputsOrigin(given(1, "x"), (0,)), LossOrigin(loss(2), (0,))]
    assert list(map(place_of, found)) == ["the input 'x'", "the loss"]
