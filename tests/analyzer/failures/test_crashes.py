"""Ranks that were stopped before their end, as `diff` and `check` say it."""

from __future__ import annotations

from typing import Any

import pytest

from gradtrace_analyzer.failures.crashes import Crash, crashes, crashes_sentence
from support.synthetic_runs.differences import run_of, seen_at

BOOM = ["ValueError", "boom: no.\nand more"]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, None),
        ({"uncaught": BOOM, "last_step": 3}, "rank 0 was ended by ValueError: boom: no, in step 3"),
        ({"uncaught": ["KeyError", ""]}, "rank 0 was ended by KeyError"),
        (
            {"left_in": {"doing": "module", "name": "a", "step": 2}, "last_step": 2},
            "rank 0 ended in step 2, in the forward of a, which it never left",
        ),
    ],
)
def test_rank_that_closed_its_recording_says_what_ended_it(
    facts: dict[str, Any], said: str | None
) -> None:
    found = crashes(run_of(**facts))
    assert (crashes_sentence(found) if found else None) == said


def test_rank_that_left_nothing_is_told_as_such() -> None:
    [crash] = crashes(run_of(unclosed=[0]))
    assert (crash.ended, crash.is_told) == ("left nothing that tells how it ended", False)


def test_ranks_that_ended_alike_share_a_clause() -> None:
    alike = [Crash(n, 3, "was ended by ValueError: boom") for n in range(3)]
    others = [Crash(7, 2, "died", is_told=False, place=seen_at("optimizer", 2, optimizer="SGD"))]
    assert crashes_sentence([*alike, *others]) == (
        "ranks 0-2 were ended by ValueError: boom, in step 3; rank 7 died in step 2, in a step of SGD"
    )
