"""What lies before an origin and was not compared is named, so that no sentence calls it equal."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from gradtrace_analyzer.diff.difference import Difference
from gradtrace_analyzer.diff.findings.unseen import unseen_before
from gradtrace_analyzer.diff.links import LINKS
from gradtrace_analyzer.diff.origin import LoneRowOrigin, Origin
from gradtrace_analyzer.diff.scope.cover import Cover
from gradtrace_analyzer.diff.scope.selection import Selection
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.words.numbers import ranks_phrase
from support.synthetic_runs.differences import (
    bucket,
    call,
    cover,
    gradient,
    loss,
    parameter,
    run_of,
)

RUNS = {"baseline": run_of(range(2)), "candidate": run_of(range(2))}
BOTH = {"ranks": (0, 1)}
NOTHING: dict[str, Any] = {"rows": {}}


def unseen(
    d: Difference,
    of: Cover | None = None,
    runs: dict[str, Run] | None = None,
    common: tuple[int, ...] = (0, 1, 2),
    link: str | None = None,
    recorded: Collection[str] = LINKS,
) -> list[str]:
    kind = {None: Origin, "structure": LoneRowOrigin}[link]
    found = unseen_before(runs or RUNS, of or cover(**BOTH), kind(d, (d.rank,)), common, recorded)
    return [
        f"step {one.step}" if one.step is not None else one.what or ranks_phrase(one.ranks)
        for one in found
    ]


@pytest.mark.parametrize(
    ("row", "link", "found"),
    [
        (parameter("w", 0), None, []),
        (call("m", 1), None, ["parameters", "inputs"]),
        (loss(1), None, ["parameters", "inputs", "module outputs"]),
        (gradient("w", 1), None, ["parameters", "inputs", "module outputs", "gradients at the Nodes"]),
        # Of what one side alone has its own kind of rows would tell too, and what comes later would not.
        (call("m", 1), "structure", ["parameters", "inputs", "module outputs"]),
    ],
)  # fmt: skip
def test_tables_in_front_of_the_origin_that_hold_nothing_are_named(
    row: Difference, link: str | None, found: list[str]
) -> None:
    assert unseen(row, cover(**BOTH, **NOTHING), link=link) == found
    assert unseen(row, link=link) == []


def test_links_that_nobody_asked_for_are_not_seen() -> None:
    chosen = cover(**BOTH, selection=Selection(links=("parameters", "forward")))
    assert unseen(loss(1), chosen) == ["inputs"]


@pytest.mark.parametrize("recorded", [True, False])
def test_modules_outside_a_filter_are_not_seen(recorded: bool) -> None:
    runs = {**RUNS, "candidate": run_of(range(2), settings={"modules": "a*" * recorded})}
    of = cover(**BOTH, selection=Selection(modules=() if recorded else ("a*",)))
    assert unseen(call("m", 1), of, runs) == ["modules outside the filter"]


def test_ranks_that_were_not_compared_matter_only_where_ranks_meet() -> None:
    runs = {"baseline": run_of(range(2), world_size=4), "candidate": run_of(range(2), world_size=3)}
    assert unseen(bucket(["w"], 1), runs=runs) == ["ranks 2-3"]
    assert unseen(call("m", 1), runs=runs) == []


@pytest.mark.parametrize(
    ("step", "common", "found"),
    [(2, (0, 1, 2), []), (2, (0, 2), ["step 1"]), (2, (2,), ["step 1"]), (0, (0,), [])],
)
def test_step_before_one_that_begins_otherwise_is_named_if_it_was_not_compared(
    step: int, common: tuple[int, ...], found: list[str]
) -> None:
    of: dict[str, Any] = {"common": common}
    assert unseen(parameter("w", 0, step=step), **of) == found
    assert unseen(call("m", 1, step=step), **of) == []
