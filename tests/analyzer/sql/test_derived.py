"""Derived tables: heads that say what a file's SELECT gives, and the statement that makes it."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from gradtrace_analyzer.numerics.model import MODEL
from gradtrace_analyzer.sql.derived import DerivedColumn, derived

FILE = """-- table: doubled_{name}
-- Numbers, and twice that:
-- in this order.
-- key: n
-- columns:
--   n INTEGER: a number
--   twice DOUBLE: by the growth, {{braces}} and all
-- reads: numbers, others
SELECT n, n * {growth}::DOUBLE AS twice FROM {source} WHERE n > $1
"""


def test_head_says_what_the_table_is(tmp_path: Path) -> None:
    (tmp_path / "doubled.sql").write_text(FILE)
    table = derived(tmp_path, "doubled")
    assert (table.name, table.key, table.reads) == ("doubled_{name}", ("n",), ("numbers", "others"))
    assert table.about == "Numbers, and twice that: in this order."
    assert table.columns[0] == DerivedColumn("n", "INTEGER", "a number")


def test_table_is_made_with_the_models_numbers_and_in_place_of_one_of_its_name(
    tmp_path: Path,
) -> None:
    (tmp_path / "doubled.sql").write_text(FILE)
    with duckdb.connect() as connection:
        for least, left in ((1, [2, 3]), (2, [3])):
            source = "range(4) numbers(n)"
            derived(tmp_path, "doubled").make(connection, [least], name="here", source=source)
            found = connection.execute("FROM doubled_here ORDER BY n").fetchall()
            assert found == [(n, n * MODEL.growth) for n in left]


@pytest.mark.parametrize("field", ["table", "key", "columns", "reads"])
def test_head_without_a_field_is_refused_by_name(field: str, tmp_path: Path) -> None:
    lines = [line for line in FILE.splitlines() if not line.startswith(f"-- {field}:")]
    (tmp_path / "doubled.sql").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=rf"doubled\.sql does not say its {field}"):
        derived(tmp_path, "doubled")
