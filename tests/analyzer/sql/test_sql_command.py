"""`analyzer sql`: answers what is asked, and lets nothing but the question through."""

import csv
import hashlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest
from click.testing import CliRunner, Result

from gradtrace_analyzer.cli import analyzer
from gradtrace_analyzer.errors import BadQuery
from gradtrace_analyzer.runs.opening import open_run
from gradtrace_analyzer.sql.sealed import answered
from support.synthetic_runs.builder import build_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rows = [{"step": n, "start_ns": n * 1_000, "end_ns": n * 1_000 + 500} for n in range(3)]
    return build_run(tmp_path / "a", {"steps": rows})


def sql(*arguments: object) -> Result:
    return CliRunner().invoke(analyzer, ["sql", *map(str, arguments)])


def test_table_csv_and_json_say_the_same(run: Path) -> None:
    query = "SELECT step, end_ns - start_ns AS took_ns FROM steps ORDER BY step LIMIT 2"
    assert sql(query, run).stdout == "step  took_ns\n----  -------\n   0      500\n   1      500\n"
    assert sql(query, run, "--format", "csv").stdout == "step,took_ns\n0,500\n1,500\n"
    assert json.loads(sql(query, run, "--format", "json").stdout) == [
        {"step": 0, "took_ns": 500},
        {"step": 1, "took_ns": 500},
    ]


def test_several_runs_are_told_apart_by_the_column_run(run: Path, tmp_path: Path) -> None:
    other = build_run(tmp_path / "b", {"steps": [{"step": 9}]})
    result = sql("SELECT run, max(step) AS m FROM steps GROUP BY run ORDER BY run", run, other)
    assert result.stdout.split() == ["run", "m", "---", "-", "a", "2", "b", "9"]


