"""Which steps two runs have in common, and which of them digests leave open."""

from __future__ import annotations

from collections.abc import Sequence

import duckdb
import pytest

from gradtrace_analyzer.diff.links import TABLE_NAMES
from gradtrace_analyzer.diff.pairing.run_pair import RunPair
from gradtrace_analyzer.diff.pairing.step_index import StepIndex, portions, step_index
from gradtrace_analyzer.diff.scope.selection import chosen
from gradtrace_analyzer.sql.footers import table_counts
from gradtrace_analyzer.words.nouns import SIDES
from support.synthetic_runs.differences import Rows, each_step, run_of, three_calls, views


def digested(calls: Rows, digests: Sequence[int]) -> Rows:
    return {"steps": [{"step": s, "digest_forward": d} for s, d in enumerate(digests)], **calls}


@pytest.fixture
def pair() -> duckdb.DuckDBPyConnection:
    """Three steps, of which the second differs."""
    apart = {(1, "b"): 0.5}
    return views(
        digested(three_calls(0, apart), [1, 1, 1]), digested(three_calls(1, apart), [1, 2, 1])
    )


def index_of(connection: duckdb.DuckDBPyConnection, step: int | None = None) -> StepIndex:
    counts = {side: table_counts(connection, side, TABLE_NAMES) for side in SIDES}
    runs = {side: run_of(name=side, recorded={"steps": 3}) for side in SIDES}
    return step_index(connection, RunPair(runs, counts), [0], chosen=chosen(step=step))


def test_steps_of_equal_digests_are_no_suspects(pair: duckdb.DuckDBPyConnection) -> None:
    index = index_of(pair)
    assert set(index.suspects) == {(0, 1)}
    assert index.proves_any and index.common_count == 3
    assert index.may_differ("module_calls") and not index.may_differ("gradients")
    assert index.firsts == {(0, 0)}


def test_step_that_was_chosen_is_the_only_suspect(pair: duckdb.DuckDBPyConnection) -> None:
    assert not index_of(pair, step=2).suspects
    assert set(index_of(views(*_apart_everywhere()), step=2).suspects) == {(0, 0), (0, 2)}


def _apart_everywhere() -> tuple[Rows, Rows]:
    apart = {(s, "b"): 0.5 for s in range(3)}
    return (
        digested(three_calls(0, apart), [1, 1, 1]),
        digested(three_calls(1, apart), [2, 2, 2]),
    )


def test_rows_of_a_step_are_estimated_from_all(pair: duckdb.DuckDBPyConnection) -> None:
    index = index_of(pair)
    # Three calls a step and side; `steps` itself is no link's table.
    assert index.row_count([(0, 1)]) == 6 and index.row_count([]) == 0
    assert index.fits
    assert list(index.loads({(0, 2), (0, 0)})) == [[(0, 0), (0, 2)]]


def test_portions_keep_the_order() -> None:
    places = [(0, s) for s in range(5)]
    assert list(portions(places, 2)) == [places[:2], places[2:4], places[4:]]


def test_steps_without_digests_are_suspects() -> None:
    rows = {"steps": each_step(range(3), [{}]), **three_calls(0, {})}
    assert len(index_of(views(rows)).suspects) == 3
