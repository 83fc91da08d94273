"""How much of a step differs, where its rows are counted and not kept."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Tally:
    """The rows of one step, table and point of a rank that differ.

    `unmeasured` of them have no relative error: NaN on one side, or no tensor. `place` says what the first of them is
    of, as far as it is known. Where a tally is not judged, `exceeds` says only that a row may be beyond its tolerance.
    """

    rank: int
    table: str
    point: str | None
    step: int
    rows: int
    largest_error: float | None
    exceeds: bool
    nonfinite: bool
    unmeasured: int = 0
    place: str | None = None
    is_judged: bool = True


@dataclass
class Sieved:
    """What the sieve found of one rank: the steps it tallied, and those that it could not pair.

    `arriving` is, by step, the largest gradient that reached a Node of a module.
    """

    rank: int
    tallies: list[Tally] = field(default_factory=list)
    unpaired: set[int] = field(default_factory=set)
    arriving: dict[int, float] = field(default_factory=dict)
