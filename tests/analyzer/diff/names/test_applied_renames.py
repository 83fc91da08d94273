"""The baseline's views show the candidate's names; a rename that fits nothing is refused."""

from __future__ import annotations

from typing import Any

import duckdb
import pytest

from gradtrace_analyzer.diff.names.renames import apply_renames, new_names, rename_of
from gradtrace_analyzer.errors import BadRename
from support.synthetic_runs.differences import Rows, views


def side(*modules: str) -> Rows:
    """Modules with a weight each, a Node, a bucket of all weights, and one failure."""
    weights = [f"{name}.weight" for name in modules]
    return {
        "module_calls": [{"root": 0, "module_fqn": m, "phase": "forward"} for m in modules],
        "parameters": [{"root": 0, "parameter_fqn": w, "point": "before"} for w in weights],
        "node_events": [{"root": 0, "module_fqn": None, "parameter_fqn": w, "node_name": "A"} for w in weights],
        "buckets": [{"root": 0, "kind": "all_reduce", "parameter_fqns": [*weights, None]}],
        "optimizer_groups": [{"optimizer_index": 0, "group_index": 0, "parameter_fqns": weights}],
        "failures": [{"root": 0, "module_fqn": modules[0], "changed_module_fqn": modules[-1]}],
        "steps": [{}],
    }  # fmt: skip


def renamed(a: Rows, b: Rows, *rounds: list[str]) -> duckdb.DuckDBPyConnection:
    connection = views(a, b)
    apply_renames(connection, [[rename_of(text) for text in each] for each in rounds])
    return connection


def shown(connection: duckdb.DuckDBPyConnection, table: str, column: str) -> list[Any]:
    rows = connection.execute(f"SELECT {column} FROM baseline.{table} ORDER BY record_index")
    return [value for (value,) in rows.fetchall()]


def test_every_column_that_holds_names_shows_the_candidates() -> None:
    connection = renamed(side("old.a", "b"), side("new.a", "b"), ["old.*=new.*"])
    assert shown(connection, "module_calls", "module_fqn") == ["new.a", "b"]
    assert shown(connection, "parameters", "parameter_fqn") == ["new.a.weight", "b.weight"]
    assert shown(connection, "node_events", "parameter_fqn") == ["new.a.weight", "b.weight"]
    assert shown(connection, "node_events", "module_fqn") == [None, None]
    assert shown(connection, "buckets", "parameter_fqns") == [["new.a.weight", "b.weight", None]]
    assert shown(connection, "optimizer_groups", "parameter_fqns") == [["new.a.weight", "b.weight"]]
    assert shown(connection, "failures", "module_fqn") == ["new.a"]
    assert shown(connection, "failures", "changed_module_fqn") == ["b"]
    assert new_names(connection) == {"old.a": "new.a", "old.a.weight": "new.a.weight"}


def test_candidate_and_all_other_columns_stay_as_they_were_recorded() -> None:
    connection = renamed(side("old.a"), side("new.a"), ["old.*=new.*"])
    kept = connection.execute("SELECT module_fqn, root, phase FROM candidate.module_calls")
    assert kept.fetchall() == [("new.a", 0, "forward")]
    columns = [
        [row[0] for row in connection.execute(f"DESCRIBE {name}.module_calls").fetchall()]
        for name in ("baseline", "candidate")
    ]
    assert columns[0] == columns[1]


def test_later_rounds_take_the_names_that_those_before_have_left() -> None:
    connection = renamed(side("a", "b"), side("c", "x.b"), ["a=c"], ["c=x.a", "b=x.b"])
    assert shown(connection, "module_calls", "module_fqn") == ["x.a", "x.b"]


def test_names_that_are_swapped_stay_apart() -> None:
    connection = renamed(side("q", "k"), side("k", "q"), ["q=k", "k=q"])
    assert shown(connection, "module_calls", "module_fqn") == ["k", "q"]


@pytest.mark.parametrize(
    ("rename", "said"),
    [
        ("nowhere.*=new.*", "the baseline has no module or parameter 'nowhere.*'"),
        ("old.*=nowhere.*", "the candidate has no module or parameter 'nowhere.*'"),
        ("old.a=b", "would call both 'b' and 'old.a' of the baseline 'b'"),
    ],
)
def test_rename_that_does_not_fit_is_refused(rename: str, said: str) -> None:
    with pytest.raises(BadRename, match="--rename") as raised:
        renamed(side("old.a", "b"), side("new.a", "b"), [rename])
    assert said in str(raised.value)


def test_what_was_found_out_by_itself_is_not_held_against_a_person() -> None:
    """The second round is none of theirs: it may say of one side what the other has not."""
    connection = renamed(side("a"), side("a"), [], ["a=c"])
    assert shown(connection, "module_calls", "module_fqn") == ["c"]
