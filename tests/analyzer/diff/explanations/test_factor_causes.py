"""A constant factor between two runs is named with the counts that explain it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradtrace_analyzer.diff.explanations.factor_causes import Count, explained
from gradtrace_analyzer.reports.diff.explanations import cause_words
from support.answers.commands import asked
from support.synthetic_runs.builder import build_run, summary_columns


@pytest.mark.parametrize(
    ("factor", "count", "said"),
    [
        (0.5, Count("the world size", 1, 2), "0.5 = 1/2: the world size is 1 in the baseline and 2 in the candidate"),
        (2.0, Count("the world size", 1, 2), "2: the world size is 1 in the baseline and 2 in the candidate"),
        (4.0, Count("the passes", 4, 4), "4: the passes is 4 on both sides; is it no longer divided by that"),
        (0.25, Count("the passes", 4, 4), "0.25 = 1/4: the passes is 4 on both sides; is it divided by that"),
        (13 / 22, Count("the tokens of 'x'", 13, 22, is_of_many=True), "0.5909 = 13/22: the tokens of 'x' are 13 in"),
        (65536.0, Count("the world size", 2, 2), "65,536 = 2^16: a loss scale that was not taken out again?"),
    ],
)  # fmt: skip
def test_count_that_equals_the_factor_is_named(factor: float, count: Count, said: str) -> None:
    found = explained(factor, [count])
    assert found is not None and cause_words(found)[0].startswith(said)


@pytest.mark.parametrize("factor", [1.01, 0.3, 3.0])
def test_factor_that_no_count_explains_has_no_cause(factor: float) -> None:
    assert explained(factor, [Count("the world size", 2, 4), Count("the rows", 5, 5)]) is None


def test_diff_names_the_world_size_of_a_halved_gradient(tmp_path: Path) -> None:
    values = np.linspace(0.1, 1.7, 40)

    def run(name: str, world_size: int, factor: float) -> Path:
        names = {"root": 0, "parameter_fqn": "w", "point": "local", "backward_index": 0}
        row: dict[str, Any] = {**names, **summary_columns(values * factor)}
        rows = {
            "gradients": [{"rank": rank, **row} for rank in range(world_size)],
            "parameters": [
                {"rank": rank, "root": 0, "parameter_fqn": "w", "point": "before", **summary_columns([1.0])}
                for rank in range(world_size)
            ],
        }  # fmt: skip
        return build_run(tmp_path / name, rows, world_size=world_size)

    _, answer = asked("diff", "--format", "json", run("a", 1, 1.0), run("b", 2, 0.5))
    assert answer["factor"] == pytest.approx(0.5)
    assert answer["factor_causes"] == [
        "0.5 = 1/2: the world size is 1 in the baseline and 2 in the candidate"
    ]
    assert "A likely reason of the factor 0.5 = 1/2: the world size" in answer["explanation"]
    assert answer["configuration"][0]["name"] == "world_size"
