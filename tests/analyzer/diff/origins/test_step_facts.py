"""What is known of a step besides its differences: what was accumulated, bucketed, left alone, drawn, shared."""

from __future__ import annotations

from typing import Any

from gradtrace_analyzer.diff.difference import Difference
from gradtrace_analyzer.diff.origins.step_facts import StepFacts, step_facts
from support.synthetic_runs.differences import gradient, parameter, views

FINAL = {"root": 0, "point": "final", "backward_index": 0}
ROWS: dict[str, list[dict[str, Any]]] = {
    "gradients": [
        {**FINAL, "rank": rank, "step": 1, "parameter_fqn": name} for rank in (0, 1) for name in "vw"
    ],
    "node_events": [
        {"rank": rank, "step": step, "root": 0, "parameter_fqn": name, "node_name": "AccumulateGrad"}
        for rank, step, name in ((0, 1, "w"), (0, 2, "v"), (1, 1, "w"), (0, 1, None))
    ],
    "buckets": [{"rank": 0, "step": 1, "root": 0, "parameter_fqns": ["v", "w"]}],
    "groups": [
        {"rank": 0, "name": "0", "ranks": "[0, 1]", "role": "tp"},
        {"rank": 0, "name": "1", "ranks": "[0, 2]", "role": "dp"},
        {"rank": 0, "name": "2", "ranks": "[1, 3]", "role": "pp"},
    ],
    "backward_passes": [
        {"rank": 0, "step": 1, "backward_index": 0, "kind": "grad"},
        {"rank": 0, "step": 2, "backward_index": 1, "kind": "backward"},
    ],
}  # fmt: skip
CLASSES = {(0, "drop", "dropout2d"), (0, "bn", "syncbatchnorm"), (1, "fc", "linear")}


def known(*differences: Difference) -> StepFacts:
    return step_facts(views(ROWS), 1, differences, CLASSES, [4], is_whole=False, is_filtered=True)


def test_what_the_ranks_that_differ_recorded_is_known() -> None:
    facts = known(gradient("w", 1))
    assert facts.accumulated == {(0, 0, "w")}
    assert facts.bucketed == {(0, 0, "v"), (0, 0, "w")}
    assert facts.pass_kinds == {(0, 0): "grad"}
    both = known(gradient("w", 1), gradient("w", 1, rank=1))
    assert both.accumulated == {(0, 0, "w"), (1, 0, "w")}


def test_modules_that_draw_or_talk_are_known_by_their_class() -> None:
    facts = known(gradient("w", 1))
    assert (facts.random, facts.collective) == ({(0, "drop")}, {(0, "bn")})


def test_only_groups_that_share_a_module_are_together() -> None:
    """Ranks of a data-parallel group meet in buckets, stages of a pipeline in what they send."""
    assert known(gradient("w", 1)).together == [[0, 1]]


def test_rank_of_which_a_parameter_agrees_to_the_end_was_left_alone() -> None:
    one = [gradient("w", 1, "final"), gradient("w", 1, "final", rank=1)]
    assert known(*one).untouched == {0, 1}
    rest = [parameter("v", 5, "after"), gradient("v", 2, "local", rank=1)]
    assert known(*one, *rest).untouched == {1}


def test_what_the_comparison_knows_is_handed_on() -> None:
    facts = known(gradient("w", 1))
    assert (facts.disturbed, facts.is_whole, facts.is_filtered) == ({4}, False, True)
