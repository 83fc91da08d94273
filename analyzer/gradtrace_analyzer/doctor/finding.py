"""One thing that was looked at, and what all of them come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# `wrong`: a job is not recorded, or something was lost. `note`: worth knowing, nothing is lost by it.
Mark = Literal["ok", "note", "wrong", "unknown"]
DoctorVerdict = Literal["well", "wrong", "unknown"]


@dataclass(frozen=True)
class Finding:
    """What was found of one thing, and what would help where it is not as it should be."""

    name: str
    mark: Mark
    said: str
    advice: str | None = None


def verdict(findings: Sequence[Finding]) -> DoctorVerdict:
    """`wrong` where one thing is, else `unknown` where one could not be found out."""
    marks = {finding.mark for finding in findings}
    return "wrong" if "wrong" in marks else "unknown" if "unknown" in marks else "well"
