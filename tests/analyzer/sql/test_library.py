"""The named queries: each answers, has a question, and is SQL that another engine understands as it is meant."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest
import sqlglot
from click.testing import CliRunner, Result

from gradtrace_analyzer.cli import analyzer
from gradtrace_analyzer.sql.library import NamedQuery, named_queries, value_of
from support.synthetic_runs.builder import build_run, summary_columns
from support.synthetic_runs.data_parallel import Job

QUERIES = {query.name: query for query in named_queries()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = Job().made()
    kinds = ("forward", "backward_full", "receive_gradients")
    rows["stage_events"] = [
        {"step": 0, "stage_index": 1, "kind": kind, "start_ns": 10 * n, "end_ns": 10 * n + 5}
        for n, kind in enumerate(kinds)
    ]
    for row in rows["node_events"]:
        row |= {"start_ns": 5, "end_ns": 9}
    rows["module_calls"][1] |= summary_columns([1.0, float("nan")], "output_")
    return build_run(tmp_path_factory.mktemp("runs") / "a", rows, world_size=2)


def sql(*arguments: object) -> Result:
    return CliRunner().invoke(analyzer, ["sql", *map(str, arguments)], catch_exceptions=False)


@pytest.mark.parametrize("name", QUERIES)
def test_named_query_answers_with_its_defaults(name: str, run: Path) -> None:
    result = sql(f"@{name}", run, "--format", "csv")
    assert result.exit_code == 0, result.stderr
    legal = {"ranks-that-disagree"}  # of which there is nothing in a job that is well
    assert len(result.stdout.splitlines()) > 1 or name in legal


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_named_query_has_a_question_and_says_what_its_parameters_are(query: NamedQuery) -> None:
    assert query.question.endswith(("?", ".", ")")) and "?" in query.question
    assert all(query.about[name] for name in query.defaults)


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_named_query_carries_over_to_spark(query: NamedQuery) -> None:
    """What sqlglot does not know it would hand over as it is, and Spark would refuse it."""
    tree = sqlglot.parse_one(query.sql, read="duckdb")
    unknown = {node.name for node in tree.find_all(sqlglot.exp.Anonymous)}
    assert not unknown
    [carried] = sqlglot.transpile(
        query.sql, read="duckdb", write="spark", unsupported_level=sqlglot.ErrorLevel.RAISE
    )
    assert sqlglot.parse_one(carried, read="spark")


def test_update_ratio_is_the_distance_moved(run: Path) -> None:
    """Against the same from DuckDB's own list functions."""
    told = sql("@update-ratios", "-p", "step=0", "-p", "top=1", run, "--format", "csv").stdout
    name, moved = (told.splitlines()[1].split(",")[n] for n in (3, 5))
    with duckdb.connect() as connection:
        [(expected,)] = connection.execute(
            f"SELECT list_distance(b.sketch::DOUBLE[], a.sketch::DOUBLE[]) / b.norm FROM "
            f"read_parquet('{run}/parameters/rank=00000/*.parquet') a, "
            f"read_parquet('{run}/parameters/rank=00000/*.parquet') b WHERE a.step = 0 AND b.step = 0 "
            f"AND a.point = 'after' AND b.point = 'before' AND a.parameter_fqn = '{name}' "
            f"AND b.parameter_fqn = '{name}'"
        ).fetchall()
    assert float(moved) == pytest.approx(expected, rel=1e-6)


def test_parameter_is_a_value_whatever_it_holds(run: Path) -> None:
    evil = "x' OR true; DROP VIEW steps; --"
    result = sql("SELECT $a AS a, $b AS b", run, "-p", f"a={evil}", "-p", "b=2", "--format", "json")
    assert result.stdout == f'[{{"a": "{evil}", "b": 2}}\n]\n'
    assert [value_of(text) for text in ("3", "-1.5", "null", "x")] == [3, -1.5, None, "x"]


def test_answer_is_the_same_in_every_file(run: Path, tmp_path: Path) -> None:
    query = "SELECT rank, step, norm, sketch, parameter_fqn, NULL AS nothing, 1 AS x, 2 AS x FROM gradients"
    for suffix in ("parquet", "csv", "json"):
        assert sql(query, run, "-o", tmp_path / f"out.{suffix}").exit_code == 0
        limited = sql(query, run, "--limit", 2, "-o", tmp_path / f"two.{suffix}")
        assert limited.stderr == f"analyzer: 2 rows written to {tmp_path / f'two.{suffix}'}\n"
    rows = pq.read_table(tmp_path / "out.parquet")
    assert rows.num_rows == 54 and rows.column_names[-2:] == ["x", "x_2"]
    assert str(rows.schema.field("sketch").type) in ("list<element: float>", "list<l: float>")
    csv = sql(query, run, "--format", "csv").stdout
    assert (tmp_path / "out.csv").read_text() == csv and csv.count("\n") == 55
    assert (tmp_path / "out.json").read_text() == sql(query, run, "--format", "json").stdout


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM enable_logging(storage := 'file', storage_path := '{out}')",
        "SELECT * FROM enable_profiling(save_location := '{out}')",
        "SELECT * FROM read_duckdb('{out}')",
        "SELECT * FROM parquet_metadata('/etc/passwd')",
        "SELECT * FROM json_execute_serialized_sql('{{}}')",
        "EXECUTE anything",
    ],
)
def test_function_that_reaches_outside_is_refused(query: str, run: Path, tmp_path: Path) -> None:
    result = sql(query.format(out=tmp_path / "out"), run)
    assert list(tmp_path.iterdir()) == []
    if "enable_logging" in query and duckdb.__version__.startswith("1."):
        return  # from 1.3 on it may be called, for this connection alone, and writes nothing
    assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output
