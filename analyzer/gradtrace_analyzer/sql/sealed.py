"""Runs the SQL of a person: one statement that only reads, and reads nothing but the runs it was given.

Four walls, because none holds alone:
- the statement is one SELECT (WITH, FROM-first, DESCRIBE, SHOW and SUMMARIZE parse as one) or EXPLAIN of one;
- it must also bind as a subquery: DuckDB 2.0 lets `WITH x AS (COPY ... TO ...)` pass for a SELECT, but only at
  the top, and `allowed_paths` would let it write over the very parts it may read;
- DuckDB may open those parts and no other file, loads no extension, and its settings are locked;
- the transaction is read-only, memory and spilled bytes have a limit, and a timer may interrupt.
Where strangers are served, the caller adds a process of its own.
"""

from __future__ import annotations

import math
import re
import signal
import socket
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa

from gradtrace_analyzer.errors import BadQuery
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.sql.views import connect, part_paths, path_list

_SPILL_LIMIT = "16GB"
_ROWS_AT_ONCE = 10_000
_ONLY_READS = "a query only reads: give one SELECT, EXPLAIN, DESCRIBE or SHOW"
_KINDS = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
_EXPLAIN = re.compile(r"EXPLAIN\b(\s+ANALYZE\b)?(\s*\([^()]*\))?", re.IGNORECASE)


@dataclass(frozen=True)
class QueryAnswer:
    """The columns of a query's answer, and its rows, which are fetched as they are read, once.

    `types` are the columns' Arrow types; all are texts where the query explains another.
    """

    columns: tuple[str, ...]
    types: tuple[pa.DataType, ...]
    rows: Iterator[tuple[Any, ...]]


@contextmanager
def answered(
    runs: Sequence[Run],
    query: str,
    *,
    parameters: Mapping[str, Any] | None = None,
    memory_limit: str | None = None,
    timeout_s: float | None = None,
    is_typed: bool = False,
) -> Iterator[QueryAnswer]:
    """The answer to a query over the views of `connect(runs)`, to be read inside the `with`.

    `parameters` are the values of what the query calls `$name`; they are values, whatever they hold. Types are
    found out only where the answer `is_typed`. Without a `memory_limit` DuckDB's own holds, 80% of the memory.

    Raises BadQuery, here or while rows are read, for what is refused, cannot be answered or takes longer than
    `timeout_s` altogether.
    """
    if timeout_s is not None:
        if math.isnan(timeout_s):
            raise BadQuery("--timeout nan is no number of seconds")
        timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
    statement = _only_statement(query)
    values = _bound(statement, parameters or {})
    connection = sealed_connection(runs, memory_limit=memory_limit)
    timer = threading.Timer(timeout_s, connection.interrupt) if timeout_s is not None else None
    try:
        with told(timeout_s), _heeding_interrupts(connection):
            if timer is not None:
                timer.start()
            connection.execute("BEGIN TRANSACTION READ ONLY")
            _require_no_writes(connection, statement, values)
            types = _types(connection, statement, values) if is_typed else ()
            connection.execute(statement, values)
            columns = tuple(column[0] for column in connection.description or ())
        types = types or (pa.string(),) * len(columns)
        yield QueryAnswer(columns, types, _fetched(connection, timeout_s))
    finally:
        if timer is not None:
            timer.cancel()
        connection.close()


def sealed_connection(
    runs: Sequence[Run], *, memory_limit: str | None = None
) -> duckdb.DuckDBPyConnection:
    """`connect(runs)`, able to open the runs' parts and no other file, its settings locked.

    Raises BadQuery for a memory limit that DuckDB does not understand.
    """
    try:
        connection = connect(runs, memory_limit=memory_limit, as_recorded=True)
    except duckdb.ParserException as error:
        raise BadQuery(f"--memory-limit {memory_limit!r}: {_sentence(error)}") from None
    connection.execute(f"SET max_temp_directory_size = '{_SPILL_LIMIT}'")
    connection.execute("SET allow_community_extensions = false")
    connection.execute(f"SET allowed_paths = {path_list(part_paths(runs))}")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


@contextmanager
def _heeding_interrupts(connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Ctrl-C ends what DuckDB does inside the block.

    It looks for signals between pieces of its work, and one piece of a cross join may take for ever. Python's own
    handler of the signal comes only after it; but the signal is written to a socket at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = socket.socketpair()

    def watch() -> None:
        # Ends when the other end is closed. By the time that it hears, the connection may be closed as well.
        with reading, suppress(duckdb.Error):
            while number := reading.recv(1):
                if number[0] == signal.SIGINT:
                    connection.interrupt()

    with writing:
        writing.setblocking(False)
        before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        # No daemon: at Python's end one that is inside DuckDB would abort the process.
        threading.Thread(target=watch).start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)


