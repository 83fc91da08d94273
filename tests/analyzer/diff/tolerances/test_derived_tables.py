"""The tables that pairing and tolerances make hold what the heads of their .sql files say: columns, types, keys."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from gradtrace_analyzer.diff.judging import judged
from gradtrace_analyzer.diff.links import LINK_TABLES, STATISTICS, LinkTable
from gradtrace_analyzer.diff.pairing import pairs
from gradtrace_analyzer.diff.pairing.ignored_rows import ignore_rows
from gradtrace_analyzer.diff.scope.question import Question
from gradtrace_analyzer.diff.scoping import scope_of
from gradtrace_analyzer.diff.tolerances import judgement
from gradtrace_analyzer.diff.tolerances.judgement import Judgement
from gradtrace_analyzer.runs.opening import open_run
from gradtrace_analyzer.sql.derived import DerivedColumn, derived
from gradtrace_analyzer.sql.views import connect_pair
from support.synthetic_runs.builder import summary_columns
from support.synthetic_runs.differences import Rows, paired
from support.synthetic_runs.layer_chain import layered_run

FOLDERS = (pairs.HERE, judgement.HERE)
FILES = sorted(path for folder in FOLDERS for path in folder.glob("*.sql"))
BY_TABLE = {table.table: table for table in LINK_TABLES}

# Which file is the head of each link table's differing rows.
JUDGED = {
    "parameters": "judged_parameters",
    "inputs": "judged_inputs",
    "optimizer_groups": "judged_values",
}
JUDGED |= {"backward_passes": "judged_losses"}
# Steps of one creation, whose columns are among those of the others.
PARTS = {"judged_measured", "judged_steady"}
# Of the pairs themselves, which are gone once they are judged, and of rows that few pairs of runs have.
OF_PAIRS = {"paired", "among", "rebucketed"}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[duckdb.DuckDBPyConnection]:
    """A comparison of two runs of three steps, with a repeat of the baseline, as it is when all is judged."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        open_run(
            layered_run(
                folder / name,
                layers=8,
                optimizer="AdamW",
                forward=error,
                backward=error,
                drift=[0, error, error],
                lengthens=error,
            )
        )
        for name, error in (("a", 0.0), ("b", 1e-3), ("repeat", 1e-7))
    ]
    sides = dict(zip(("baseline", "candidate"), runs, strict=False))
    with (
        contextlib.closing(connect_pair(runs[0], runs[1])) as connection,
        contextlib.closing(Judgement(connection, sides, repeats=runs[2:])) as judgement,
    ):
        judged(connection, scope_of(connection, sides, Question()), judgement)
        yield connection


@pytest.fixture(scope="module")
def pairs_alone() -> duckdb.DuckDBPyConnection:
    """Pairs that nobody has judged, with rows of one side alone."""
    bucket = {"root": 0, "module_fqn": "", "backward_index": 0, "kind": "all_reduce"}
    gradient = {"root": 0, "point": "local", "backward_index": 0, **summary_columns([1.0])}
    sides: list[Rows] = [
        {
            "steps": [{}],
            "gradients": [
                {**gradient, "parameter_fqn": name, **summary_columns([value])} for name in names
            ],
            "buckets": [{**bucket, "parameter_fqns": list(names)}],
        }
        for names, value in (("ab", 1.0), ("axyb", 2.0))
    ]
    connection = paired(*sides)
    pairs.place_among(connection)
    ignore_rows(connection, {}, unmatched=True)
    return connection


def expanded(column: DerivedColumn, table: LinkTable | None) -> Iterator[tuple[str, str]]:
    """(name, type) of the columns that one of a head stands for in a link table."""
    places = re.findall(r"<(\w+)>", column.name)
    assert not places or table is not None, column.name
    roles = [role for role, _ in table.sides] if table is not None else []
    known = {"key": table.key, "value": table.values} if table is not None else {}
    given = {"role": roles, "statistic": STATISTICS, **known}
    for chosen in itertools.product(*(given[place] for place in places)):
        name = column.name
        for place, value in zip(places, chosen, strict=True):
            name = name.replace(f"<{place}>", value)
        yield name, column.type


def of_table(columns: tuple[DerivedColumn, ...], table: LinkTable | None) -> dict[str, str]:
    found = dict(itertools.chain.from_iterable(expanded(c, table) for c in columns))
    if table is not None:
        of_nodes, of_buckets = ("event_index_b", "event_index_c"), ("bucket_index",)
        for name in (of_nodes if table.table != "node_events" else ()) + (
            of_buckets if table.table != "buckets" else ()
        ):
            found.pop(name, None)
    return found


def holds(
    connection: duckdb.DuckDBPyConnection, name: str, key: tuple[str, ...], said: dict[str, str]
) -> None:
    """The table has these columns, of these types where they are said, and no two rows of one key."""
    rows = connection.execute(f"DESCRIBE {name}").fetchall()
    found = {column: type for column, type, *_ in rows}
    expected = {column: found.get(column) if t == "<type>" else t for column, t in said.items()}
    assert found == expected, name
    if key:
        query = f"SELECT {', '.join(key)} FROM {name} GROUP BY ALL HAVING count(*) > 1 LIMIT 1"
        assert connection.execute(query).fetchall() == [], name


def tables_of(path: Path) -> list[tuple[str, LinkTable | None]]:
    """(table, link table of a file of which there is one for each)."""
    name = derived(path.parent, path.stem).name
    if path.stem.startswith("judged_"):
        links = [t for t in LINK_TABLES if JUDGED.get(t.table, "judged_links") == path.stem]
        return [(f"judged_{t.table}", t) for t in links]
    if "{" in name:
        return [(name.format(table=t.table), t) for t in LINK_TABLES]
    return [(name, None)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.stem))
def test_table_is_what_its_head_says(
    path: Path, compared: duckdb.DuckDBPyConnection, pairs_alone: duckdb.DuckDBPyConnection
) -> None:
    table = derived(path.parent, path.stem)
    connection = pairs_alone if path.stem in OF_PAIRS else compared
    if path.stem in PARTS:
        others = {
            c.name
            for f in FILES
            if f.stem == "judged_links"
            for c in derived(f.parent, f.stem).columns
        }
        assert {column.name for column in table.columns} <= others
        return
    for name, link_table in tables_of(path):
        said = of_table(table.columns, link_table)
        if path.stem.startswith("judged_"):
            said = of_table(derived(pairs.HERE, "paired").columns, link_table) | said
        holds(connection, name, table.key, said)


def test_comparison_has_rows_of_what_is_held(compared: duckdb.DuckDBPyConnection) -> None:
    """Else keys would be unique of nothing."""
    # There is no such Node in a chain of layers, and no code is another.
    empty = {"kinked", "unsteady", "cancelling", "steady", "left_out", "excused"}
    for folder in FOLDERS:
        for path in folder.glob("*.sql"):
            if path.stem in {*OF_PAIRS, *PARTS, *empty} or path.stem.startswith("judged_"):
                continue
            assert compared.execute(f"SELECT count(*) FROM {path.stem}").fetchall() != [(0,)], path


def test_every_derived_table_is_in_what_is_installed() -> None:
    """Beside its module, where `hatchling` takes all files of a package along."""
    assert {path.parent.name for path in FILES} == {"pairing", "tolerances"}
    assert all((path.parent / "__init__.py").exists() for path in FILES)
