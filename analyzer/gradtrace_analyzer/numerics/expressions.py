"""One formula in two forms: text of SQL, and arrays of numpy.

A formula is a Python function that does arithmetic with its arguments and calls `least`, `greatest` and `root` on
them. Called with arrays it computes, called with `Sql` it writes the same expression for DuckDB. So a rule that is
asked of rows in DuckDB and of rows in arrays is written down once (`formulas`).

What has no value is null in SQL and NaN in an array: both spread through arithmetic. `least` and `greatest` of DuckDB
leave nulls out, `numpy.fmin` and `fmax` NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Sql:
    """Text of a SQL expression that is written on, in brackets, by arithmetic with it."""

    text: str

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: Any) -> Sql:
        return _binary(self, "+", other)

    def __radd__(self, other: Any) -> Sql:
        return _binary(other, "+", self)

    def __sub__(self, other: Any) -> Sql:
        return _binary(self, "-", other)

    def __mul__(self, other: Any) -> Sql:
        return _binary(self, "*", other)

    def __rmul__(self, other: Any) -> Sql:
        return _binary(other, "*", self)

    def __truediv__(self, other: Any) -> Sql:
        """Null where the divisor is 0, as an array has NaN or infinity there."""
        return Sql(f"({self} / nullif({_text(other)}, 0))")

    def __gt__(self, other: Any) -> Sql:
        return _binary(self, ">", other)


def least(a: Any, b: Any) -> Any:
    """The smaller of both; the one that there is where the other has no value."""
    return _function("least", np.fmin, a, b)


def greatest(a: Any, b: Any) -> Any:
    """The larger of both; the one that there is where the other has no value."""
    return _function("greatest", np.fmax, a, b)


def root(a: Any) -> Any:
    """The square root."""
    return _function("sqrt", np.sqrt, a)


def _function(name: str, computed: Any, *given: Any) -> Any:
    if any(isinstance(a, Sql) for a in given):
        return Sql(f"{name}({', '.join(map(_text, given))})")
    return computed(*given)


def _binary(a: Any, operator: str, b: Any) -> Sql:
    return Sql(f"({_text(a)} {operator} {_text(b)})")


def _text(value: Any) -> str:
    # A literal such as 1.5 is a DECIMAL, in which a product may overflow.
    return str(value) if isinstance(value, (Sql, int)) else f"{value!r}::DOUBLE"
