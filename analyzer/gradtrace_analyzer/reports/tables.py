"""Rows as a table for a terminal, as JSON or as CSV.

JSON has no NaN and no infinity: such values are written as the texts "NaN", "Infinity" and "-Infinity", in JSON
and in CSV alike, so that they are not taken for null. A terminal's cell is shortened in its middle, since FQNs
differ at both ends, and never holds a control character, since names come from the job that was recorded.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

Format = Literal["table", "json", "csv"]
Row = Sequence[Any]

_WIDEST_CELL = 60


def rendered(format: Format, columns: Sequence[str], rows: Iterable[Row]) -> Iterator[str]:
    """The lines of an answer, without line ends. JSON and CSV are made as rows are read."""
    if format == "json":
        return json_lines(columns, rows)
    return csv_lines(columns, rows) if format == "csv" else table_lines(columns, rows)


def table_lines(
    columns: Sequence[str],
    rows: Iterable[Row],
    *,
    widest: int = _WIDEST_CELL,
    right: Collection[str] = (),
) -> Iterator[str]:
    """A header, a rule and a line per row; null is written `null`.

    Numbers lie to the right, and so do the columns named in `right`, whose numbers are texts already.
    """
    kept = [tuple(row) for row in rows]
    cells = [[shortened(cell_text(value), widest) for value in row] for row in kept]
    heads = [shortened(_printable(name), widest) for name in columns]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    lies_right = [
        name in right
        or (any(value is not None for value in values) and all(map(_is_number, values)))
        for name, values in zip(
            columns, zip(*kept, strict=True) if kept else [() for _ in columns], strict=True
        )
    ]

    def line(texts: Sequence[str]) -> str:
        placed = (
            text.rjust(width) if is_right else text.ljust(width)
            for text, width, is_right in zip(texts, widths, lies_right, strict=True)
        )
        return "  ".join(placed).rstrip()

    yield line(heads)
    yield "  ".join("-" * width for width in widths)
    yield from map(line, cells)


def json_lines(columns: Sequence[str], rows: Iterable[Row]) -> Iterator[str]:
    """A list of objects, one a line; a column's second appearance gets `_2` behind its name."""
    names = distinct(columns)
    before = "["
    for row in rows:
        yield before + json_text(dict(zip(names, row, strict=True)))
        before = ","
    yield "]" if before == "," else "[]"


def csv_lines(columns: Sequence[str], rows: Iterable[Row]) -> Iterator[str]:
    """A header and a line per row; null is empty, lists are JSON."""
    yield _csv_line(columns)
    for row in rows:
        yield _csv_line([_csv_value(value) for value in row])


def json_text(value: object, *, indent: int | None = None) -> str:
    """A value as JSON that every reader takes: without NaN, infinity, or Python's own types."""
    return json.dumps(plain(value), indent=indent, allow_nan=False, ensure_ascii=False)


def plain(value: object) -> Any:
    """A value made of None, bool, int, finite float, str, list and dict alone."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _not_finite(value)
    if isinstance(value, Mapping):
        return {str(key): plain(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(inside) for inside in value]
    return value.hex() if isinstance(value, bytes) else str(value)


def cell_text(value: object) -> str:
    """A value on one line of a terminal, floats with six digits."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else _not_finite(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(cell_text, value)) + "]"
    return _printable(value if isinstance(value, str) else str(plain(value)))


def shortened(text: str, widest: int) -> str:
    """The text, its middle left out where it is longer than `widest`."""
    if len(text) <= widest:
        return text
    front = (widest - 1) // 2
    return f"{text[:front]}…{text[len(text) - (widest - 1 - front) :]}"


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def distinct(columns: Sequence[str]) -> list[str]:
    """The names, a second appearance with `_2` behind it."""
    seen: Counter[str] = Counter()
    names: list[str] = []
    for column in columns:
        seen[column] += 1
        names.append(column if seen[column] == 1 else f"{column}_{seen[column]}")
    return names


def _csv_value(value: object) -> object:
    simple = plain(value)
    return json_text(simple) if isinstance(simple, list | dict | bool) else simple


def _csv_line(values: Sequence[object]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="").writerow(values)
    return buffer.getvalue()
