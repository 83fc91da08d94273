"""A DuckDB connection with one view per table of the catalogue, over the parts and journals of runs.

Parts are read where they lie; rows that only a journal holds, and the table `ranks`, are small and are copied
into the connection. Views exist for every table, empty but typed where nothing was recorded, and so do the macros of
macros.sql. No extension is ever loaded.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import duckdb
import pyarrow as pa

from gradtrace_analyzer.errors import Unreadable
from gradtrace_analyzer.numerics.tolerance import roundoff_sql
from gradtrace_analyzer.runs.parts import Part
from gradtrace_analyzer.runs.run import Run
from gradtrace_schemas import ALL_TABLES
from gradtrace_schemas.groups import RANKS
from gradtrace_schemas.table import Column, Table

_COPIES = "copied_rows"  # the schema that holds what is copied, out of the way of SHOW TABLES
_MOST_THREADS = 16


def connect(
    runs: Sequence[Run],
    *,
    memory_limit: str | None = None,
    tables: Sequence[Table] = ALL_TABLES,
) -> duckdb.DuckDBPyConnection:
    """A connection whose views hold the rows of all runs, told apart by their first column, `run`.

    `run` is the directory's name, or more of its path where two would be called the same (`run_names`). Who needs
    few `tables` saves the time of the other views.
    """
    connection = _opened(memory_limit)
    names = run_names(runs)
    for table in tables:
        selects = [
            select
            for number, (run, name) in enumerate(zip(runs, names, strict=True))
            for select in _selects(connection, run, number, table, f"{text_literal(name)} AS run, ")
        ]
        _create_view(connection, table, table.name, selects, "CAST(NULL AS VARCHAR) AS run, ")
    return connection


def connect_pair(
    baseline: Run, candidate: Run, *, memory_limit: str | None = None
) -> duckdb.DuckDBPyConnection:
    """A connection with the schemas `baseline` and `candidate`, each with every table's view.

    The views have the catalogue's columns alone, without `run`.
    """
    connection = _opened(memory_limit)
    for number, (schema, run) in enumerate((("baseline", baseline), ("candidate", candidate))):
        connection.execute(f"CREATE SCHEMA {schema}")
        for table in ALL_TABLES:
            selects = list(_selects(connection, run, number, table, ""))
            _create_view(connection, table, f"{schema}.{table.name}", selects, "")
    return connection


def run_names(runs: Sequence[Run]) -> tuple[str, ...]:
    """What the column `run` says: each run's name, its path where names repeat, numbered if that does."""
    names = [run.name for run in runs]
    repeated = {name for name, count in Counter(names).items() if count > 1}
    names = [str(run.path) if run.name in repeated else run.name for run in runs]
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return tuple(unique)


def part_paths(runs: Iterable[Run]) -> list[str]:
    """The absolute paths of all parts that the views read."""
    return [
        part.path
        for run in runs
        for by_rank in run.parts.values()
        for parts in by_rank.values()
        for part in parts
    ]


def path_list(paths: Iterable[str]) -> str:
    """Paths as the text of a SQL list of texts."""
    return f"[{', '.join(map(text_literal, paths))}]"


def _opened(memory_limit: str | None) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(
        config={
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            # Else a query's unknown table may turn out to be a variable of this program.
            "python_enable_replacements": "false",
            "threads": str(min(usable_cores(), _MOST_THREADS)),
            # The default is `.tmp` in the working directory. Made when it is needed, removed on closing.
            "temp_directory": os.path.join(
                tempfile.gettempdir(), f"gradtrace-{os.getpid()}-{uuid.uuid4().hex[:8]}"
            ),
        }
    )
    connection.execute("SET enable_progress_bar = false")
    # Most questions ask several times, and a part's end is a good share of reading a small one.
    connection.execute("SET parquet_metadata_cache = true")
    if memory_limit is not None:
        connection.execute(f"SET memory_limit = {text_literal(memory_limit)}")
    connection.execute(f"CREATE SCHEMA {_COPIES}")
    connection.execute(macros())
    return connection


@functools.cache
def macros() -> str:
    """The statements that make the macros of `macros.sql`, which are there on every connection."""
    text = Path(__file__).with_name("macros.sql").read_text(encoding="utf-8")
    return text.format(roundoff=roundoff_sql("dtype"))