def test_query_is_read_from_a_file_or_from_stdin(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "q.sql"
    file.write_text("-- how many\nSELECT count(*) AS n FROM steps;\n")
    assert sql("-f", file, run, "--format", "csv").stdout == "n\n3\n"
    from_stdin = CliRunner().invoke(
        analyzer, ["sql", "-f", "-", str(run), "--format", "csv"], input=file.read_text()
    )
    assert from_stdin.stdout == "n\n3\n"


def test_query_that_is_no_text_is_no_damaged_recording(run: Path, tmp_path: Path) -> None:
    (tmp_path / "q.sql").write_bytes(b"SELECT \xff")
    said = sql("-f", tmp_path / "q.sql", run)
    assert said.exit_code == 2 and said.stderr.endswith("q.sql is no text in UTF-8\n")


@pytest.mark.parametrize(
    "query",
    [
        "WITH s AS (SELECT step FROM steps) SELECT count(*) FROM s",
        "FROM steps SELECT count(*)",
        "SHOW TABLES",
        "DESCRIBE steps",
        "SUMMARIZE steps",
        "EXPLAIN SELECT * FROM steps",
        "/* why slow? */ EXPLAIN ANALYZE SELECT count(*) FROM steps",
        "EXPLAIN (FORMAT json) SELECT 1",
        "SELECT ';' AS semicolon -- ; and a comment",
        "TABLE steps;",
        "SELECT versions->>'torch' FROM ranks",
        "SELECT 'é;' AS text; -- done",
    ],
)
def test_what_only_reads_is_answered(run: Path, query: str) -> None:
    result = sql(query, run)
    assert result.exit_code == 0, result.stderr
    assert result.stdout


# DuckDB 1 has no WITH that writes, and says so itself.
NO_WRITING_CTE = "refused|A CTE needs a SELECT"
# DuckDB 1 asks for another package before it gives a time with its zone to Python.
A_TIME = "now()::TIMESTAMP" if duckdb.__version__.startswith("1.") else "now()"


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("COPY (SELECT 1) TO '{out}'", "COPY is refused"),
        ("COPY steps TO '{part}'", "COPY is refused"),
        ("WITH x AS (COPY (SELECT 1) TO '{part}' (USE_TMP_FILE false)) SELECT 1", NO_WRITING_CTE),
        ("EXPLAIN ANALYZE COPY (SELECT 1) TO '{part}' (USE_TMP_FILE false)", "COPY is refused"),
        ("EXPLAIN /**/ ANALYZE COPY (SELECT 1) TO '{part}' (USE_TMP_FILE false)", ""),
        ("EXPLAIN (ANALYZE) COPY (SELECT 1) TO '{part}' (USE_TMP_FILE false)", "COPY is refused"),
        (
            "EXPLAIN ANALYZE WITH x AS (COPY (SELECT 1) TO '{part}' (USE_TMP_FILE false)) SELECT 1",
            NO_WRITING_CTE,
        ),
        (
            "FROM query('WITH x AS (COPY (SELECT 1) TO ''{part}'' (USE_TMP_FILE false)) SELECT 1')",
            NO_WRITING_CTE,
        ),
        ("SELECT * FROM read_csv('/etc/passwd')", "nothing else"),
        ("SELECT * FROM read_text('/etc/passwd')", "nothing else"),
        ("SELECT * FROM read_blob('/etc/passwd')", "nothing else"),
        ("SELECT * FROM glob('/etc/*')", "nothing else"),
        ("SELECT * FROM '/etc/passwd'", "cannot be answered"),
        ("ATTACH '{out}'", "ATTACH is refused"),
        ("INSTALL httpfs", "LOAD is refused"),
        ("LOAD httpfs", "LOAD is refused"),
        ("SET memory_limit = '1TB'", "SET is refused"),
        ("PRAGMA threads = 1", "is refused"),
        ("CALL pragma_version()", "CALL is refused"),
        ("CREATE TABLE t AS SELECT 1", "CREATE is refused"),
        ("DROP VIEW steps", "DROP is refused"),
        ("INSERT INTO steps VALUES (1)", "INSERT is refused"),
        ("WITH x AS (DELETE FROM copied_rows.ranks_0 RETURNING *) SELECT * FROM x", NO_WRITING_CTE),
        ("SELECT 1; SELECT 2", "2 statements"),
        ("", "empty"),
        ("/* nothing */ ;", "empty"),
    ],
)
def test_what_does_more_than_read_is_refused_in_one_sentence(
    run: Path, tmp_path: Path, query: str, says: str
) -> None:
    [part] = run.glob("steps/*/*.parquet")
    before = hashlib.sha256(part.read_bytes()).hexdigest()
    out = tmp_path / "out"
    result = sql(query.format(out=out, part=part), run)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("analyzer: ") and result.stderr.count("\n") == 1
    assert re.search(says, result.stderr)
    assert not out.exists()
    assert hashlib.sha256(part.read_bytes()).hexdigest() == before


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("SELECT stp FROM steps", '"stp" not found in FROM clause! Candidate bindings: "step"'),
        ("SELECT * FROM step", 'Table with name step does not exist! Did you mean "steps"?'),
        ("SELEC 1", 'syntax error at or near "SELEC"'),
        ("SELECT CAST('x' AS INTEGER)", "Could not convert string 'x'"),
    ],
)
def test_mistake_in_a_query_is_told_with_duckdbs_hint(run: Path, query: str, says: str) -> None:
    result = sql(query, run)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "LINE" not in result.stderr and result.stderr.count("\n") == 1


def test_query_that_takes_too_long_is_stopped(run: Path) -> None:
    result = sql(
        "SELECT count(*) FROM range(10000000) a, range(10000000) b WHERE a.range % 7 = b.range % 11",
        run,
        "--timeout",
        "0.3",
    )
    assert result.exit_code == 2
    assert "stopped after 0.3 s" in result.stderr


@pytest.mark.filterwarnings("error")  # a timer that cannot wait so long fails in its thread
def test_timeout_that_no_timer_can_wait_for_is_none(run: Path) -> None:
    assert sql("SELECT 1 AS n", run, "--timeout", "inf").stdout.split() == ["n", "-", "1"]
    assert "no number of seconds" in sql("SELECT 1", run, "--timeout", "nan").stderr


def test_rows_that_come_too_slowly_are_stopped_too(run: Path) -> None:
    query = "SELECT a.range FROM range(10000000) a, range(10000000) b"
    with (
        pytest.raises(BadQuery, match="stopped"),
        answered([open_run(run)], query, timeout_s=0.5) as found,
    ):
        for _ in found.rows:
            pass


def test_memory_limit_is_held(run: Path) -> None:
    result = sql("SELECT list(range) FROM range(100000000)", run, "--memory-limit", "50MB")
    assert result.exit_code == 2
    assert "--memory-limit" in result.stderr
    assert "must have" in sql("SELECT 1", run, "--memory-limit", "lots").stderr


