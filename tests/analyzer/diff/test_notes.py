"""Sentences beside an answer: what a person should know of the runs before they believe it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gradtrace_analyzer.diff.code.legal_changes import SetAside
from gradtrace_analyzer.diff.code.structure import OneSided, Structure
from gradtrace_analyzer.diff.notes import (
    abandoned,
    compared_with_itself,
    counted_only,
    partly_followed,
    rng_notes,
)
from gradtrace_analyzer.diff.origin import ForwardOrigin, LoneRowOrigin, Origin
from gradtrace_analyzer.reports.diff.notes import note_sentence
from gradtrace_analyzer.reports.diff.wording import Wording
from support.synthetic_runs.differences import Row, call, judged_rows, run_of, views

LONE = Structure((OneSided("node", "A", "candidate"),))


@pytest.mark.parametrize(
    ("structure", "aside", "count", "said"),
    [
        (LONE, [], 1, ["of 1 more step what differs was counted."]),
        (LONE, [], 1200, ["of 1,200 more steps what differs was counted."]),
        (Structure(), [SetAside("node", "A", "candidate", 1, 0)], 2, ["of 2 more steps what differs was counted."]),
        (LONE, [], 0, []),
        (Structure(), [], 3, []),  # nothing of one side alone is told
        (Structure(), [SetAside("optimizer kernel", "fused", "both", 1, 0)], 3, []),
    ],
)  # fmt: skip
def test_what_one_side_alone_has_was_looked_for_in_the_open_steps_only(
    structure: Structure, aside: list[SetAside], count: int, said: list[str]
) -> None:
    found = counted_only(structure, aside, count)
    assert len(found) == len(said) and all(s.endswith(e) for s, e in zip(found, said, strict=True))


def test_run_that_is_compared_with_itself_is_told() -> None:
    one = replace(run_of(name="a"), run_info={"token": "1"})
    assert compared_with_itself({"baseline": one, "candidate": one}) == [
        "Both sides are the same recording: it was compared with itself."
    ]
    other = replace(run_of(name="b"), run_info={"token": "2"})
    assert compared_with_itself({"baseline": one, "candidate": other}) == []


def steps(*rows: Row) -> dict[str, list[Row]]:
    calls = [
        {"step": n, "root": 0, "module_fqn": "m", "phase": "forward"} for n, _ in enumerate(rows)
    ]
    return {"steps": [{"step": n, **row} for n, row in enumerate(rows)], "module_calls": calls}


def judged(a: list[Row], b: list[Row]) -> Any:
    return judged_rows(views(steps(*a), steps(*b)))


def test_generators_that_differ_where_nothing_shows_it_are_told() -> None:
    a, b = [{"rng_fingerprint": 1}] * 3, [{"rng_fingerprint": n} for n in (1, 2, 2)]
    [note] = rng_notes(judged(a, b), [0, 1, 2])
    assert note_sentence(note, Wording()) == (
        "The random generators stand elsewhere at the beginning of steps 1-2 (rank 0); nothing that was compared "
        "shows it."
    )
    assert rng_notes(judged(a, b), [0]) == rng_notes(judged(a, a), [0, 1, 2]) == []


def origin(link: str, step: int = 0) -> Origin:
    kind = LoneRowOrigin if link == "structure" else ForwardOrigin
    return kind(call("m", 1, step=step), (0,), "m")


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((1, 0), "made 1 forward in the baseline that no backward pass followed, and no forward in the candidate."),
        ((0, 2), "made no forward in the baseline that no backward pass followed, and 2 forwards in the candidate."),
        ((2, 2), None),
    ],
)  # fmt: skip
def test_forward_that_one_side_gave_up_is_told_where_a_side_lacks_something(
    counts: tuple[int, int], said: str | None
) -> None:
    found = judged(*([{"abandoned_forwards": n}] for n in counts))
    expected = [] if said is None else [f"In that step, rank 0 {said}"]
    assert abandoned(found, [origin("forward"), origin("structure")]) == expected
    assert abandoned(found, [origin("forward")]) == []


def test_differences_that_were_not_followed_are_counted() -> None:
    class Crowd:
        """Stands for a step with more differences than are looked at; the real ones are in `test_align`."""

        def left_out(self, step: int) -> int:
            return 1234 * (step == 3)

    crowd: Any = Crowd()
    assert partly_followed(crowd, [origin("forward", 3)]) == [
        "1,234 more rows differ in that step than were followed; what is inherited is counted without them."
    ]
    assert partly_followed(crowd, [origin("forward", 2)]) == partly_followed(crowd, []) == []
