"""A graph of what may have come from what: differing rows, and for each those it can have inherited from.

A row without any is an origin. `scopes` stand for all rows of a kind up to now, so that "anything before it in its
pass" is one edge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gradtrace_analyzer.diff.difference import Difference


class DependencyGraph:
    """Vertices are numbered as they come; those that are no row stand for a scope."""

    def __init__(self) -> None:
        self.rows: list[Difference | None] = []
        self.feeders: list[set[int]] = []
        self._scopes: dict[tuple[object, ...], int] = {}

    def add(self, row: Difference | None, feeders: Iterable[int] = ()) -> int:
        """Add a vertex that may have inherited from the vertices `feeders`; returns its number. A scope has no row."""
        self.rows.append(row)
        self.feeders.append(set(feeders))
        return len(self.rows) - 1

    def so_far(self, *scope: object) -> list[int]:
        """The vertex that stands for all that joined a scope, if any did."""
        found = self._scopes.get(scope)
        return [] if found is None else [found]

    def join(self, vertex: int, *scope: object) -> None:
        """Let a vertex feed all that asks for the scope from now on."""
        known = self._scopes.get(scope)
        self._scopes[scope] = vertex if known is None else self.add(None, (known, vertex))

    def origins(self) -> list[int]:
        """The vertices of rows that nothing feeds, in the order in which they were added."""
        return [v for v, row in enumerate(self.rows) if row is not None and not self.feeders[v]]

    def ancestors(self, numbers: Mapping[int, int]) -> list[int]:
        """For each vertex, as bits, the numbers of the origins that it can have inherited from."""
        masks = [1 << numbers[v] if v in numbers else 0 for v in range(len(self.rows))]
        changed = True
        while changed:  # a second time only where ranks feed each other
            changed = False
            for v, feeders in enumerate(self.feeders):
                mask = masks[v]
                for feeder in feeders:
                    mask |= masks[feeder]
                if mask != masks[v]:
                    masks[v], changed = mask, True
        return masks