def test_long_answer_is_cut_for_a_terminal_and_says_so(run: Path) -> None:
    result = sql("SELECT range FROM range(250)", run)
    assert len(result.stdout.splitlines()) == 102
    assert result.stderr == "analyzer: 100 of 250 rows shown; --limit 0 shows all\n"
    whole = sql("SELECT range FROM range(250)", run, "--limit", "0")
    assert len(whole.stdout.splitlines()) == 252
    assert whole.stderr == ""


def test_machine_formats_are_whole_unless_limited(run: Path) -> None:
    query = "SELECT range AS n FROM range(250)"
    assert len(json.loads(sql(query, run, "--format", "json").stdout)) == 250
    limited = sql(query, run, "--format", "csv", "--limit", "2")
    assert limited.stdout == "n\n0\n1\n"
    assert "2 of 250" in limited.stderr


def test_json_holds_no_nan_and_null_is_null(run: Path) -> None:
    query = (
        "SELECT 'nan'::DOUBLE AS a, '-inf'::FLOAT AS b, NULL AS c, [1.5, 'inf'::DOUBLE] AS d, "
        f"{A_TIME} AS e, {{'k': 1::HUGEINT}} AS f"
    )
    text = sql(query, run, "--format", "json").stdout

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    [row] = json.loads(text, parse_constant=refuse)
    assert (row["a"], row["b"], row["c"]) == ("NaN", "-Infinity", None)
    assert row["d"] == [1.5, "Infinity"]
    assert isinstance(row["e"], str) and row["f"] == {"k": 1}


def test_column_that_is_named_twice_is_kept_twice(run: Path) -> None:
    [row] = json.loads(sql("SELECT 1 AS x, 2 AS x", run, "--format", "json").stdout)
    assert row == {"x": 1, "x_2": 2}


def test_csv_quotes_and_leaves_null_empty(run: Path) -> None:
    query = "SELECT 'a,\"b\"' AS x, NULL AS y, true AS z, [1, 2] AS w"
    text = sql(query, run, "--format", "csv").stdout
    assert list(csv.reader(io.StringIO(text)))[1] == ['a,"b"', "", "true", "[1, 2]"]


def test_terminal_shows_short_floats_whole_ends_and_no_control_characters(run: Path) -> None:
    query = (
        "SELECT 1/3.0::DOUBLE AS a, NULL AS b, chr(27) || '[2J' AS c, '' AS d, "
        "'first.' || repeat('x', 200) || '.last' AS e"
    )
    line = sql(query, run).stdout.splitlines()[2]
    assert "0.333333 " in line and "null" in line
    assert "\x1b" not in line and "\\x1b[2J" in line
    assert "first.x" in line and line.endswith("x.last") and "…" in line
    assert len(line) < 100


def test_no_rows_are_a_header_an_empty_list_and_no_error(run: Path) -> None:
    query = "SELECT step, name FROM groups"
    assert sql(query, run).stdout == "step  name\n----  ----\n"
    assert sql(query, run, "--format", "json").stdout == "[]\n"
    assert sql(query, run, "--format", "csv").stdout == "step,name\n"


def test_query_without_a_run_is_a_usage_error(run: Path) -> None:
    result = sql("SELECT 1")
    assert result.exit_code == 2
    assert "RUN..." in result.stderr


@pytest.mark.parametrize("folder", ["step=3", "[x]*", "it's"])
def test_sealed_query_reads_a_run_in_any_folder(tmp_path: Path, folder: str) -> None:
    path = build_run(tmp_path / folder / "a", {"steps": [{"step": 7}]})
    assert sql("SELECT rank, step FROM steps", path, "--format", "csv").stdout == "rank,step\n0,7\n"


def test_run_behind_a_symbolic_link_is_read(run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run)
    result = sql("SELECT count(*) AS n FROM steps", tmp_path / "link", "--format", "csv")
    assert result.stdout == "n\n3\n"


def test_real_process_answers_and_keeps_notices_off_stdout(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a", {"steps": [{}]}, world_size=4, absent=(2, 3))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "gradtrace_analyzer.cli",
            "sql",
            "--format",
            "json",
            "SELECT count(*) AS n FROM steps",
            str(path),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert json.loads(done.stdout) == [{"n": 1}]
    assert done.stderr == f"analyzer: {path} lacks ranks 2-3 of 4\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]
