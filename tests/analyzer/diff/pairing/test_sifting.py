"""Steps that are too many to open: tallied where they pair by place, else named."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from gradtrace_analyzer.diff.pairing.sifting import Sifted, grouped_by_rank, grouped_by_step, sift
from gradtrace_analyzer.diff.pairing.step_index import step_index
from gradtrace_analyzer.diff.scope.question import Question
from gradtrace_analyzer.diff.scope.selection import Selection, chosen
from gradtrace_analyzer.diff.scoping import scope_of
from gradtrace_analyzer.numerics.tolerance import LowerBound
from gradtrace_analyzer.runs.opening import open_run
from gradtrace_analyzer.sql.views import connect_pair
from support.synthetic_runs.layer_chain import layered_run

STEPS = 4


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layered_run(tmp_path_factory.mktemp("runs") / "a", steps=STEPS)


def sifted(a: Path, b: Path, selection: Selection | None = None) -> Sifted:
    runs = {"baseline": open_run(a), "candidate": open_run(b)}
    with contextlib.closing(connect_pair(*runs.values())) as connection:
        scope = scope_of(connection, runs, Question())
        index = step_index(connection, scope.pair, scope.ranks)
        return sift(connection, index, LowerBound(), selection or Selection())


def test_steps_that_pair_by_place_are_tallied(baseline: Path, tmp_path: Path) -> None:
    b = layered_run(tmp_path / "b", steps=STEPS, outputs={(s, "layer1"): 0.5 for s in (1, 3)})
    found = sifted(baseline, b)
    [forward] = [t for t in found.tallies if t.table == "module_calls"]
    assert forward.steps.tolist() == [1, 3] and forward.exceeds.all()
    assert not found.unpaired
    [one] = [t for t in sifted(baseline, b, chosen(step=3)).tallies if t.table == "module_calls"]
    assert one.steps.tolist() == [3]
    assert not sifted(baseline, b, chosen(links=["bucket"])).tallies


def test_steps_that_do_not_pair_by_place_are_named(baseline: Path, tmp_path: Path) -> None:
    b = layered_run(tmp_path / "b", steps=STEPS, prefix="net.", forward=1e-6)
    found = sifted(baseline, b)
    # Names were settled: what the parts hold has others.
    assert found.unpaired == {(0, s) for s in range(STEPS)} and not found.tallies
    assert found.by_step == {s: [(0, s)] for s in range(STEPS)}


def test_places_are_grouped() -> None:
    places = [(0, 1), (1, 1), (0, 2)]
    assert grouped_by_step(places) == {1: [(0, 1), (1, 1)], 2: [(0, 2)]}
    assert grouped_by_rank(places) == {0: {1, 2}, 1: {1}}
