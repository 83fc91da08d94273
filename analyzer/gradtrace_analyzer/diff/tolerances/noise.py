"""What run-to-run noise really is: measured from repeats of the baseline, per link and module, and over the steps.

A repeat is the same training again: where it differs from the baseline, that is noise. A link's noise at a module
is the largest relative error of its rows there, up to the step in question: noise grows, and a step with little of
it promises nothing. Between two repeats it scatters, so that a multiple of it is allowed; what never differed in a
repeat, of a kind that does differ elsewhere in it, is allowed what the kind shows in the median.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import duckdb

from gradtrace_analyzer.diff.code.legal_changes import divide_out_loss_scales
from gradtrace_analyzer.diff.divided.by_stage import arrange
from gradtrace_analyzer.diff.links import LINK_TABLES, TABLE_NAMES, LinkTable
from gradtrace_analyzer.diff.pairing.opening import open_again, open_steps
from gradtrace_analyzer.diff.pairing.run_pair import RunPair
from gradtrace_analyzer.diff.pairing.step_index import StepIndex, step_index
from gradtrace_analyzer.errors import NoRepeat
from gradtrace_analyzer.numerics.tolerance import DECISIVE
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.sql.footers import row_counts, table_counts
from gradtrace_analyzer.sql.views import connect_pair
from gradtrace_schemas.table import NODE_SKETCH_LANES, SKETCH_LANES

# By how much one measurement of noise may lie below another: the ratio of two norms of random vectors with few
# independent
# parts, and the sketches' standard error on both sides.
SCATTER = 4.0

# Columns by which a link's noise is told apart, besides the step: what the row is of, never when it ran.
_PLACES = {
    "module_calls": ("root", "module_fqn", "phase"),
    "node_events": ("root", "module_fqn", "node_name", "parameter_fqn"),
    "gradients": ("root", "parameter_fqn", "point"),
    "parameters": ("root", "parameter_fqn", "point"),
    "buckets": ("root", "module_fqn"),
    "backward_passes": ("kind",),
}


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
            if not _shares_values(pair):
                raise NoRepeat(
                    f"--noise {repeat.name} is no repeat of the baseline: hardly a value in it is of the same step, "
                    "rank and parameter or module, and of the same size"
                )
            if index.fits:
                divide_out_loss_scales(pair)
        except BaseException:
            pair.close()
            raise
        return pair, index

    def close(self) -> None:
        """Close the connections to the repeats, where any was opened."""
        for pair, _ in self._opened or ():
            pair.close()

    def measure(self, connection: duckdb.DuckDBPyConnection, scale: float = 1.0) -> Noise:
        """Write what the repeats show over the rule's tolerances, in the tables of a judged comparison.

        The noise tables are small (a row per link, place and step). Of a repeat that is too large to be open as a
        whole those steps are, besides its first, that are open in the comparison.
        """
        errors: list[float] = []
        for name in _PLACES:
            connection.execute(
                f"CREATE OR REPLACE TEMP TABLE noise_{name} (place VARCHAR, kind VARCHAR, role VARCHAR, step BIGINT, "
                "error DOUBLE)"
            )
        places = connection.execute("SELECT rank, step FROM opened").fetchall()
        for pair, index in self._pairs:
            if not index.fits:
                open_again(pair, index, places)
                divide_out_loss_scales(pair)
            for table in LINK_TABLES:
                if table.table not in _PLACES:
                    continue
                for role, column in _roles(table):
                    place = _place(table.table, is_renamed=True)
                    rows = pair.execute(
                        f"SELECT {place}, {_kind(table.table)}, '{role}', step, max({column}) "
                        f"FROM differing_{table.table} WHERE only_in IS NULL AND {column} > 0 GROUP BY ALL"
                    ).fetchall()
                    errors += [row[4] for row in rows if table.table != "parameters"]
                    if rows:
                        connection.executemany(
                            f"INSERT INTO noise_{table.table} VALUES (?, ?, ?, ?, ?)", rows
                        )
        for table in LINK_TABLES:
            if table.table in _PLACES and errors:
                _apply(connection, table, scale)
        errors.sort()
        return Noise(
            self._names,
            errors[len(errors) // 2] if errors else 0.0,
            errors[-1] if errors else 0.0,
            not errors,
        )


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


def _roles(table: LinkTable) -> list[tuple[str, str]]:
    if table.table == "backward_passes":
        return [("loss", "error")]
    return [(role, f"{role}_error") for role, _ in table.sides]


def _place(table: str, *, is_renamed: bool = False) -> str:
    """What a row is of, as one text; `is_renamed`, by the candidate's names."""
    parts = []
    for key in _PLACES[table]:
        value = f"key_{key}::VARCHAR"
        if is_renamed and key.endswith("_fqn"):
            value = (
                f"coalesce((SELECT r.new FROM renamed_name r WHERE r.old = key_{key}), key_{key})"
            )
        parts.append(f"coalesce({value}, '')")
    return f"concat_ws('/', {', '.join(parts)})"


