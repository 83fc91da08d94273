"""A run's tables for other programs: one DuckDB file, or a folder with a file for each table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from gradtrace_analyzer.errors import CannotWrite
from gradtrace_analyzer.exports.whole import whole_file
from gradtrace_analyzer.progress import progress
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.sql.views import connect, text_literal
from gradtrace_schemas import ALL_TABLES


def write_database(path: Path, runs: Sequence[Run]) -> int:
    """A DuckDB file that holds every table, with what its columns mean; how many rows these are.

    It needs nothing of ours to be read.
    """
    with whole_file(path, also=".wal") as temporary, connect(runs, as_recorded=True) as connection:
        connection.execute(f"ATTACH {text_literal(str(temporary))} AS exported")
        total = 0
        with progress("writing tables", len(ALL_TABLES)) as count:
            for table in ALL_TABLES:
                name = f"exported.{table.name}"
                connection.execute(f"CREATE TABLE {name} AS FROM main.{table.name}")
                connection.execute(f"COMMENT ON TABLE {name} IS {text_literal(table.doc)}")
                for column in table.columns:
                    connection.execute(
                        f'COMMENT ON COLUMN {name}."{column.name}" IS {text_literal(column.doc)}'
                    )
                [(rows,)] = connection.execute(f"SELECT count(*) FROM {name}").fetchall()
                total += rows
                count(1)
        connection.execute("DETACH exported")
    return total


def write_tables(folder: Path, runs: Sequence[Run], format: Literal["csv", "parquet"]) -> int:
    """A file for each table that has rows, in a folder that is new or empty; how many rows these are.

    Of an export that is broken off no file stays: a table without one has no rows.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CannotWrite(f"{folder} is there already; give a new folder, or an empty one")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotWrite(f"{folder} cannot be made: {error.strerror or error}") from None
    try:
        return _write_all(folder, runs, format)
    except BaseException:
        for table in ALL_TABLES:
            (folder / f"{table.name}.{format}").unlink(missing_ok=True)
        raise


def _write_all(folder: Path, runs: Sequence[Run], format: str) -> int:
    total = 0
    options = "FORMAT csv, HEADER" if format == "csv" else "FORMAT parquet, COMPRESSION zstd"
    with (
        connect(runs, as_recorded=True) as connection,
        progress("writing tables", len(ALL_TABLES)) as count,
    ):
        for table in ALL_TABLES:
            [(rows,)] = connection.execute(f"SELECT count(*) FROM {table.name}").fetchall()
            if rows:
                with whole_file(folder / f"{table.name}.{format}") as temporary:
                    connection.execute(
                        f"COPY {table.name} TO {text_literal(str(temporary))} "
                        f"({options}, USE_TMP_FILE false)"
                    )
            total += rows
            count(1)
    return total
