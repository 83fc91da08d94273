"""Whether norms and sums of both sides were added up in the same order."""

from __future__ import annotations

from typing import Any

import pytest

from gradtrace_analyzer.diff.scope.configuration import recorded_alike
from gradtrace_analyzer.runs.run import Run
from support.synthetic_runs.differences import run_of

NATIVE: dict[str, Any] = {"observer": {"kind": "native"}}


@pytest.mark.parametrize(
    ("a", "b", "is_alike"),
    [
        (run_of(), run_of(), True),
        (run_of(), run_of(observer={"kind": "python"}), True),  # older recorders do not say it
        (run_of(**NATIVE), run_of(**NATIVE), True),
        (run_of(), run_of(**NATIVE), False),
        (run_of(device="cuda:0"), run_of(), False),
        (run_of((0, 1)), run_of((0,)), True),
    ],
)
def test_runs_are_alike_by_one_observer_on_one_kind_of_device(
    a: Run, b: Run, is_alike: bool
) -> None:
    assert recorded_alike({"baseline": a, "candidate": b}) == is_alike
