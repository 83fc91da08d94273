"""Modules and parameters that have another name in the candidate: patterns a person gives, and how they are applied.

`OLD=NEW` takes the baseline's names to the candidate's. A pattern stands for a name and all below it; each `*` is any
text, and the one at the same place of NEW takes it over. `encoder.*=backbone.*`, `blocks.*.attn.q=blocks.*.attn.wq`,
`*=net.*` (all of it now lies inside `net`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import duckdb

from gradtrace_analyzer.errors import BadRename
from gradtrace_schemas import ALL_TABLES
from gradtrace_schemas.table import Table

_NAMES = ("module_fqn", "parameter_fqn", "changed_module_fqn")
_LISTS = ("parameter_fqns", "other_fqns")


@dataclass(frozen=True)
class Rename:
    """What was `old` in the baseline is `new` in the candidate."""

    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.old}={self.new}"

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        parts = (re.escape(part) for part in self._ends[0].split("*"))
        return re.compile(f"{'(.*?)'.join(parts)}(?=\\.|$)")

    @cached_property
    def _ends(self) -> tuple[str, str]:
        """Both patterns without the `.*` that both end with: what is below a name follows it anyway."""
        old, new = self.old, self.new
        if (old.endswith(".*") or old == "*") and (new.endswith(".*") or new == "*"):
            old, new = old[:-1].removesuffix("."), new[:-1].removesuffix(".")
        return old, new

    def of(self, name: str) -> str | None:
        """The new name, None where the pattern does not stand for it."""
        old, new = self._ends
        if not old:
            return f"{new}.{name}".removesuffix(".")
        found = self._pattern.match(name)
        if found is None:
            return None
        texts = iter(found.groups())
        begins = "".join(next(texts) if part == "*" else part for part in re.split(r"(\*)", new))
        return (begins + name[found.end() :]).removeprefix(".")


def rename_of(text: str) -> Rename:
    """The rename that a person wrote. Raises BadRename."""
    old, equals, new = text.partition("=")
    if not equals or not (old or new):
        raise BadRename(f"{text!r} is no rename; write OLD=NEW, such as 'encoder.*=backbone.*'")
    if old.count("*") != new.count("*"):
        raise BadRename(
            f"{text!r} has {old.count('*')} * on its left and {new.count('*')} on its right; each * of NEW takes "
            "what the one at its place in OLD stands for"
        )
    return Rename(old, new)


def renamed(name: str, renames: Sequence[Rename]) -> str:
    """The candidate's name for one of the baseline's: by the first rename that stands for it."""
    for rename in renames:
        new = rename.of(name)
        if new is not None:
            return new
    return name


def apply_renames(
    connection: duckdb.DuckDBPyConnection, rounds: Sequence[Sequence[Rename]]
) -> None:
    """Make the views of the schema `baseline` show the candidate's names.

    The first round is a person's; each later one stands for the names that those before have left.
    Raises BadRename where a person's rename matches nothing on either side, or two names would become one.
    """
    names = _distinct(connection, _NAMES)
    of_candidate = set(_distinct(connection, _NAMES, "candidate")) if rounds[0] else set()
    lists = _distinct(connection, _LISTS)
    every = {name for name in names if isinstance(name, str)}
    every |= {name for of_list in lists for name in of_list if name is not None}
    for rename in rounds[0]:
        if all(rename.of(name) is None for name in every):
            raise BadRename(
                f"--rename {str(rename)!r}: the baseline has no module or parameter {rename.old!r}"
            )
        if of_candidate.isdisjoint(map(rename.of, every)):
            raise BadRename(
                f"--rename {str(rename)!r}: the candidate has no module or parameter {rename.new!r}"
            )
    new_names = {name: name for name in sorted(every)}
    for renames in rounds:
        new_names = {old: renamed(name, renames) for old, name in new_names.items()}
    _require_distinct(new_names)
    connection.execute("CREATE TEMP TABLE renamed_name (old VARCHAR, new VARCHAR)")
    connection.execute("CREATE TEMP TABLE renamed_list (old VARCHAR[], new VARCHAR[])")
    changed = {old: new for old, new in new_names.items() if old != new}
    if changed:
        connection.executemany("INSERT INTO renamed_name VALUES (?, ?)", list(changed.items()))
    rows = []
    for of_list in lists:
        new = [name if name is None else new_names[name] for name in of_list]
        if new != list(of_list):
            rows.append((list(of_list), new))
    if rows:
        connection.executemany("INSERT INTO renamed_list VALUES (?, ?)", rows)
    for table in ALL_TABLES:
        _show_renamed(connection, table)


def new_names(connection: duckdb.DuckDBPyConnection) -> dict[str, str]:
    """The candidate's names for those of the baseline, after `apply_renames`."""
    return dict(connection.execute("FROM renamed_name").fetchall())


def _distinct(
    connection: duckdb.DuckDBPyConnection, columns: Collection[str], side: str = "baseline"
) -> list[Any]:
    selects = [
        f"SELECT DISTINCT {column.name} FROM {side}.{table.name} WHERE {column.name} IS NOT NULL"
        for table in ALL_TABLES
        for column in table.columns
        if column.name in columns
    ]
    return [value for (value,) in connection.execute(" UNION ".join(selects)).fetchall()]


def _require_distinct(new_names: Mapping[str, str]) -> None:
    seen: dict[str, str] = {}
    for old, new in new_names.items():
        if new in seen:
            raise BadRename(
                f"--rename would call both {seen[new]!r} and {old!r} of the baseline {new!r}; "
                "write it so that they stay apart"
            )
        seen[new] = old


def _show_renamed(connection: duckdb.DuckDBPyConnection, table: Table) -> None:
    """Put a view over the one that shows the names as they were recorded, which keeps its rows."""
    names = [column.name for column in table.columns]
    touched = [name for name in names if name in (*_NAMES, *_LISTS)]
    if not touched:
        return
    connection.execute(f"ALTER VIEW baseline.{table.name} RENAME TO {table.name}_as_recorded")
    joins, columns = [], dict.fromkeys(names, "")
    for number, name in enumerate(touched):
        source = "renamed_name" if name in _NAMES else "renamed_list"
        joins.append(f"LEFT JOIN {source} r{number} ON r{number}.old = t.{name}")
        columns[name] = f"coalesce(r{number}.new, t.{name}) AS "
    shown = ", ".join(f"{how}{name}" if how else f"t.{name}" for name, how in columns.items())
    connection.execute(
        f"CREATE VIEW baseline.{table.name} AS SELECT {shown} FROM baseline.{table.name}_as_recorded t "
        + " ".join(joins)
    )
