"""What run-to-run noise really is: measured from repeats of the baseline, per link and module, and over the steps.

A repeat is the same training again: where it differs from the baseline, that is noise. A link's noise at a module
is the largest relative error of its rows there, up to the step in question: noise grows, and a step with little of
it promises nothing. Between two repeats it scatters, so that a multiple of it is allowed; what never differed in a
repeat, of a kind that does differ elsewhere in it, is allowed what the kind shows in the median.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from gradtrace_analyzer.diff.code.legal_changes import divide_out_loss_scales
from gradtrace_analyzer.diff.divided.by_stage import arrange
from gradtrace_analyzer.diff.links import LINK_TABLES, TABLE_NAMES, LinkTable
from gradtrace_analyzer.diff.pairing.opening import open_again, open_steps
from gradtrace_analyzer.diff.pairing.pairs import leave_unjudged
from gradtrace_analyzer.diff.pairing.run_pair import RunPair
from gradtrace_analyzer.diff.pairing.step_index import StepIndex, step_index
from gradtrace_analyzer.errors import NoRepeat
from gradtrace_analyzer.numerics.tolerance import DECISIVE
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.sql.derived import derived
from gradtrace_analyzer.sql.footers import row_counts, table_counts
from gradtrace_analyzer.sql.views import connect_pair
from gradtrace_schemas.table import NODE_SKETCH_LANES, SKETCH_LANES

HERE = Path(__file__).parent

# The tables of which noise is measured.
MEASURED = tuple(table for table in LINK_TABLES if table.noise_place)


@dataclass(frozen=True)
class Noise:
    """A measured noise: the names of the repeats, the largest relative error, and where it is."""

    names: tuple[str, ...]
    median: float
    largest: float
    is_zero: bool

    def words(self) -> str:
        """`noise here is 3e-07, measured from a2`."""
        if self.is_zero:
            return f"the repeat {self.names[0]} is equal to the baseline bit for bit: there is no noise"
        return (
            f"noise is {self.median:.0e} in the median and {self.largest:.0e} at most, measured from "
            f"{', '.join(self.names)}"
        )


class RepeatRuns:
    """Repeats of the baseline, each paired with it on a connection of its own, as the comparison pairs.

    `is_arranged`, the comparison is one of stages, not of ranks; `new_names` are the candidate's names for those of
    the baseline, which the comparison shows. Both may be set until noise is measured first.
    """

    def __init__(self, baseline: Run, repeats: Sequence[Run]) -> None:
        self.is_arranged = False
        self.new_names: Mapping[str, str] = {}
        self._baseline, self._repeats = baseline, repeats
        self._names = tuple(run.name for run in repeats)
        self._opened: list[tuple[duckdb.DuckDBPyConnection, StepIndex]] | None = None

    @property
    def _pairs(self) -> list[tuple[duckdb.DuckDBPyConnection, StepIndex]]:
        if self._opened is None:
            self._opened = []
            for repeat in self._repeats:
                self._opened.append(self._pair(repeat))
        return self._opened

    def _pair(self, repeat: Run) -> tuple[duckdb.DuckDBPyConnection, StepIndex]:
        runs = {"baseline": self._baseline, "candidate": repeat}
        ranks = sorted(set(self._baseline.ranks) & set(repeat.ranks))
        pair = connect_pair(self._baseline, repeat)
        try:
            counts = {side: row_counts(pair, run) for side, run in runs.items()}
            if self.is_arranged:
                ranks = arrange(pair).common
                counts = {side: table_counts(pair, side, TABLE_NAMES) for side in runs}
            pair.execute("CREATE TEMP TABLE renamed_name (old VARCHAR, new VARCHAR)")
            if self.new_names:
                pair.executemany(
                    "INSERT INTO renamed_name VALUES (?, ?)", list(self.new_names.items())
                )
            reading = RunPair(runs, counts, are_arranged=self.is_arranged)
            index = step_index(pair, reading, ranks)
            if index.fits:
                open_steps(pair, index, index.suspects)
                _leave_as_it_is(pair)
            if not _shares_values(pair):
                raise NoRepeat(
                    f"--noise {repeat.name} is no repeat of the baseline: hardly a value in it is of the same step, "
                    "rank and parameter or module, and of the same size"
                )
        except BaseException:
            pair.close()
            raise
        return pair, index

    def close(self) -> None:
        """Close the connections to the repeats, where any was opened."""
        for pair, _ in self._opened or ():
            pair.close()

    def measure(self, connection: duckdb.DuckDBPyConnection, scale: float = 1.0) -> Noise:
        """Write what the repeats show into `known_noise` and `usual_noise` of a comparison, times the scale.

        The noise tables are small (a row per link, place and step). Of a repeat that is too large to be open as a
        whole those steps are, besides its first, that are open in the comparison.
        """
        rows: list[tuple[Any, ...]] = []
        places = connection.execute("SELECT rank, step FROM opened").fetchall()
        for pair, index in self._pairs:
            if not index.fits:
                open_again(pair, index, places)
                _leave_as_it_is(pair)
            for table in MEASURED:
                place = place_of(table, is_renamed=True)
                for role, column in roles_of(table):
                    rows += pair.execute(
                        f"SELECT '{table.table}', {place}, {kind_of(table)}, '{role}', step, max({column}) "
                        f"FROM differing_{table.table} WHERE only_in IS NULL AND {column} > 0 GROUP BY ALL"
                    ).fetchall()
        columns = [list(column) for column in zip(*rows, strict=True)] or [[]] * 6
        derived(HERE, "noise_seen").make(connection, columns)
        for name in ("known_noise", "usual_noise"):
            derived(HERE, name).make(connection, scale=scale)
        errors = sorted(row[5] for row in rows if row[0] != "parameters")
        return Noise(
            self._names,
            errors[len(errors) // 2] if errors else 0.0,
            errors[-1] if errors else 0.0,
            not errors,
        )


def judged_by_noise(ruled: str, table: LinkTable) -> str:
    """The query of rows that the rule has judged (`ruled`), held against what `RepeatRuns.measure` found instead."""
    roles = roles_of(table)
    beyond, exceeds, tolerances, allowed, joins = [], [], [], [], []
    for role, error in roles:
        of = f"link_table = '{table.table}' AND role = '{role}'"
        joins.append(
            f"ASOF LEFT JOIN (FROM known_noise WHERE {of}) k_{role} "
            f"ON k_{role}.place = p.noise_place AND p.step >= k_{role}.step "
            f"LEFT JOIN (FROM usual_noise WHERE {of}) u_{role} ON u_{role}.kind = p.noise_kind"
        )
        allowed.append(f"coalesce(k_{role}.allowed, u_{role}.allowed, 0) AS {role}_noise")
        differs = _differs(role)
        unmeasured = f"{error} IS NULL"
        beyond.append(f"coalesce({differs} AND ({error} > {role}_noise OR {unmeasured}), false)")
        times = _decisive(table.table)
        exceeds.append(
            f"coalesce({differs} AND ({error} > {role}_noise * {times} OR {unmeasured}), false)"
        )
        if role != "loss":
            tolerances.append(
                f"CASE WHEN only_in IS NULL THEN {role}_noise ELSE {role}_tolerance END AS {role}_tolerance,"
            )
    return derived(HERE, "judged_measured").rows(
        ruled=ruled,
        place=place_of(table),
        kind=kind_of(table),
        allowed=", ".join(allowed),
        joins=" ".join(joins),
        names=", ".join(f"{role}_noise" for role, _ in roles),
        tolerances=" ".join(tolerances),
        beyond=" OR ".join(beyond),
        exceeds=" OR ".join(exceeds),
    )


def _leave_as_it_is(pair: duckdb.DuckDBPyConnection) -> None:
    """What a repeat differs by from the baseline, which is nobody's fault."""
    divide_out_loss_scales(pair)
    leave_unjudged(pair)