def _kind(table: str) -> str:
    column = {
        "node_events": "node_name",
        "module_calls": "phase",
        "gradients": "point",
        "parameters": "point",
    }
    return f"key_{column[table]}" if table in column else "''"


def _apply(connection: duckdb.DuckDBPyConnection, table: LinkTable, scale: float) -> None:
    name = table.table
    for role, _ in _roles(table):
        connection.execute(
            f"CREATE OR REPLACE TEMP TABLE known AS SELECT place, step, max(max(error)) OVER "
            f"(PARTITION BY place ORDER BY step) * {SCATTER * scale}::DOUBLE AS allowed FROM noise_{name} "
            f"WHERE role = '{role}' GROUP BY place, step"
        )
        connection.execute(
            f"CREATE OR REPLACE TEMP TABLE usual AS SELECT kind, median(error) * {SCATTER * scale}::DOUBLE AS allowed "
            f"FROM noise_{name} WHERE role = '{role}' GROUP BY kind"
        )
        error = "error" if role == "loss" else f"{role}_error"
        differs = (
            "value_b_loss IS DISTINCT FROM value_c_loss" if role == "loss" else f"{role}_differs"
        )
        connection.execute(
            f"CREATE OR REPLACE TEMP TABLE measured AS SELECT d.rowid AS id, coalesce(k.allowed, u.allowed, 0) AS "
            f"allowed, d.{error} AS error, {differs} AS differs FROM (SELECT *, {_place(name)} AS noise_place, "
            f"{_kind(name)} AS noise_kind, rowid FROM differing_{name}) d ASOF LEFT JOIN known k "
            "ON k.place = d.noise_place AND d.step >= k.step LEFT JOIN usual u ON u.kind = d.noise_kind "
            "WHERE d.only_in IS NULL"
        )
        yield_columns = "" if role == "loss" else f"{role}_tolerance = m.allowed, "
        first = role in ("reads", "loss") or len(table.sides) == 1
        keep = "" if first else "d.beyond OR "
        keep_exceeds = "" if first else "d.exceeds OR "
        connection.execute(
            f"UPDATE differing_{name} d SET {yield_columns} noise = 'measured', shown_by = NULL, "
            f"beyond = d.given OR {keep}coalesce(m.differs AND (m.error > m.allowed OR m.error IS NULL), false), "
            f"exceeds = d.given OR {keep_exceeds}coalesce(m.differs AND (m.error > m.allowed * "
            f"{_decisive(name)} OR m.error IS NULL), false) FROM measured m WHERE m.id = d.rowid"
        )


def _decisive(table: str) -> float:
    """How many tolerances an estimate of the table's sketches must reach: `DECISIVE`."""
    return DECISIVE[NODE_SKETCH_LANES if table == "node_events" else SKETCH_LANES]
