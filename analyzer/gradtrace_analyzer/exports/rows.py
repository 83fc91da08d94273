"""The rows of an answer into a file, whose name says how: Parquet, CSV or JSON."""

from __future__ import annotations

import itertools
from pathlib import Path

import pyarrow as pa

from gradtrace_analyzer.errors import BadQuery
from gradtrace_analyzer.exports.whole import whole_file
from gradtrace_analyzer.reports.tables import distinct, rendered
from gradtrace_analyzer.sql.sealed import QueryAnswer

SUFFIXES = (".parquet", ".csv", ".json")
_ROWS_AT_ONCE = 100_000


def write_rows(path: Path, found: QueryAnswer, most: int = 0) -> int:
    """Write the rows, at most `most` of them where that is not 0, and say how many they were."""
    if path.suffix not in SUFFIXES:
        raise BadQuery(
            f"{str(path)!r} does not say how to write it; end it in {', '.join(SUFFIXES)}"
        )
    with whole_file(path) as temporary:
        if path.suffix == ".parquet":
            return _write_parquet(temporary, found, most)
        counter = itertools.count()
        rows = (
            row for row, _ in zip(itertools.islice(found.rows, most or None), counter, strict=False)
        )
        with temporary.open("w", encoding="utf-8") as out:
            out.writelines(
                f"{line}\n"
                for line in rendered(
                    "csv" if path.suffix == ".csv" else "json", found.columns, rows
                )
            )
        return next(counter)


def _write_parquet(path: Path, found: QueryAnswer, most: int) -> int:
    import pyarrow.parquet as pq

    names = distinct(found.columns)
    schema = pa.schema(list(zip(names, found.types, strict=True)))
    rows = itertools.islice(found.rows, most or None)
    count = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while portion := list(itertools.islice(rows, _ROWS_AT_ONCE)):
            columns = zip(*portion, strict=True)
            try:
                arrays = [pa.array(c, t) for c, t in zip(columns, found.types, strict=True)]
            except pa.ArrowException as error:
                raise BadQuery(f"a column has no type in Parquet, cast it: {error}") from None
            writer.write_table(pa.table(arrays, schema=schema))
            count += len(portion)
    return count
