"""How each side divides a step's work: over ranks, shards, stages and accumulating backward passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import duckdb

from gradtrace_analyzer.diff.code.structure import OneSided
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.words.nouns import SIDES, other_side
from gradtrace_analyzer.words.numbers import noun


@dataclass(frozen=True)
class Division:
    """How a side divides its work: ranks, and accumulating backward passes of a rank's step."""

    ranks: int
    passes: int
    parameter_numel: int
    input_numel: int
    input_count: int = 0

    def words(self) -> str:
        """`2 ranks with 1 backward pass a step`."""
        ranks = f"{self.ranks} {noun(self.ranks, 'rank')}"
        return f"{ranks} with {self.passes} {noun(self.passes, 'backward pass')} a step"


def divisions(
    connection: duckdb.DuckDBPyConnection, runs: Mapping[str, Run]
) -> tuple[Division, Division] | None:
    """How both sides divide the work, where they do it differently and feed the same amount; else None."""
    found = []
    for side, run in runs.items():
        # As numbers they keep parts and row groups closed.
        here = "(SELECT min(step) FROM {0}.steps), (SELECT min(rank) FROM {0}.parameters)"
        [(step, rank)] = connection.execute(f"SELECT {here.format(side)}").fetchall()
        step, rank = (-1 if n is None else n for n in (step, rank))
        row = connection.execute(
            f"SELECT (SELECT max(backward_count) FROM {side}.steps WHERE step = {step}), "
            f"(SELECT coalesce(sum(numel), 0) FROM {side}.parameters WHERE step = {step} "
            f"AND point = 'before' AND rank = {rank}), "
            f"(SELECT coalesce(sum(numel), 0) FROM {side}.inputs WHERE step = {step} AND root IS NOT NULL), "
            f"(SELECT count(*) FROM {side}.inputs WHERE step = {step} AND root IS NOT NULL)"
        ).fetchone()
        passes, numel, fed, calls = row or (0, 0, 0, 0)
        found.append(Division(run.world_size or len(run.ranks), passes or 0, numel, fed, calls))
    a, b = found
    if not a.parameter_numel or not b.parameter_numel:
        return None  # one side did not record them (GRADTRACE_DETAIL): nothing tells
    if (a.ranks, a.passes, a.parameter_numel) == (b.ranks, b.passes, b.parameter_numel):
        return None
    # One pass more or less for the same calls is no other division: it was left out, failed, or was made twice.
    if (a.ranks, a.parameter_numel, a.input_count) == (b.ranks, b.parameter_numel, b.input_count):
        return None
    # A stage's root is fed by another stage: what enters the model is not told from that. Elsewhere it must be known.
    is_same = a.input_numel == b.input_numel and a.input_numel > 0
    if not is_same and not _has_stages(connection):
        return None
    return a, b


def held_nowhere_else(
    connection: duckdb.DuckDBPyConnection, runs: Mapping[str, Run], lone: Sequence[OneSided]
) -> list[OneSided]:
    """Of what one side alone has on the ranks of both, all but the modules and parameters that the other side's
    further ranks hold: a pipeline's stages are the same model."""
    if set(runs["baseline"].ranks) == set(runs["candidate"].ranks):
        return list(lone)
    held = {
        side: [
            name
            for (name,) in connection.execute(
                f"SELECT DISTINCT parameter_fqn FROM {side}.parameters UNION "
                f"SELECT DISTINCT module_fqn FROM {side}.module_calls"
            ).fetchall()
        ]
        for side in SIDES
    }
    return [
        entry
        for entry in lone
        if not entry.is_of_the_model
        or not any(
            name == entry.name or name.startswith(f"{entry.name}.")
            for name in held[other_side(entry.only_in)]
        )
    ]


def _has_stages(connection: duckdb.DuckDBPyConnection) -> bool:
    return any(
        connection.execute(f"SELECT 1 FROM {side}.stage_events LIMIT 1").fetchone()
        for side in SIDES
    )
