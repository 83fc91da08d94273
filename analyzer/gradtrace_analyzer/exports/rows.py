"""The rows of an answer into a file, whose name says how: Parquet, CSV or JSON."""

from __future__ import annotations

import itertools
from pathlib import Path

from gradtrace_analyzer.errors import BadQuery
from gradtrace_analyzer.exports.whole import whole_file
from gradtrace_analyzer.reports.tables import rendered
from gradtrace_analyzer.untrusted_sql import Answer, told

SUFFIXES = (".parquet", ".csv", ".json")


def write_rows(path: Path, found: Answer, most: int = 0) -> int:
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


def _write_parquet(path: Path, found: Answer, most: int) -> int:
    import pyarrow.parquet as pq

    count = 0
    reader = found.batches()
    with told(), pq.ParquetWriter(path, reader.schema, compression="zstd") as writer:
        for batch in reader:
            rows = batch.slice(0, most - count) if most else batch
            writer.write_batch(rows)
            count += len(rows)
            if most and count >= most:
                break
    return count
