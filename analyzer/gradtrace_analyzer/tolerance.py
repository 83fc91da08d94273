"""How far two values may lie apart and still count as the same: a first, honest rule.

Two runs that add the same numbers in another order differ by rounding: each of n additions errs by at most
half a unit of the dtype, and independent errors grow like the square root of their number. 16 units cover some
hundred operations in a row; every step that trains on the last one's difference may add as much again, so the
allowance grows with the steps that both made. It knows nothing of a model's depth or of how it amplifies noise.
"""

from __future__ import annotations

UNITS = 16

_EPSILON = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "complex64": 2.0**-23,
    "complex128": 2.0**-52,
    "bfloat16": 2.0**-7,
    "float16": 2.0**-10,
}


def epsilon(dtype: str | None) -> float:
    """Distance from 1 to the next number of a dtype; 0 for one whose values are exact."""
    if dtype is None:
        return 0.0
    return 2.0**-2 if dtype.startswith("float8") else _EPSILON.get(dtype, 0.0)


def tolerance(dtype: str | None, steps_before: int) -> float:
    """The relative error that is allowed after `steps_before` steps that both runs made."""
    return UNITS * epsilon(dtype) * (steps_before + 1)


def tolerance_sql(dtype: str, steps_before: str) -> str:
    """The same as a SQL expression over columns."""
    cases = " ".join(f"WHEN '{name}' THEN {UNITS * eps!r}" for name, eps in _EPSILON.items())
    return (
        f"(CASE {dtype} {cases} ELSE CASE WHEN {dtype} LIKE 'float8%' THEN {UNITS * 2.0**-2!r} "
        f"ELSE 0 END END * ({steps_before} + 1))"
    )