def _only_statement(query: str, *, kinds: tuple[duckdb.StatementType, ...] = _KINDS) -> str:
    """The text of the one statement that the query is, without comments before it and its semicolon."""
    with told():
        statements = duckdb.extract_statements(query)
    if not statements:
        raise BadQuery("the query is empty; give one SELECT, such as 'SELECT * FROM steps'")
    if len(statements) > 1:
        raise BadQuery(f"the query holds {len(statements)} statements; give one")
    kind = statements[0].type
    if kind not in kinds:
        raise BadQuery(f"{kind.name} is refused, {_ONLY_READS}")
    text = statements[0].query
    encoded = text.encode()
    # Offsets count bytes. Semicolons in texts and comments are no tokens.
    tokens = [(at, what) for at, what in duckdb.tokenize(text) if what != duckdb.token_type.comment]
    ends = [at for at, what in tokens if encoded[at : at + 1] == b";"]
    return encoded[tokens[0][0] : ends[0] if ends else None].decode()


def _bound(statement: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the names that the statement has, all of them and no others."""
    names = {str(name) for name in duckdb.extract_statements(statement)[0].named_parameters}
    missing = sorted(names - set(parameters))
    if missing:
        raise BadQuery(
            f"the query asks for ${' and $'.join(missing)}; give {' '.join(f'-p {n}=VALUE' for n in missing)}"
        )
    unknown = sorted(set(parameters) - names)
    if unknown:
        known = f"it has ${', $'.join(sorted(names))}" if names else "it has none"
        raise BadQuery(f"the query has no parameter ${unknown[0]}; {known}")
    return dict(parameters)


def _require_no_writes(
    connection: duckdb.DuckDBPyConnection, statement: str, values: Mapping[str, Any]
) -> None:
    explain = _EXPLAIN.match(statement)
    if explain:
        statement = _only_statement(statement[explain.end() :], kinds=_KINDS[:1])
    try:
        connection.execute(f"EXPLAIN SELECT * FROM (\n{statement}\n)", dict(values))
    except duckdb.BinderException as error:
        if "must be at the top level" in str(error):
            raise BadQuery(f"a WITH that writes is refused, {_ONLY_READS}") from None
        raise


def _fetched(
    connection: duckdb.DuckDBPyConnection, timeout_s: float | None
) -> Iterator[tuple[Any, ...]]:
    while True:
        with told(timeout_s), _heeding_interrupts(connection):
            rows = connection.fetchmany(_ROWS_AT_ONCE)
        if not rows:
            return
        yield from rows


def _types(
    connection: duckdb.DuckDBPyConnection, statement: str, values: Mapping[str, Any]
) -> tuple[pa.DataType, ...]:
    """Those of the columns, of a look that reads no row: DuckDB's own Arrow output holds all rows at once, and
    cannot be interrupted."""
    if _EXPLAIN.match(statement):
        return ()
    connection.execute(f"SELECT * FROM (\n{statement}\n) LIMIT 0", dict(values))
    either: Any = connection
    read = getattr(either, "to_arrow_table", None) or either.fetch_arrow_table  # DuckDB 2, 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it recommends a way without parameters
        return tuple(read().schema.types)


@contextmanager
def told(timeout_s: float | None = None) -> Iterator[None]:
    """DuckDB's errors as sentences for the person who wrote the query."""
    try:
        yield
    except duckdb.InterruptException:
        if timeout_s is None:
            raise KeyboardInterrupt from None
        raise BadQuery(
            f"the query was stopped after {timeout_s:g} s; give it longer with --timeout"
        ) from None
    except duckdb.PermissionException as error:
        raise BadQuery(
            f"the query is refused, it sees the tables of its runs and nothing else: {_sentence(error)}"
        ) from None
    except duckdb.OutOfMemoryException as error:
        raise BadQuery(
            f"the query needs more than its limit ({_sentence(error)}); raise it with --memory-limit"
        ) from None
    except (duckdb.InternalException, duckdb.FatalException):
        raise
    except duckdb.Error as error:
        raise BadQuery(f"the query cannot be answered: {_sentence(error)}") from None


def _sentence(error: duckdb.Error) -> str:
    """DuckDB's message with its hint, without the excerpt of the query."""
    message = str(error).split("\n\nLINE ")[0].split("\nPossible solutions")[0]
    message = re.sub(r"^[\w ]+ Error: ", "", message)
    return " ".join(message.split())
