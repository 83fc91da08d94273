"""How each side divides a step's work, and whether it is divided otherwise at all."""

from __future__ import annotations

from typing import Any

import pytest

from gradtrace_analyzer.diff.code.structure import OneSided
from gradtrace_analyzer.diff.divided.division import Division, divisions, held_nowhere_else
from support.synthetic_runs.differences import Row, Rows, run_of, views


def side(
    ranks: int = 1, passes: int = 1, weight: int = 12, fed: int = 30, calls: int = 1, **more: list[Row]
) -> Rows:  # fmt: skip
    """A step of a side; one before the first common one would be another run's."""
    of_ranks = range(ranks)
    return {
        "steps": [{"rank": r, "backward_count": passes, "step": s} for r in of_ranks for s in (2, 3)],
        "parameters": [
            {"rank": r, "step": 2, "root": 0, "parameter_fqn": "w", "point": point, "numel": weight}
            for r in of_ranks
            for point in ("before", "after")
        ],
        "inputs": [
            {"rank": r, "step": 2, "root": root, "call_index": n, "name": "x", "numel": fed // (ranks * calls)}
            for r in of_ranks
            for n in range(calls)
            for root in (0, None)
        ],
        **more,
    }  # fmt: skip


def divided(a: Rows, b: Rows, worlds: tuple[int, int] = (1, 1)) -> tuple[Division, Division] | None:
    runs = {
        name: run_of(range(n)) for name, n in zip(("baseline", "candidate"), worlds, strict=True)
    }
    return divisions(views(a, b), runs)


def test_same_batch_over_more_ranks_is_another_division() -> None:
    found = divided(side(), side(ranks=3), (1, 3))
    assert found == (Division(1, 1, 12, 30, 1), Division(3, 1, 12, 30, 3))


def test_accumulation_and_shards_are_other_divisions() -> None:
    assert divided(side(), side(passes=2, calls=2)) is not None
    assert divided(side(ranks=2), side(ranks=2, weight=6, calls=5), (2, 2)) is not None


@pytest.mark.parametrize(
    ("a", "b", "worlds"),
    [
        (side(), side(), (1, 1)),  # the same
        (side(), side(passes=2), (1, 1)),  # one pass more for the same calls: it was made twice
        (side(), side(ranks=3, fed=60), (1, 3)),  # another batch
        (side(fed=0), side(ranks=3, fed=0), (1, 3)),  # nobody knows what it was fed
        (side(), side(ranks=3, weight=0), (1, 3)),  # parameters were not recorded
    ],
)
def test_what_is_no_other_division_of_the_same_work_is_not_taken_for_one(
    a: Rows, b: Rows, worlds: tuple[int, int]
) -> None:
    assert divided(a, b, worlds) is None


def test_stages_are_fed_by_other_stages() -> None:
    stages: dict[str, Any] = {"stage_events": [{"stage_index": 0, "kind": "forward"}]}
    assert divided(side(), side(ranks=3, fed=60, **stages), (1, 3)) is not None


@pytest.mark.parametrize(
    ("division", "said"),
    [
        (Division(1, 1, 0, 0), "1 rank with 1 backward pass a step"),
        (Division(4, 2, 0, 0), "4 ranks with 2 backward passes a step"),
    ],
)
def test_division_is_said_in_words(division: Division, said: str) -> None:
    assert division.words() == said


def lone(kind: str, name: str, **more: Any) -> OneSided:
    return OneSided(kind, name, "baseline", name, is_code=True, **more)


def test_what_further_ranks_of_the_other_side_hold_is_not_lone() -> None:
    rows: Rows = {
        "parameters": [{"rank": 1, "root": 0, "parameter_fqn": "tail.0.weight", "point": "before"}],
        "module_calls": [{"rank": 1, "root": 0, "module_fqn": "head", "phase": "forward"}],
    }
    connection = views({}, rows)
    entries = [
        lone("module", "tail"),
        lone("module", "head"),
        lone("module", "tai"),
        lone("node", "tail"),
        lone("module", "tail", is_compiled=True),
    ]
    runs = {"baseline": run_of((0,)), "candidate": run_of((0, 1))}
    assert held_nowhere_else(connection, runs, entries) == entries[2:]
    same = {"baseline": run_of((0, 1)), "candidate": run_of((0, 1))}
    assert held_nowhere_else(connection, same, entries) == entries
