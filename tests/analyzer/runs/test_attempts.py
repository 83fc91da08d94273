from __future__ import annotations

from dataclasses import replace

import pytest

from gradtrace_analyzer.runs.attempts import Link, Span, link

SECOND = 10**9
BEFORE = Span(0, 0, 7, None, None, 2, "summary full", began_ns=0, seen_ns=100 * SECOND)
AFTER = Span(1, 5, 9, "offset", 5, 2, "summary full", began_ns=101 * SECOND)
COUNTED_ANEW = replace(AFTER, first=0, last=4, numbered_by=None, begins=None)


def linked(span: Span, *equal_before: int, before: Span = BEFORE) -> Link:
    assert before.first is not None and before.last is not None
    return link([before], before.first, before.last, span, equal_before)


@pytest.mark.parametrize("numbered_by", ["offset", "framework", "job"])
def test_attempt_whose_own_numbers_go_on_is_joined_as_it_is(numbered_by: str) -> None:
    span = replace(AFTER, numbered_by=numbered_by)  # type: ignore[arg-type]
    assert linked(span) == Link(numbered_by)  # type: ignore[arg-type]
    assert linked(replace(span, first=12, begins=12)).joined_by == numbered_by  # a gap is told


def test_attempt_that_its_own_numbers_put_at_the_start_is_not_joined() -> None:
    again = linked(replace(AFTER, first=0, begins=0, numbered_by="framework"))
    assert again == Link(why_not="it begins again at step 0 (the framework's counter)")
    late = replace(BEFORE, first=5)
    assert linked(AFTER, before=late).joined_by is None


def test_attempt_that_counts_from_0_is_joined_where_one_step_began_with_its_parameters() -> None:
    assert linked(COUNTED_ANEW, 5) == Link("parameters", 5)
    assert linked(replace(COUNTED_ANEW, first=2), 5) == Link("parameters", 3)


def test_offset_that_a_restarted_attempt_kept_is_believed_where_its_parameters_do_not_say_else() -> (
    None
):
    first = replace(AFTER, attempt=1)
    restarted = replace(AFTER, attempt=2, first=5, last=8, began_ns=200 * SECOND)
    found = link([BEFORE, first], 0, 12, restarted, [10])
    assert found == Link("parameters", 5)
    assert link([BEFORE, first], 0, 12, restarted, [5]) == Link("offset")
    assert link([BEFORE, first], 0, 12, restarted, []) == Link("offset")
    assert link([BEFORE], 0, 12, restarted, [10]) == Link("offset")


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((), "nothing tells with which step it goes on"),
        ((0,), "it begins anew, with the parameters that step 0 began with"),
        ((0, 1), "it begins anew, with the parameters that step 0 began with (other steps did, too)"),
        ((3, 4), "it begins with the parameters of several steps (3 and 4): which it goes on with cannot be told"),
    ],
)  # fmt: skip
def test_attempt_of_which_parameters_do_not_tell_stands_alone(
    steps: tuple[int, ...], said: str
) -> None:
    assert linked(COUNTED_ANEW, *steps) == Link(why_not=said)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"world_size": 1}, "it has 1 ranks, attempt 0 had 2"),
        ({"asked": "summary norms"}, "it was asked to record summary norms, attempt 0 summary full"),
        ({"began_ns": 50 * SECOND}, "it began while attempt 0 was still recording"),
    ],
)  # fmt: skip
def test_attempt_that_is_not_of_the_same_kind_is_not_joined(
    other: dict[str, object], said: str
) -> None:
    assert linked(replace(AFTER, **other)) == Link(why_not=said)  # type: ignore[arg-type]
