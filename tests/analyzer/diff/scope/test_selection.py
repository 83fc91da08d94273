"""What a person wants compared: how it is read, and which rows of the tables it stands for."""

from __future__ import annotations

import duckdb
import pytest

from gradtrace_analyzer.diff.links import LINK_TABLES
from gradtrace_analyzer.diff.scope.selection import CHOOSABLE, BadSelection, Selection, chosen
from support.synthetic_runs.differences import Rows, views


def test_nothing_said_is_everything() -> None:
    assert chosen() == Selection() and chosen().is_all and chosen().phrase == ""
    assert not chosen(step=0).is_all and not chosen(ranks="0").is_all
    assert chosen().wants_rank(7) and chosen().wants_step(7) and chosen().wants_link("loss")
    assert chosen().wants_module("a.b")


def test_ranks_are_numbers_and_spans() -> None:
    asked = chosen(ranks="0, 4-6,5")
    assert asked.listed_ranks == [0, 4, 5, 6]
    assert [rank for rank in range(9) if asked.wants_rank(rank)] == [0, 4, 5, 6]


@pytest.mark.parametrize("ranks", ["", "a", "3-1", "1-", "-1", "0,,1", "1.5", "0-9999999"])
def test_ranks_that_cannot_be_read_are_a_sentence(ranks: str) -> None:
    with pytest.raises(BadSelection, match="--rank is"):
        chosen(ranks=ranks)


def test_empty_module_is_a_sentence() -> None:
    with pytest.raises(BadSelection, match="--module is empty"):
        chosen(modules=["a", ""])


MODULES = [
    ("blocks.1", "blocks.1", True),
    ("blocks.1", "blocks.1.attn", True),
    ("blocks.1", "blocks.11", False),
    ("blocks.1*", "blocks.11.attn", True),
    ("blocks.?.attn", "blocks.2.attn.q", True),
    ("blocks.[12]", "blocks.3", False),
    ("blocks.[!12]", "blocks.3", True),
    ("attn", "blocks.1.attn", False),
    ("Blocks.1", "blocks.1", False),
    ("*", "", True),
]


@pytest.fixture(scope="module")
def calls() -> duckdb.DuckDBPyConnection:
    names = sorted({fqn for _, fqn, _ in MODULES})
    return views(
        {"module_calls": [{"root": 0, "module_fqn": f, "phase": "forward"} for f in names]}
    )


@pytest.mark.parametrize(("pattern", "fqn", "is_wanted"), MODULES)
def test_module_stands_for_itself_and_what_is_in_it(
    pattern: str, fqn: str, is_wanted: bool, calls: duckdb.DuckDBPyConnection
) -> None:
    """In Python, and in SQL over the same name."""
    asked = chosen(modules=[pattern])
    assert asked.wants_module(fqn) == is_wanted
    [table] = [t for t in LINK_TABLES if t.table == "module_calls"]
    found = calls.execute(
        f"SELECT count(*) FROM baseline.module_calls WHERE module_fqn = ? AND {asked.condition(table)}",
        [fqn],
    )
    assert found.fetchall() == [(int(is_wanted),)]


def test_what_was_asked_for_is_said_in_words() -> None:
    asked = chosen(3, "1-2", ["blocks.1*", "head"], ["bucket", "backward"])
    # Links come in the order of the chain, whatever order they were given in.
    assert asked.phrase == "step 3; ranks 1-2; modules blocks.1*, head; links backward, bucket"
    assert chosen(modules=["a"]).phrase == "module a"


def test_links_without_rows_of_their_own_cannot_be_chosen() -> None:
    assert not {"configuration", "rng", "structure"} & set(CHOOSABLE)
    assert {"loss", "stage", "clip"} <= set(CHOOSABLE)


PARAMETER = {"root": 0, "point": "before"}
GRADIENT = {"root": 0, "backward_index": 0}
ROWS: Rows = {
    "parameters": [
        {**PARAMETER, "parameter_fqn": "blocks.1.weight"},
        {**PARAMETER, "parameter_fqn": "blocks.1.weight", "point": "after"},
        {**PARAMETER, "parameter_fqn": "head.weight", "step": 1},
        {**PARAMETER, "parameter_fqn": "scale", "rank": 1},
    ],
    "gradients": [
        {**GRADIENT, "parameter_fqn": "blocks.1.weight", "point": "local"},
        {**GRADIENT, "parameter_fqn": "blocks.10.weight", "point": "final"},
        {**GRADIENT, "parameter_fqn": None, "point": "final"},
    ],
    "node_events": [
        {"root": 0, "module_fqn": "blocks.1.attn", "node_name": "A"},
        {"root": None, "module_fqn": None, "node_name": "B", "step": 1},
    ],
    "backward_passes": [{"backward_index": 0, "kind": "backward"}],
}


@pytest.fixture(scope="module")
def rows() -> duckdb.DuckDBPyConnection:
    return views(ROWS)


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        (chosen(), [4, 3, 2, 1]),
        (chosen(step=1), [1, 0, 1, 0]),
        (chosen(ranks="1"), [1, 0, 0, 0]),
        (chosen(ranks="0,1"), [4, 3, 2, 1]),
        (chosen(ranks="2-5,0"), [3, 3, 2, 1]),
        (chosen(step=1, ranks="0,1"), [1, 0, 1, 0]),
        # A parameter is of the module that holds it; losses are of none.
        (chosen(modules=["blocks.1"]), [2, 1, 1, 0]),
        (chosen(modules=["head", "blocks.10"]), [1, 1, 0, 0]),
        (chosen(modules=["*'s"]), [0, 0, 0, 0]),
        (chosen(modules=["scale"]), [0, 0, 0, 0]),  # it is of the root
        (chosen(links=["parameters"]), [3, 0, 0, 0]),
        (chosen(links=["optimizer", "clip"]), [1, 2, 0, 0]),
        (chosen(links=["backward", "loss"]), [0, 0, 2, 1]),
        (chosen(links=["backward"], modules=["blocks.*"]), [0, 0, 1, 0]),
    ],
)
def test_rows_that_are_compared_are_those_asked_for(
    asked: Selection, kept: list[int], rows: duckdb.DuckDBPyConnection
) -> None:
    """And all others are those of which it is not true: a name that is null is of no module."""
    found: list[int] = []
    for name, of_table in ROWS.items():
        [table] = [t for t in LINK_TABLES if t.table == name]
        condition = asked.condition(table)
        query = f"SELECT count(*) FILTER ({condition}), count(*) FILTER (NOT ({condition})) FROM baseline.{name}"
        [(count, others)] = rows.execute(query).fetchall()
        found.append(count)
        assert count + others == len(of_table)
    assert found == kept


def test_condition_reads_the_columns_of_a_key_by_their_prefix(
    rows: duckdb.DuckDBPyConnection,
) -> None:
    [table] = [t for t in LINK_TABLES if t.table == "parameters"]
    condition = chosen(1, modules=["head"], links=["parameters"]).condition(table, "key_")
    found = rows.execute(
        "SELECT key_fqn FROM (SELECT step, rank, point AS key_point, parameter_fqn AS key_parameter_fqn, "
        f"parameter_fqn AS key_fqn FROM baseline.parameters) WHERE {condition}"
    )
    assert found.fetchall() == [("head.weight",)]
