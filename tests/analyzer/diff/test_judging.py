"""The steps that are opened and judged: all where they fit, else those that matter, with the same answer."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

import gradtrace_analyzer.diff.pairing.step_index as step_index
from gradtrace_analyzer.diff.judging import Judged, judged
from gradtrace_analyzer.diff.scope.question import Question
from gradtrace_analyzer.diff.scope.selection import chosen
from gradtrace_analyzer.diff.scoping import scope_of
from gradtrace_analyzer.diff.tolerances.judgement import Judgement
from gradtrace_analyzer.runs.opening import open_run
from gradtrace_analyzer.sql.views import connect_pair
from support.synthetic_runs.differences import judged_rows, three_calls, views
from support.synthetic_runs.layer_chain import layered_run


def test_failures_are_those_of_the_ranks_steps_and_links_that_were_asked_for() -> None:
    failed = {"step": 1, "backward_index": 0, "exception_type": "E", "exception_text": ""}
    b = {**three_calls(1, {}), "failures": [failed]}

    def found(**asked: Any) -> list[int]:
        rows = judged_rows(views(three_calls(0, {}), b), chosen=chosen(**asked))
        return [f.step for f in rows.judged.failures]

    assert found() == found(step=1) == found(links=["backward"]) == [1]
    assert found(step=2) == found(links=["forward"]) == found(modules=["a"]) == []


def test_baselines_lone_rows_are_counted_by_table_rank_and_step() -> None:
    a = three_calls(0, {}, range(2))["module_calls"]
    lone = {**a[0], "module_fqn": "d", "step": 1}
    found = judged_rows(views({"module_calls": [*a, lone]}, {"module_calls": a})).judged
    assert found.lone_rows == {("module_calls", 0, 1): 1}


def judged_runs(a: Path, b: Path) -> Judged:
    runs = {"baseline": open_run(a), "candidate": open_run(b)}
    with contextlib.closing(connect_pair(*runs.values())) as connection:
        scope = scope_of(connection, runs, Question())
        return judged(connection, scope, Judgement(connection, runs))


def test_of_what_does_not_fit_the_steps_that_do_not_matter_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = layered_run(tmp_path / "a", steps=6)
    noise = [0.0, *[1e-7] * 5]
    b = layered_run(tmp_path / "b", steps=6, forward=noise, outputs={(4, "layer2"): 0.5})
    whole = judged_runs(a, b)
    assert whole.counted_steps == 0 and not whole.tallies
    monkeypatch.setattr(step_index, "MOST_ROWS", 0)
    # Step 1, the first that differs, and 4, the first beyond tolerance, are open.
    assert {int(s) for t in judged_runs(a, b).tallies for s in t.steps} == {2, 3, 5}
