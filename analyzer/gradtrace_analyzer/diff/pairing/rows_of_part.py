"""The rows of one Parquet part that a comparison reads, where steps have other numbers than the part's own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowsOfPart:
    """A part, by its absolute path: `step_shift` is added to its steps, and of those from `end` on no row is read."""

    path: str
    step_shift: int = 0
    end: int | None = None

    def may_hold(self, first: int, last: int, step: int) -> bool:
        """Whether rows of a step may lie among those that the part itself numbers `first` to `last`."""
        is_read = self.end is None or step < self.end
        return is_read and first <= step - self.step_shift <= last
