"""What the later stages of a comparison are handed: the scope, what was judged of it, and what that covers."""

from __future__ import annotations

from dataclasses import dataclass, field

import duckdb

from gradtrace_analyzer.diff.code.structure import OneSided, wants_one_sided
from gradtrace_analyzer.diff.covering import Covered, covered
from gradtrace_analyzer.diff.divided.division import held_nowhere_else
from gradtrace_analyzer.diff.judged_rows import JudgedRows
from gradtrace_analyzer.diff.judging import Judged
from gradtrace_analyzer.diff.origins.step_reader import StepReader
from gradtrace_analyzer.diff.scoping import Scope


@dataclass(frozen=True)
class Comparison:
    """A scope that was judged, on its connection. `lone` is what one side alone has, as far as it was asked for."""

    connection: duckdb.DuckDBPyConnection
    scope: Scope
    judged: Judged
    rows: JudgedRows
    covered: Covered
    lone: tuple[OneSided, ...]
    _readers: dict[int, StepReader] = field(default_factory=dict, repr=False)

    @property
    def is_other_model(self) -> bool:
        """Whether one side alone has parameters."""
        return any(entry.has_parameters for entry in self.lone)

    def reader(self, step: int) -> StepReader:
        """What a step holds besides the rows that differ; the same for each step, which reads nothing twice."""
        if step not in self._readers:
            self._readers[step] = StepReader(self.connection, self.covered.cover, step)
        return self._readers[step]


def comparison_of(
    connection: duckdb.DuckDBPyConnection, scope: Scope, judged: Judged
) -> Comparison:
    """The comparison of a scope, once it is judged."""
    wanted = [
        entry
        for entry in judged.structure.one_sided
        if wants_one_sided(scope.question.chosen, entry)
    ]
    return Comparison(
        connection,
        scope,
        judged,
        JudgedRows(connection, judged),
        covered(connection, scope, judged),
        tuple(held_nowhere_else(connection, scope.runs, wanted)),
    )
