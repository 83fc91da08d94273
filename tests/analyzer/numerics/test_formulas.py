"""Formulas say the same in SQL as of arrays, whatever they are given."""

from __future__ import annotations

import inspect

import duckdb
import numpy as np
import pytest

from gradtrace_analyzer.numerics.formulas import MACROS
from gradtrace_analyzer.numerics.model import MODEL
from gradtrace_analyzer.sql.views import macros

# What norms, errors and units may be: nothing, a little, much, unknown.
EDGES = [0.0, 1e-30, 2.0**-24, 1e-3, 1.0, 1e12]


@pytest.fixture(scope="module")
def connection() -> duckdb.DuckDBPyConnection:
    opened = duckdb.connect()
    opened.execute(macros())
    return opened


@pytest.mark.parametrize("name", MACROS)
def test_formula_gives_the_same_in_sql_as_of_arrays(
    name: str, connection: duckdb.DuckDBPyConnection
) -> None:
    """What no number comes of is null there, and NaN or infinite here."""
    formula, arguments = MACROS[name]
    draw = np.random.default_rng(0)
    count = 500
    columns = [10 ** draw.uniform(-9, 3, count) for _ in arguments]
    for column in columns:
        column[draw.random(count) < 0.2] = 0.0
        edges = draw.random(count) < 0.2
        column[edges] = draw.choice(EDGES, edges.sum())
    given = ", ".join(f"unnest($x{n}::DOUBLE[]) AS x{n}" for n in range(len(columns)))
    called = f"{name}({', '.join(f'x{n}' for n in range(len(columns)))})"
    found = connection.execute(
        f"SELECT {called} FROM (SELECT {given})",
        {f"x{n}": column.tolist() for n, column in enumerate(columns)},
    ).fetchall()
    with np.errstate(divide="ignore", invalid="ignore"):
        computed = formula(*columns)
    for (text,), value in zip(found, computed.tolist(), strict=True):
        if text is None:
            # What is divided by infinity is 0.
            assert not np.isfinite(value) or (name, value) == ("gain", -1.0)
        elif name == "share_of_floor" and not np.isfinite(value):
            assert text == 1.0
        else:
            assert value == pytest.approx(text, rel=1e-15)


def test_macros_have_the_arguments_of_their_formulas() -> None:
    for name, (formula, arguments) in MACROS.items():
        assert len(inspect.signature(formula).parameters) == len(arguments), name


def test_share_of_an_update_is_never_more_than_what_is_not_judged_at_all() -> None:
    share_of_signs = MACROS["share_of_signs"][0]
    errors = np.logspace(-12, 3, 50)
    shares = share_of_signs(errors)
    assert (np.diff(shares) >= 0).all() and shares.max() == MODEL.unjudged
    assert shares[0] == pytest.approx(MODEL.updated, rel=0.01)
