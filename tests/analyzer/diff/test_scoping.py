"""The scope of a comparison: ranks, names, what is left out, and what one side alone has to say."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradtrace_analyzer.diff.scope.question import Question
from gradtrace_analyzer.diff.scope.selection import chosen
from gradtrace_analyzer.diff.scoping import Scope, scope_of
from gradtrace_analyzer.runs.opening import open_run
from gradtrace_analyzer.sql.views import connect_pair
from support.synthetic_runs.builder import build_run
from support.synthetic_runs.layer_chain import layered_run


@contextlib.contextmanager
def scope(a: Path, b: Path, **asked: Any) -> Iterator[Scope]:
    runs = {"baseline": open_run(a), "candidate": open_run(b)}
    with contextlib.closing(connect_pair(*runs.values())) as connection:
        yield scope_of(connection, runs, Question(chosen(**asked)))


@pytest.fixture
def two_ranks(tmp_path: Path) -> Path:
    calls = [
        {"rank": rank, "step": 0, "root": 0, "module_fqn": "a", "phase": "forward"}
        for rank in (0, 1)
    ]
    return build_run(tmp_path / "two", {"module_calls": calls}, world_size=2)


def test_ranks_are_those_of_both_sides_that_were_asked_for(two_ranks: Path) -> None:
    with scope(two_ranks, two_ranks) as found:
        assert found.ranks == (0, 1) and found.sizes == {2}
    with scope(two_ranks, two_ranks, ranks="1") as found:
        assert found.ranks == (1,)


def test_names_that_need_no_rename_are_settled(tmp_path: Path) -> None:
    a = layered_run(tmp_path / "a")
    b = layered_run(tmp_path / "b", prefix="net.")
    with scope(a, b) as found:
        assert [str(r) for r in found.naming.renames] == ["*=net.*"]
        assert found.pair.are_renamed and found.new_names["layer0"] == "net.layer0"
    with scope(a, a) as found:
        assert not found.naming.renames and not found.new_names
        assert found.pair.has_same_names and not found.pair.are_arranged


def test_what_was_asked_for_differently_leaves_lone_rows_without_meaning(tmp_path: Path) -> None:
    a = layered_run(tmp_path / "a")
    b = layered_run(tmp_path / "b")
    with scope(a, b) as found:
        assert found.asks_alike and found.counts_unmatched
    facts = {"settings": {"detail": "modules"}}
    other = build_run(tmp_path / "other", {"steps": [{"step": 0}]}, rank_facts=facts)
    with scope(a, other) as found:
        assert not found.asks_alike and not found.counts_unmatched
