"""Views over runs: every table, typed, each row once, told apart by run and rank."""

import time
from pathlib import Path

import pyarrow as pa
import pytest

from gradtrace_analyzer.runs.opening import open_run
from gradtrace_analyzer.sql.views import connect, connect_pair, run_names
from gradtrace_schemas import ALL_TABLES, layout
from support.synthetic_runs.builder import add_part, build_run, part_rows, summary_columns
from support.synthetic_runs.journals import write_journal


def test_every_table_has_a_view_with_the_catalogues_columns(tmp_path: Path) -> None:
    run = open_run(build_run(tmp_path / "a"))
    connection = connect([run])
    for table in ALL_TABLES:
        connection.execute(f"SELECT * FROM {table.name}")
        names = [column[0] for column in connection.description or ()]
        assert names == ["run", *(column.name for column in table.columns)]


def test_empty_view_has_the_types_of_a_full_one(tmp_path: Path) -> None:
    empty = connect([open_run(build_run(tmp_path / "empty"))])
    rows: dict[str, list[dict[str, object]]] = {t.name: [{}] for t in ALL_TABLES if t.journalled}
    full = connect([open_run(build_run(tmp_path / "full", rows))])
    for table in ALL_TABLES:
        describe = f"SELECT column_name, column_type FROM (DESCRIBE {table.name})"
        assert empty.execute(describe).fetchall() == full.execute(describe).fetchall()


def test_written_rows_are_read_back_equal(tmp_path: Path) -> None:
    row = {
        "step": 3,
        "parameter_fqn": "blocks.0.weight",
        "shape": [2, 3],
        "other_fqns": ["head.weight"],
        "requires_grad": True,
        **summary_columns([1.5, -2.0, float("nan")]),
    }
    connection = connect([open_run(build_run(tmp_path / "a", {"parameters": [row]}))])
    names = list(row)
    read = connection.execute(f"SELECT {', '.join(names)} FROM parameters").fetchone()
    assert read is not None
    assert dict(zip(names, read, strict=True)) == row


def test_rank_is_the_folders(tmp_path: Path) -> None:
    rows = [{"rank": rank, "step": 10 * rank} for rank in range(3)]
    connection = connect([open_run(build_run(tmp_path / "a", {"steps": rows}, world_size=3))])
    found = connection.execute("SELECT rank, step, typeof(rank) FROM steps ORDER BY rank")
    assert found.fetchall() == [(0, 0, "INTEGER"), (1, 10, "INTEGER"), (2, 20, "INTEGER")]


@pytest.mark.parametrize(
    "folder", ["step=100", "rank=00009", "lr=0.1", "it's", "[a]*?", "with space", "é"]
)
def test_folder_above_the_run_changes_no_answer(tmp_path: Path, folder: str) -> None:
    """DuckDB takes `name=value` anywhere in a path for a column, and `*` for a pattern."""
    path = build_run(tmp_path / folder / "a", {"steps": [{"rank": 1, "step": 7}]}, world_size=2)
    connection = connect([open_run(path)])
    assert connection.execute("SELECT rank, step FROM steps").fetchall() == [(1, 7)]


def test_run_given_by_a_relative_path_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_run(tmp_path / "a", {"steps": [{}]})
    monkeypatch.chdir(tmp_path / "a")
    connection = connect([open_run(".")])
    assert connection.execute("SELECT run FROM steps").fetchall() == [("a",)]


def test_runs_are_told_apart_by_name(tmp_path: Path) -> None:
    runs = [
        open_run(build_run(tmp_path / name, {"steps": [{"step": step}]}))
        for name, step in (("a", 1), ("b", 2))
    ]
    found = connect(runs).execute("SELECT run, step FROM steps ORDER BY run").fetchall()
    assert found == [("a", 1), ("b", 2)]