def _shares_values(pair: duckdb.DuckDBPyConnection) -> bool:
    """Whether the repeat has summaries of most of what the baseline has in their first common step."""
    for table, name, norm, numel in (
        ("parameters", "parameter_fqn", "norm", "numel"),
        ("module_calls", "module_fqn", "output_norm", "output_numel"),
        ("gradients", "parameter_fqn", "norm", "numel"),
    ):
        counts = pair.execute(
            f"SELECT count(*), count(*) FILTER (EXISTS (SELECT 1 FROM candidate.{table} c WHERE c.rank = b.rank "
            f"AND c.step = b.step AND c.{name} = b.{name} AND c.{numel} = b.{numel} "
            f"AND c.{norm} IS NOT NULL)) FROM baseline.{table} b SEMI JOIN common USING (rank, step) "
            f"WHERE b.step = (SELECT min(step) FROM common) AND b.{norm} IS NOT NULL"
        ).fetchone()
        if counts is not None and counts[0]:
            return bool(2 * counts[1] >= counts[0])
    return False


def roles_of(table: LinkTable) -> list[tuple[str, str]]:
    """(role, column of its relative error) of what may be noise in a table."""
    if table.table == "backward_passes":
        return [("loss", "error")]
    return [(role, f"{role}_error") for role, _ in table.sides]


def _differs(role: str) -> str:
    return "value_b_loss IS DISTINCT FROM value_c_loss" if role == "loss" else f"{role}_differs"


def place_of(table: LinkTable, *, is_renamed: bool = False) -> str:
    """What a row is of, as one text in SQL; `is_renamed`, by the candidate's names."""
    parts = []
    for key in table.noise_place:
        value = f"key_{key}::VARCHAR"
        if is_renamed and key.endswith("_fqn"):
            value = (
                f"coalesce((SELECT r.new FROM renamed_name r WHERE r.old = key_{key}), key_{key})"
            )
        parts.append(f"coalesce({value}, '')")
    return f"concat_ws('/', {', '.join(parts)})"


def kind_of(table: LinkTable) -> str:
    """The kind of a row, in SQL, of which noise is told in the median."""
    return "''" if table.kind is None else f"key_{table.kind}"


def _decisive(table: str) -> float:
    """How many tolerances an estimate of the table's sketches must reach: `DECISIVE`."""
    return DECISIVE[NODE_SKETCH_LANES if table == "node_events" else SKETCH_LANES]