def usable_cores() -> int:
    """How many processors this process may run on, which may be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _selects(
    connection: duckdb.DuckDBPyConnection, run: Run, number: int, table: Table, prefix: str
) -> Iterable[str]:
    """The queries whose union is a run's rows of one table, `prefix` before the table's columns."""
    columns = prefix + ", ".join(f'"{column.name}"' for column in table.columns)
    parts = [part for of_rank in run.parts[table.name].values() for part in of_rank]
    if parts:
        held = prefix + ", ".join(_held(column, run.schema_version) for column in table.columns)
        yield f"SELECT {held} FROM {_scan(parts)}"
    copied = (
        _ranks_rows(run)
        if table is RANKS
        else pa.concat_tables(run.leftovers.get(table.name, {}).values() or [_no_rows(table)])
    )
    if len(copied):
        place = f"{_COPIES}.{table.name}_{number}"
        connection.register("arriving", copied)
        connection.execute(f"CREATE TABLE {place} AS FROM arriving")
        connection.unregister("arriving")
        yield f"SELECT {columns} FROM {place}"


def _held(column: Column, schema_version: int) -> str:
    """A column of a part, null where a part of that version has none."""
    name = f'"{column.name}"'
    if column.since <= schema_version:
        return name
    return f"CAST(NULL AS {_sql_type(column.type)}) AS {name}"


def _scan(parts: Sequence[Part]) -> str:
    """`rank` comes from the folder's name, as in any Hive-style data set.

    DuckDB takes every `name=value` of the whole path for a column, though, and prefers it to the file's own:
    under `sweep/step=3/run` each row would be of step 3. There the rank is cut out of the file's name.
    """
    paths = path_list(part.path for part in parts)
    above = os.path.dirname(os.path.dirname(os.path.dirname(parts[0].path)))
    if "=" not in above:
        return f"read_parquet({paths}, hive_partitioning = true, hive_types = {{'rank': INTEGER}})"
    return (
        r"(SELECT *, CAST(regexp_extract(filename, 'rank=(\d+)[/\\][^/\\]*$', 1) AS INTEGER) AS rank"
        f" FROM read_parquet({paths}, hive_partitioning = false, filename = true))"
    )


def _create_view(
    connection: duckdb.DuckDBPyConnection,
    table: Table,
    name: str,
    selects: Sequence[str],
    empty_prefix: str,
) -> None:
    columns = ", ".join(f'CAST(NULL AS {_sql_type(c.type)}) AS "{c.name}"' for c in table.columns)
    empty = f"SELECT {empty_prefix}{columns} WHERE false"
    try:
        connection.execute(f"CREATE VIEW {name} AS {' UNION ALL '.join(selects or [empty])}")
    except duckdb.BinderException as error:
        reason = str(error).splitlines()[0].removeprefix("Binder Error: ")
        raise Unreadable(
            f"the parts of {table.name} hold something else than its rows ({reason}); remove the one that is none of "
            "its own, or read a copy of the run"
        ) from None


def _no_rows(table: Table) -> pa.Table:
    return table.arrow_schema.append(pa.field("rank", pa.int32())).empty_table()


def _ranks_rows(run: Run) -> pa.Table:
    """The table `ranks` of a run, made from the ranks' json."""
    columns = {}
    for column in RANKS.columns:
        values = [info.facts.get(column.name) for info in run.ranks.values()]
        columns[column.name] = pa.array([_as_column(v, column.type) for v in values], column.type)
    return pa.table(columns)


def _as_column(value: object, type: pa.DataType) -> object:
    if value is None or (pa.types.is_string(type) and isinstance(value, str)):
        return value
    if pa.types.is_string(type):
        return json.dumps(value)
    if pa.types.is_boolean(type):
        return bool(value)
    return value if isinstance(value, int) else None


def _sql_type(type: pa.DataType) -> str:
    if pa.types.is_list(type):
        return _sql_type(type.value_type) + "[]"
    return {
        pa.int32(): "INTEGER",
        pa.int64(): "BIGINT",
        pa.float32(): "FLOAT",
        pa.float64(): "DOUBLE",
        pa.bool_(): "BOOLEAN",
        pa.string(): "VARCHAR",
    }[type]


def text_literal(value: str) -> str:
    """A text as a SQL literal, in quotes; it may hold any."""
    return "'" + value.replace("'", "''") + "'"
