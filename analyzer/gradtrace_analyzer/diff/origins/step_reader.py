"""What a step holds besides the rows that differ: read where the origins of a difference are looked for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

import duckdb

from gradtrace_analyzer.diff.difference import Change, Difference
from gradtrace_analyzer.diff.origins.chain_rows import ChainRow, chain_rows
from gradtrace_analyzer.diff.origins.dataflow import Dataflow, dataflow
from gradtrace_analyzer.diff.origins.node_gradients import node_gradients
from gradtrace_analyzer.diff.origins.stage_edges import StageEdges, stage_edges
from gradtrace_analyzer.diff.origins.step_facts import StepFacts, step_facts
from gradtrace_analyzer.diff.origins.unused_forwards import unused_forwards
from gradtrace_analyzer.diff.scope.cover import Cover
from gradtrace_analyzer.words.nouns import SIDES

# Ranks whose tensors are followed by their fingerprints; on others a second origin may go unseen.
MOST_RANKS = 16

# Rows of the chain that are shown in front of the first origin, and after it.
SHOWN_BEFORE, SHOWN_AFTER = 6, 8


class StepReader:
    """One `step` of two aligned runs, on the connection that holds them."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, cover: Cover, step: int) -> None:
        self._connection = connection
        self._cover = cover
        self.step = step

    def dataflow(self, rows: Mapping[int, Sequence[Difference]]) -> Dataflow:
        """What left which row and came into which, of the first ranks with differences in front of any reduction."""
        tables = {rank: {d.table for d in own} for rank, own in rows.items()}
        nodes = any("node_events" in own for own in tables.values())
        computing = {"inputs", "module_calls", "node_events"}
        ranks = [rank for rank, own in tables.items() if own & computing]
        return dataflow(self._connection, self.step, ranks[:MOST_RANKS], nodes=nodes)

    def step_facts(
        self, differences: Sequence[Difference], disturbed: Collection[int]
    ) -> StepFacts:
        """What else is known of the step; `disturbed` as there."""
        return step_facts(
            self._connection,
            self.step,
            differences,
            {
                (root, fqn, (of_class or "").lower())
                for side, root, fqn, of_class, _ in self._called
                if side == "baseline"
            },
            disturbed,
            is_whole=self._cover.sees_all_ranks,
            is_filtered=self._cover.is_filtered,
        )

    def modules(self) -> set[tuple[int, str]]:
        """The (root, module) that any rank of both sides called, among those compared."""
        called = [
            {
                (root, fqn)
                for of_side, root, fqn, _, is_common in self._called
                if of_side == side and is_common and self._cover.selection.wants_module(fqn)
            }
            for side in SIDES
        ]
        return called[0] & called[1]

    def roots(self) -> dict[int, str]:
        """The class of each root module that was called."""
        found: dict[int, str] = {}
        for _, root, fqn, of_class, _ in sorted(self._called, key=lambda call: call[1]):
            if fqn == "":
                known = [name for name in (found.get(root), of_class) if name]
                found[root] = min(known, default="")
        return found

    @cached_property
    def _called(self) -> list[tuple[str, int, str, str | None, bool]]:
        """(side, root, module, its class, whether on a rank that both sides have) of all that was called."""
        union = " UNION ALL ".join(
            f"SELECT '{side}', root, module_fqn, module_class, bool_or(c.rank IS NOT NULL) FROM {side}.module_calls m "
            f"LEFT JOIN common c ON c.rank = m.rank AND c.step = m.step WHERE m.step = {self.step} GROUP BY ALL"
            for side in SIDES
        )
        return self._connection.execute(union).fetchall()

    def node_gradients(self, d: Difference, direction: str) -> tuple[list[Change | None], int, int]:
        """The gradients into or out of a Node by position, and their count on both sides."""
        return node_gradients(self._connection, d, direction)

    def stage_edges(self) -> StageEdges | None:
        """What the stages of a pipeline hand to each other in the step; None where it has none."""
        return stage_edges(self._connection, self.step)

    def unused_forwards(self) -> dict[int, list[tuple[float, float]]]:
        """By rank, the stretches of the step that hold a forward which no backward pass followed."""
        return unused_forwards(self._connection, self.step)

    def chain_rows(self, origin: Difference, differences: Sequence[Difference]) -> list[ChainRow]:
        """The rows of its rank and step around an origin, equal ones too, in program order: a few before it, a few
        after.
        """
        return chain_rows(self._connection, origin, differences, SHOWN_BEFORE, SHOWN_AFTER)
