"""The verdict, of the facts that a comparison has gathered: no row is read here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["identical", "within_tolerance", "different", "incomparable"]

# Which step the origins of the answer are looked for in: the first that differs at all, or the first beyond tolerance;
# `sums`, where sums over parts were compared in place of rows.
Place = Literal["nowhere", "sums", "first", "beyond"]


@dataclass(frozen=True)
class Facts:
    """What a verdict rests on. Defaults are those of two runs of which all was compared and nothing differs.

    `cannot` is why nothing can be compared at all, `sums_apart` whether sums over parts differ, None where rows were
    compared. `differs`, some row does, or a backward pass failed on one side alone. `unseen` is why what agrees does
    not tell that the runs do: a side lacks some of it, or crashed. `is_other_model`: one side alone has parameters;
    `has_lone`: one side alone has anything; `has_aside`: rows that change nothing were set aside.

    `decided_by_bits`: the first step that differs is different without asking for tolerances; `is_beyond`, some step
    holds a difference beyond its tolerance.
    """

    cannot: str | None = None
    sums_apart: bool | None = None
    differs: bool = False
    unseen: str | None = None
    is_other_model: bool = False
    has_lone: bool = False
    has_aside: bool = False
    decided_by_bits: bool = False
    is_beyond: bool = False


@dataclass(frozen=True)
class Decision:
    """The verdict, why nothing can be said where it is `incomparable`, and where its origins are to be looked for."""

    verdict: Verdict
    reason: str = ""
    place: Place = "nowhere"


def decision(facts: Facts) -> Decision:
    """The verdict that these facts allow."""
    if facts.cannot is not None:
        return Decision("incomparable", facts.cannot)
    if facts.sums_apart is not None:
        return Decision("different" if facts.sums_apart else "within_tolerance", place="sums")
    if not facts.differs:
        if facts.unseen is not None:
            return Decision("incomparable", facts.unseen)
        if facts.is_other_model:
            return Decision("different")
        # What was set aside, or stands on one side alone, changes nothing, but no bit proves that.
        return Decision("within_tolerance" if facts.has_aside or facts.has_lone else "identical")
    if facts.decided_by_bits or facts.is_other_model:
        return Decision("different", place="first")
    if facts.is_beyond:
        return Decision("different", place="beyond")
    return Decision("within_tolerance", place="first")
