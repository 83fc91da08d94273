"""Ranks that crashed or died are told once, and as the cause where something was not done."""

from __future__ import annotations

from gradtrace_analyzer.diff.explanations.ends import Ends, ends_of, is_undone
from gradtrace_analyzer.diff.origin import (
    CodeOrigin,
    FailureOrigin,
    ForwardOrigin,
    LoneRowOrigin,
    Origin,
)
from gradtrace_analyzer.failures.crashes import Crash
from gradtrace_analyzer.failures.failed_passes import OneSidedFailure
from gradtrace_analyzer.reports.diff.explanations import TEMPLATES
from gradtrace_analyzer.reports.diff.numbering import Steps
from gradtrace_analyzer.reports.diff.wording import Wording
from support.synthetic_runs.differences import call, cover, run_of

ORIGIN = ForwardOrigin(call("m", 1), (0,))
CRASH = Crash(0, 3, "was ended by ValueError: boom", exception_type="ValueError")


def failed(node_name: str | None) -> OneSidedFailure:
    row = {"exception_type": "ValueError", "node_name": node_name}
    return OneSidedFailure(rank=0, step=3, backward_index=0, row=row, side="candidate")


def said(found: Ends | None, offset: int = 0) -> list[str]:
    template = TEMPLATES[Ends]
    assert template is not None
    return [] if found is None else list(template.sentences(found, Wording(Steps(offset))))


def test_only_sides_with_ranks_that_did_not_end_are_asked_for_deaths() -> None:
    runs = {"baseline": run_of(), "candidate": run_of()}
    assert ends_of(runs, cover(), (), ORIGIN) is None


def test_exception_that_ended_a_rank_is_told_once() -> None:
    runs, crashed = {"candidate": run_of()}, cover(crashes={"candidate": (CRASH,)})
    found = ends_of(runs, crashed, (), ORIGIN)
    assert said(found) == [
        "The candidate crashed: rank 0 was ended by ValueError: boom, in step 3."
    ]
    assert said(found, offset=2)[0].endswith("in step 3 (the candidate's 1).")
    assert ends_of(runs, crashed, [failed("A")], ORIGIN) is None


def test_what_one_side_did_not_come_to_do_has_its_end_as_cause() -> None:
    d = call("m", 1)
    undone: list[tuple[Origin, bool]] = [
        (LoneRowOrigin(d, (0,)), True),
        (FailureOrigin(d, (0,), failure=failed(None)), True),
        (FailureOrigin(d, (0,), failure=failed("A")), False),
        (CodeOrigin(d, (0,)), False),
        (ORIGIN, False),
    ]
    assert [is_undone(origin) for origin, _ in undone] == [is_cause for _, is_cause in undone]
