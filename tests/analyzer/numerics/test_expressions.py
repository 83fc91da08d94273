"""One formula as text and as numbers."""

from __future__ import annotations

from typing import Any

import duckdb
import numpy as np

from gradtrace_analyzer.numerics.expressions import Sql, greatest, least, root


def test_text_of_a_formula_is_what_it_computes() -> None:
    def formula(a: Any, b: Any) -> Any:
        return least(2.5, 1 + 3.0 * root(a) - b / (a + 1.0)) * greatest(a, b)

    text = formula(Sql("a"), Sql("b"))
    numbers = [(0.0, 1.0), (4.0, 2.0), (1e-9, 1e9)]
    for a, b in numbers:
        query = f"SELECT {text} FROM (SELECT {a!r}::DOUBLE AS a, {b!r}::DOUBLE AS b)"
        assert duckdb.execute(query).fetchall() == [(float(formula(np.float64(a), np.float64(b))),)]


def test_division_by_nothing_has_no_value_in_either() -> None:
    assert duckdb.execute(f"SELECT {Sql('1.0') / Sql('0')}").fetchall() == [(None,)]
    with np.errstate(divide="ignore"):
        assert np.isinf(np.float64(1.0) / np.float64(0.0))


def test_literal_is_a_double() -> None:
    assert str(1.5 * Sql("x")) == "(1.5::DOUBLE * x)"
    assert str(Sql("x") > 2) == "(x > 2)"
