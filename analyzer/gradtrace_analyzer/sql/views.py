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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
import pyarrow as pa

from gradtrace_analyzer.errors import Unreadable
from gradtrace_analyzer.numerics.formulas import macro_bodies
from gradtrace_analyzer.numerics.tolerance import roundoff_sql
from gradtrace_analyzer.runs.parts import Part
from gradtrace_analyzer.runs.run import RankInfo, Run, Stretch
from gradtrace_schemas import ALL_TABLES, SCHEMA_VERSION
from gradtrace_schemas.groups import RANKS
from gradtrace_schemas.table import Column, Table

_COPIES = "copied_rows"  # the schema that holds what is copied, out of the way of SHOW TABLES
_MOST_THREADS = 16


def connect(
    runs: Sequence[Run],
    *,
    memory_limit: str | None = None,
    tables: Sequence[Table] = ALL_TABLES,
    as_recorded: bool = False,
) -> duckdb.DuckDBPyConnection:
    """A connection whose views hold the rows of all runs, told apart by their first column, `run`.

    `run` is the directory's name, or more of its path where two would be called the same (`run_names`). Who needs
    few `tables` saves the time of the other views.

    Of attempts that were joined, each rank is one: the numbers and clocks of each attempt go on from those of the one
    before it, `ranks` has one row of it, and `groups` one of each group. `as_recorded`, all but the steps' numbers is
    as it lies on disk, told apart by `attempt`.
    """
    connection = _opened(memory_limit)
    names = run_names(runs)
    for table in tables:
        selects = [
            select
            for number, (run, name) in enumerate(zip(runs, names, strict=True))
            for select in _selects(
                connection, run, number, table, f"{text_literal(name)} AS run, ", as_recorded
            )
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
            selects = list(_selects(connection, run, number, table, "", False))
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
        for of in run.stretches
        for by_rank in of.run.parts.values()
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
    return text.format(roundoff=roundoff_sql("dtype"), **macro_bodies())


def usable_cores() -> int:
    """How many processors this process may run on, which may be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _selects(
    connection: duckdb.DuckDBPyConnection,
    run: Run,
    number: int,
    table: Table,
    prefix: str,
    as_recorded: bool,
) -> list[str]:
    """The queries whose union is a run's rows of one table, `prefix` before the table's columns."""
    if table is RANKS:
        told = [of.run for of in run.stretches] if as_recorded else [run]
        copied = pa.concat_tables([_ranks_rows(of) for of in told])
        return _copied(connection, copied, f"{table.name}_{number}", prefix + _names(table), "")
    goes_on = bool(run.history) and not as_recorded
    found: list[str] = []
    for place, of in enumerate(run.stretches):
        going_on = GoingOn(place, clock_shifts(run, of.run)) if goes_on and place else GoingOn()
        where = "" if of.end is None or not _has_steps(table) else f" WHERE step < {of.end}"

        def columns(version: int, of: Stretch = of, going_on: GoingOn = going_on) -> str:
            shift = of.run.step_shift
            return ", ".join(_held(c, version, shift, going_on) for c in table.columns)

        parts = [part for of_rank in of.run.parts[table.name].values() for part in of_rank]
        if parts:
            held = columns(of.run.schema_version)
            found.append(_limited(prefix, f"SELECT {held} FROM {_scan(parts)}", table, where))
        rows = list(of.run.leftovers.get(table.name, {}).values())
        if rows:
            held = columns(SCHEMA_VERSION)
            named = f"{table.name}_{number}_{place}"
            [select] = _copied(connection, pa.concat_tables(rows), named, held, "") or [""]
            found += [_limited(prefix, select, table, where)] if select else []
    if goes_on and not _has_steps(table) and len(found) > 1:
        key = ", ".join(f'"{name}"' for name in table.key if name != "attempt")
        found = [
            f"SELECT * FROM ({' UNION ALL '.join(found)}) "
            f"QUALIFY row_number() OVER (PARTITION BY {key} ORDER BY attempt DESC) = 1"
        ]
    return found


def _limited(prefix: str, select: str, table: Table, where: str) -> str:
    """A query of a table's columns with the prefix in front, of those steps alone."""
    if not prefix and not where:
        return select
    return f"SELECT {prefix}{_names(table)} FROM ({select}){where}"


def _names(table: Table) -> str:
    return ", ".join(f'"{column.name}"' for column in table.columns)


def _has_steps(table: Table) -> bool:
    return "step" in table.key


def _copied(
    connection: duckdb.DuckDBPyConnection, rows: pa.Table, name: str, columns: str, where: str
) -> list[str]:
    """Rows copied into the connection, as a query for these columns of them; none where there are none."""
    if not len(rows):
        return []
    place = f"{_COPIES}.{name}"
    connection.register("arriving", rows)
    connection.execute(f"CREATE TABLE {place} AS FROM arriving")
    connection.unregister("arriving")
    return [f"SELECT {columns} FROM {place}{where}"]


@dataclass(frozen=True)
class GoingOn:
    """How the numbers and clocks of an attempt go on from those of the first of its history.

    `place` counts the attempts before it in the history; `clock_ns` is by rank what is added to its times.
    """

    place: int = 0
    clock_ns: Mapping[int, int] = field(default_factory=dict)

    def of(self, name: str) -> str:
        """What is added to that column, as SQL; nothing where it stays as it is."""
        if self.place and name in _NUMBERS:
            return f" + {self.place * _MORE_THAN_AN_ATTEMPT}"
        if name in CLOCK_COLUMNS and any(self.clock_ns.values()):
            times = [self.clock_ns.get(rank, 0) for rank in range(max(self.clock_ns) + 1)]
            return f" + CAST({times} AS BIGINT[])[rank + 1]"
        return ""


# What counts on over all of a recording, and is begun anew by the next attempt.
_NUMBERS = ("record_index", "collective_seq")
_MORE_THAN_AN_ATTEMPT = 2**40
# Moments on a recording's clock, as against stretches of time. `test_views` holds this to the catalogue.
CLOCK_COLUMNS = (
    "start_ns",
    "end_ns",
    "node_start_ns",
    "time_ns",
    "ready_ns",
    "launched_ns",
    "done_ns",
)
_OF_STEPS = ("step", "call_step")
_SAME_CLOCK_NS = 60 * 10**9


def clock_shifts(history: Run, attempt: Run) -> dict[int, int]:
    """By rank, what an attempt's times are behind those of the first of its history that has the rank."""
    found = {}
    for rank, info in attempt.ranks.items():
        first = next((o.run for o in history.stretches if rank in o.run.ranks), attempt).ranks[rank]
        apart = _apart(first, info, "wall_start_ns")
        if apart is None:
            continue
        exact = _apart(first, info, "monotonic_start_ns") if first.host == info.host else None
        # Another boot of the same host has another clock.
        is_same = exact is not None and abs(exact - apart) < _SAME_CLOCK_NS
        found[rank] = exact if exact is not None and is_same else apart
    return found


def _apart(first: RankInfo, second: RankInfo, name: str) -> int | None:
    a, b = first.facts.get(name), second.facts.get(name)
    return b - a if isinstance(a, int) and isinstance(b, int) else None


def _held(column: Column, schema_version: int, step_shift: int, going_on: GoingOn) -> str:
    """A column of a part, null where a part of that version has none; as the history goes on."""
    name = f'"{column.name}"'
    if column.since > schema_version:
        return f"CAST(NULL AS {_sql_type(column.type)}) AS {name}"
    added = (
        f" + {step_shift}" if step_shift and column.name in _OF_STEPS else going_on.of(column.name)
    )
    return f"CAST({name}{added} AS {_sql_type(column.type)}) AS {name}" if added else name


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


def _ranks_rows(run: Run) -> pa.Table:
    """The table `ranks` of a run, made from the ranks' json; of a history, with the clocks of its first attempt."""
    columns = {}
    for column in RANKS.columns:
        values = [_of_rank(run, rank, column.name) for rank in run.ranks]
        columns[column.name] = pa.array([_as_column(v, column.type) for v in values], column.type)
    return pa.table(columns)


def _of_rank(run: Run, rank: int, name: str) -> object:
    of = run
    if run.history and name in ("host", "wall_start_ns", "monotonic_start_ns"):
        of = next(o.run for o in run.history if rank in o.run.ranks)
    return of.ranks[rank].facts.get(name)


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
