"""Steps that both sides number otherwise: both numbers at the first mention in a text, and never an edit of a text."""

from __future__ import annotations

import pytest

from gradtrace_analyzer.diff.origin import FailureOrigin
from gradtrace_analyzer.failures.failed_passes import OneSidedFailure
from gradtrace_analyzer.reports.diff.numbering import Steps
from gradtrace_analyzer.reports.diff.origins.sentences import origin_sentence
from gradtrace_analyzer.reports.diff.wording import Wording
from support.synthetic_runs.differences import call


def test_first_mention_of_a_step_names_both_numbers() -> None:
    steps = Steps(4)
    assert steps.first(11) == "Step 11 (the candidate's 7)"
    assert steps.one(11) == "step 11"
    assert steps.many([4, 5, 6, 9]) == "steps 4-6,9 (the candidate's 0-2,5)"
    assert steps.many([11]) == "step 11"


@pytest.mark.parametrize(
    ("offset", "steps", "said"),
    [
        (0, [3], "step 3"),
        (4, [0, 1, 2, 3], "steps 0-3"),  # the candidate cannot have them
        (-5, [-5, -4, -3, -2, -1], "the candidate's steps 0-4"),
        (-5, [2], "step 2 (the candidate's 7)"),
    ],
)
def test_steps_of_one_side_alone_have_its_own_numbers(
    offset: int, steps: list[int], said: str
) -> None:
    assert Steps(offset).many(steps) == said


def test_step_that_an_exception_speaks_of_is_left_as_it_was_said() -> None:
    row = {
        "node_name": None,
        "parameter_fqn": None,
        "exception_type": "ValueError",
        "exception_text": "bad step 11",
    }
    failure = OneSidedFailure(0, 11, 0, row)
    origin = FailureOrigin(call("m", 1, step=11), (0,), failure=failure)
    said = origin_sentence(origin, Wording(Steps(4)))
    assert said.startswith("Step 11 (the candidate's 7), rank 0: ")
    assert said.endswith("ValueError: bad step 11.")
