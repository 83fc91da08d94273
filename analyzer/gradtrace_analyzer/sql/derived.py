"""Tables that a comparison makes on its connection: each a .sql file, with a head that says what the table is.

    -- table: kinked
    -- What elements on the wrong side of a kink may change from there on.
    -- key: rank, step, place
    -- columns:
    --   rank INTEGER: of the step
    --   ...
    -- reads: kept_node_events, seen_noise
    SELECT ...

What stands in braces in the SELECT is filled in: the numbers of the tolerance model by their names, and what the maker
gives. A table of which there is one for each link table has its columns as patterns, `key_<key>`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb

from gradtrace_analyzer.numerics.model import MODEL

_COLUMN = re.compile(r"  (\S+) ([A-Z]+(?:\[\])?|<type>): (.+)")
_FIELDS = ("table", "key", "columns", "reads")


@dataclass(frozen=True)
class DerivedColumn:
    """One column: its name, DuckDB's name of its type, and what it means."""

    name: str
    type: str
    meaning: str


@dataclass(frozen=True)
class DerivedTable:
    """A table as its head says it, and the SELECT that gives its rows."""

    name: str
    about: str
    key: tuple[str, ...]
    columns: tuple[DerivedColumn, ...]
    reads: tuple[str, ...]
    select: str

    def rows(self, **filled: object) -> str:
        """The SELECT, filled in. Raises KeyError for what is not given."""
        return self.select.format(**MODEL.as_text(), **filled)

    def create(self, **filled: object) -> str:
        """The statement that makes the table, in place of one of that name."""
        name = self.name.format(**filled)
        return f"CREATE OR REPLACE TEMP TABLE {name} AS {self.rows(**filled)}"

    def make(
        self,
        connection: duckdb.DuckDBPyConnection,
        parameters: Sequence[object] = (),
        **filled: object,
    ) -> None:
        """Make it."""
        connection.execute(self.create(**filled), list(parameters))


@functools.cache
def derived(folder: Path, name: str) -> DerivedTable:
    """The table of the file of that name. Raises ValueError for a head that does not say all."""
    lines = (folder / f"{name}.sql").read_text(encoding="utf-8").splitlines()
    head: dict[str, str] = {}
    about: list[str] = []
    columns: list[DerivedColumn] = []
    while lines and lines[0].startswith("--"):
        line = lines.pop(0)[3:]
        field, _, said = line.partition(":")
        if match := _COLUMN.fullmatch(line):
            columns.append(DerivedColumn(*match.groups()))
        elif field in _FIELDS:
            head[field] = said.strip()
        else:
            about.append(line.strip())
    missing = [field for field in _FIELDS if field not in head]
    if missing or not columns:
        raise ValueError(f"{name}.sql does not say its {', '.join(missing) or 'columns'}")
    return DerivedTable(
        name=head["table"],
        about=" ".join(about),
        key=_names(head["key"]),
        columns=tuple(columns),
        reads=_names(head["reads"]),
        select="\n".join(lines).strip(),
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
