"""Ranks that a single origin reached in a later step are told with it."""

from __future__ import annotations

from typing import Any

from gradtrace_analyzer.diff.explanations.later_ranks import EXPLAINER, LaterRanks, later_ranks
from gradtrace_analyzer.diff.origin import ForwardOrigin, Origin, Reached
from support.synthetic_runs.differences import call, context


def origin(fqn: str = "m", reached: tuple[Reached, ...] = ()) -> Origin:
    return ForwardOrigin(call(fqn, 1, step=3), (0,), reached=reached)


def entry(rank: int, first_step: int, link: str) -> dict[str, Any]:
    return {"rank": rank, "first_step": first_step, "link": link}


def test_ranks_that_an_origin_reached_in_a_later_step_are_told_with_it() -> None:
    near = Reached(1, 3, "bucket", {})
    spread = [
        entry(3, 5, "parameters"),
        entry(3, 4, "optimizer"),
        entry(3, 4, "forward"),
        entry(2, 4, "clip"),
        entry(1, 4, "clip"),  # it was reached before
        entry(0, 4, "clip"),  # its own rank
        entry(4, 2, "clip"),  # before the origin: that is no consequence
    ]
    found = later_ranks(origin(reached=(near,)), spread)
    assert found == (Reached(2, 4, "clip", {}), Reached(3, 4, "forward", {}))
    [reaching] = LaterRanks(found).onto((origin(reached=(near,)),))
    assert reaching.reached == (near, *found)


def test_of_several_origins_nobody_knows_which_reached_a_rank_later() -> None:
    spread = [entry(2, 4, "clip")]
    assert EXPLAINER.explain(context(origin(), spread=spread)) is not None
    assert EXPLAINER.explain(context(origin(), origin("n"), spread=spread)) is None
    assert EXPLAINER.explain(context(origin(), spread=[])) is None
