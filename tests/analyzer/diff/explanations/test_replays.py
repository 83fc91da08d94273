"""Whether the Node of an origin disagrees with itself, and the sentence that says so."""

from __future__ import annotations

from typing import Any

import pytest

from gradtrace_analyzer.diff.explanations.replays import Replays, replayed
from gradtrace_analyzer.diff.origin import NodeOrigin, Replay
from gradtrace_analyzer.reports.diff.origins.sentences import origin_sentence
from gradtrace_analyzer.reports.diff.wording import Wording
from support.synthetic_runs.differences import Row, node, views

PLACE: Row = {
    "root": 0, "module_fqn": "m", "call_index": 0, "node_name": "A", "occurrence": 0, "backward_index": 0,
    "event_index": 4, "step": 1,
}  # fmt: skip
ORIGIN = node("m", 0, step=1, node_name="A", event_indices=(4, 5))


def run(equal: bool | None, error: float | None = None, **more: Any) -> Row:
    return {**PLACE, "replay_equal": equal, "replay_error": error, **more}


def test_replays_of_the_node_are_counted_over_all_steps_and_told_of_the_very_run() -> None:
    """Other Nodes and other ranks are left out; the candidate's Node has another number in its pass."""
    baseline = [
        run(True, 0.0),
        run(False, 0.5, step=2),
        run(False, 0.5, step=2, node_name="B"),
        run(False, 0.5, step=2, rank=3),
        run(None, step=3),
    ]
    candidate = [run(False, 0.25, event_index=5), run(True, 0.0, step=2, rank=1)]
    connection = views({"node_events": baseline}, {"node_events": candidate})
    assert replayed(connection, ORIGIN, (0, 1)) == (
        Replay("baseline", True, 0.0, 2, 1),
        Replay("candidate", False, 0.25, 2, 1),
    )


def test_side_that_ran_nothing_again_is_not_told() -> None:
    connection = views({"node_events": [run(None)]}, {"node_events": [run(True, 0.0, step=7)]})
    assert replayed(connection, ORIGIN, (0,)) == (Replay("candidate", None, None, 1, 0),)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ((), ""),
        ((Replay("candidate", True, 0.0, 3, 0),), "the Node gave the same bits in the candidate: it is"),
        (
            (Replay("baseline", True, 0.0, 3, 0), Replay("candidate", True, 0.0, 3, 0)),
            "the Node gave the same bits in both runs: it is deterministic",
        ),
        ((Replay("candidate", False, 0.25, 1200, 7),), "in 7 of 1,200 runs of the candidate, here (by 2.5e-01)."),
        ((Replay("candidate", True, 0.0, 3, 1),), "in 1 of 3 runs of the candidate, elsewhere, not in step 4."),
        (
            (Replay("baseline", False, None, 2, 1), Replay("candidate", True, 0.0, 3, 0)),
            "it gave other bits in 1 of 2 runs of the baseline, here. That is",
        ),
    ],
)  # fmt: skip
def test_sentence_says_where_a_node_disagreed_with_itself(
    found: tuple[Replay, ...], said: str
) -> None:
    of_step = node("m", 0, step=4, node_name="A")
    [origin] = Replays((found,)).onto((NodeOrigin(of_step, (0,), "m"),))
    sentence = origin_sentence(origin, Wording())
    assert said in sentence
    assert ("What it saved in the forward is not recorded" in sentence) != bool(found)
