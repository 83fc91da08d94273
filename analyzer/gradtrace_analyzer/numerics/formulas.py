"""What the judgement of opened rows and the sieve of unopened ones both ask, written once: see `expressions`.

In SQL they are macros of the same names (sql/macros.sql). Each takes columns, and gives a column, of float64.
"""

from __future__ import annotations

from typing import Any

from gradtrace_analyzer.numerics.expressions import Sql, greatest, least, root
from gradtrace_analyzer.numerics.model import MODEL


def gain(b_reads: Any, c_reads: Any, b_writes: Any, c_writes: Any) -> Any:
    """By how much more the candidate hands on than the baseline of what it received: a signed share, of four norms."""
    return (c_writes / b_writes) / (c_reads / b_reads) - 1


def share_of_floor(norm: Any, floor: Any) -> Any:
    """What part a norm is of what it may have been left over from, at most 1; 1 where the floor is 0 or null."""
    return least(1.0, norm / floor)


def rounded_once(b_unit: Any, c_unit: Any) -> Any:
    """What a value may differ by that is rounded once, from one dtype to another, of both units of roundoff."""
    return MODEL.rounded_once * greatest(b_unit, c_unit)


def share_in_proportion(error: Any) -> Any:
    """What share of an update the error of a gradient explains with an optimizer such as SGD."""
    return MODEL.updated + MODEL.passed_on * error


def share_of_signs(error: Any) -> Any:
    """The same with an optimizer that makes a whole step of a gradient's sign: what turns around of it."""
    return least(MODEL.unjudged, MODEL.updated + MODEL.turned_times * root(MODEL.turned * error))


def update_allowed(unit: Any, norm: Any, share: Any, update: Any) -> Any:
    """How far a parameter may move away from the other side's in a step: by roundings, and that share of its update."""
    return MODEL.update_roundings * unit * norm + share * update


# By its macro: the formula, and what its arguments are called there.
MACROS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "gain": (gain, ("b_reads", "c_reads", "b_writes", "c_writes")),
    "share_of_floor": (share_of_floor, ("norm", "floor_norm")),
    "rounded_once": (rounded_once, ("b_unit", "c_unit")),
    "share_in_proportion": (share_in_proportion, ("error",)),
    "share_of_signs": (share_of_signs, ("error",)),
    "update_allowed": (update_allowed, ("unit", "norm", "share", "update_norm")),
}


def macro_bodies() -> dict[str, str]:
    """The text of each macro, by its name."""
    return {name: str(formula(*map(Sql, names))) for name, (formula, names) in MACROS.items()}