def test_runs_of_one_name_are_told_apart_by_path(tmp_path: Path) -> None:
    first = open_run(build_run(tmp_path / "x" / "a"))
    second = open_run(build_run(tmp_path / "y" / "a"))
    other = open_run(build_run(tmp_path / "b"))
    assert run_names([first, second, other]) == (str(first.path), str(second.path), "b")
    assert run_names([first, first]) == (str(first.path), f"{first.path} (2)")


def test_rows_of_a_journal_left_behind_appear_exactly_once(tmp_path: Path) -> None:
    """The part holds records 1 and 2, and the journal, which was not told, holds 1 to 4."""
    path = build_run(tmp_path / "a", world_size=2, unclosed=(1,))
    names = ["AddBackward0", "MulBackward0", "AddBackward0", "SumBackward0"]
    nodes = [
        {"step": 2, "backward_index": 0, "event_index": n, "node_name": name, "module_fqn": ""}
        for n, name in enumerate(names)
    ]
    add_part(path, "node_events", nodes[:2], rank=1)
    write_journal(path, [("node_events", row) for row in nodes], rank=1)
    connection = connect([open_run(path)])
    found = connection.execute(
        "SELECT run, rank, step, event_index, node_name, module_fqn, record_index, root, "
        "grad_input_norm FROM node_events ORDER BY event_index"
    ).fetchall()
    expected = [("a", 1, 2, n, name, "", n + 1, None, None) for n, name in enumerate(names)]
    assert found == expected


def test_ranks_view_holds_what_the_ranks_json_say(tmp_path: Path) -> None:
    facts = {"dropped": {"steps": 4}, "problems": ["disk full"]}
    path = build_run(tmp_path / "a", world_size=2, unclosed=(1,), rank_facts=facts)
    found = (
        connect([open_run(path)])
        .execute(
            "SELECT rank, host, complete, dropped->>'steps', problems->>0 FROM ranks ORDER BY 1"
        )
        .fetchall()
    )
    assert found == [(0, "host0", True, "4", "disk full"), (1, "host0", False, "4", "disk full")]


def test_pair_has_each_side_in_its_schema(tmp_path: Path) -> None:
    baseline = open_run(build_run(tmp_path / "a", {"steps": [{"step": 1}]}, unclosed=(0,)))
    path = build_run(tmp_path / "b", {"steps": [{"step": 2}]}, unclosed=(0,))
    write_journal(path, [("steps", {"step": 2}), ("steps", {"step": 3})])
    connection = connect_pair(baseline, open_run(path))
    assert connection.execute("SELECT step FROM baseline.steps").fetchall() == [(1,)]
    found = connection.execute("SELECT step FROM candidate.steps ORDER BY step").fetchall()
    assert found == [(2,), (3,)]
    for schema in ("baseline", "candidate"):
        for table in ALL_TABLES:
            connection.execute(f"SELECT * FROM {schema}.{table.name}")
            names = [column[0] for column in connection.description or ()]
            assert names == [column.name for column in table.columns]


def test_query_with_an_unknown_table_finds_no_variable_of_this_program(tmp_path: Path) -> None:
    import duckdb

    my_rows = pa.table({"a": [1]})
    connection = connect([open_run(build_run(tmp_path / "a"))])
    with pytest.raises(duckdb.CatalogException):
        connection.execute("SELECT * FROM my_rows")
    assert len(my_rows) == 1


def test_ten_thousand_parts_are_connected_in_about_a_second(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a", world_size=10)
    one = add_part(path, "steps", part_rows("steps", [{}])).read_bytes()
    for rank in range(10):
        layout.table_folder(path, "steps", rank).mkdir(exist_ok=True)
        for number in range(1000):
            layout.part_file(path, "steps", rank, 0, number).write_bytes(one)
    run = open_run(path)
    started = time.perf_counter()
    connection = connect([run])
    took = time.perf_counter() - started
    found = connection.execute("SELECT count(*) FROM steps WHERE rank = 3").fetchall()
    assert found == [(1000,)]
    assert took < 5  # about 0.3 s; the margin is for a busy machine
