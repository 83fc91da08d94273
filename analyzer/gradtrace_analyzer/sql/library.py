"""The named queries that come with the analyzer: one file each in `queries`, its question at the head.

A file begins with comments. The first line is the question; lines such as `-- $top = 20  How many rows.` name its
parameters with their defaults; what follows the comments is the SQL. It is kept in what other engines have too, so
that it can be asked of the same Parquet folders where one machine is not enough.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gradtrace_analyzer.errors import BadQuery

FOLDER = Path(__file__).parent / "queries"
_PARAMETER = re.compile(r"\$(\w+) = (\S+)\s*(.*)")

Value = int | float | str | None


@dataclass(frozen=True)
class NamedQuery:
    """One query: what it answers, and the values that its parameters have unless others are given."""

    name: str
    question: str
    sql: str
    defaults: Mapping[str, Value]
    about: Mapping[str, str]


def named_queries() -> list[NamedQuery]:
    """All queries of the folder `queries`, in the order of their names."""
    return [_read(path) for path in sorted(FOLDER.glob("*.sql"))]


def named_query(name: str) -> NamedQuery:
    """The one of that name. Raises BadQuery, which says what there is."""
    path = FOLDER / f"{name}.sql"
    names = sorted(p.stem for p in FOLDER.glob("*.sql"))
    if name not in names:
        raise BadQuery(
            f"there is no query {name!r}; analyzer sql --list names them: {', '.join(names)}"
        )
    return _read(path)


def value_of(text: str) -> Value:
    """A parameter's value as it is typed: a number where it is one, else a text; `null` is null."""
    if text.lower() == "null":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _read(path: Path) -> NamedQuery:
    lines = path.read_text().splitlines()
    head = []
    while lines and lines[0].startswith("--"):
        head.append(lines.pop(0)[2:].strip())
    found = [match for line in head if (match := _PARAMETER.match(line))]
    return NamedQuery(
        name=path.stem,
        question=head[0] if head else "",
        sql="\n".join(lines).strip(),
        defaults={match[1]: value_of(match[2]) for match in found},
        about={match[1]: match[3] for match in found},
    )
