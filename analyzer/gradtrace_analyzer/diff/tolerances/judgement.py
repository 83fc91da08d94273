"""Holds each pair that differs against its tolerance: makes `differing_<table>` of `kept_<table>`, each in one go.

A row is `beyond` when its estimated error is larger than its tolerance: that places an origin (a `Difference` calls it
`exceeds`: there it is the only question). The column `exceeds` says that the estimate is so much larger that the
verdict may rest on it (`DECISIVE`: an estimate from 4 lanes has a standard error of 0.37). What a step is allowed grows
with what it received: the parameters' measured difference, never its number.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import duckdb

from gradtrace_analyzer.diff.code.legal_changes import (
    LossScale,
    SetAside,
    divide_out_loss_scales,
    set_aside,
)
from gradtrace_analyzer.diff.links import LINK_TABLES, LinkTable
from gradtrace_analyzer.diff.pairing.pairs import (
    forget_left_out,
    make_judged,
    opened_places,
    within,
)
from gradtrace_analyzer.diff.tolerances.allowances import expression
from gradtrace_analyzer.diff.tolerances.amplification import (
    write_arriving,
    write_kinks,
    write_unsteady,
)
from gradtrace_analyzer.diff.tolerances.held_rows import as_given, judged_links
from gradtrace_analyzer.diff.tolerances.lengths import write_steady, write_usual_gain
from gradtrace_analyzer.diff.tolerances.noise import MEASURED, Noise, RepeatRuns, judged_by_noise
from gradtrace_analyzer.diff.tolerances.updates import is_plain, judged_inputs, judged_parameters
from gradtrace_analyzer.numerics.tolerance import (
    FINEST,
    PRECISIONS,
    LowerBound,
    Rule,
    roundoff,
)
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.sql.derived import derived
from gradtrace_analyzer.words.nouns import SIDES

HERE = Path(__file__).parent


class Judgement:
    """The tolerances of two runs that are paired on a connection (`pairing`), written into its tables."""

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        runs: Mapping[str, Run],
        *,
        precision: str | None = None,
        repeats: Sequence[Run] = (),
        exact: bool = False,
        scale: float = 1.0,
        is_step_alone: bool = False,
        without: Collection[str] = (),
    ) -> None:
        """With `exact` nothing is set aside. `repeats` are repeats of the baseline, from which noise is measured.

        `precision` is that of the matrix products on one side, where nothing recorded tells it; `scale` multiplies
        every tolerance of the rule (to measure how sharp it is). It does `without` these allowances (to measure what
        each pays for), which are names of `allowances.ALLOWANCES`.
        """
        self._connection = connection
        self._scale = scale
        self._exact = exact
        self._is_step_alone = is_step_alone
        self._without = frozenset(without)
        declared = [precision] if precision else []
        switched = [_switched_on(run) for run in runs.values()]
        # On a CPU the switch has no effect, so that it counts where the sides differ in it alone.
        if switched[0] != switched[1] or any(_has_device(run) for run in runs.values()):
            declared += [name for name in switched if name]
        self._declared = max(declared, key=PRECISIONS.__getitem__, default=None)
        self.rule = Rule(roundoff("float32"), "float32", 1, 1)
        self.scale = scale
        self._repeats = RepeatRuns(runs["baseline"], repeats) if repeats else None
        self.noise: Noise | None = None
        self.scaled: list[LossScale] = []
        self.aside: list[SetAside] = []

    def write(self) -> None:
        """Make `judged_<table>`, and `differing_<table>`, of what is kept of the pairs of the steps that are open.

        What grows over steps is measured in the open ones: a step's own parameters say how far it has drifted, so that
        no step before it is needed but for the gradients that an adaptive optimizer remembers.
        """
        self.aside = []
        filled = self._filled()
        self.rule = self._rule(filled)
        self.scaled = divide_out_loss_scales(self._connection)
        derived(HERE, "shapes").make(self._connection, first_step=self._first_step)
        derived(HERE, "seen_noise").make(self._connection)
        derived(HERE, "growth").make(self._connection, here=within(opened_places(self._connection)))
        self._write_rounding()
        write_arriving(self._connection)
        write_kinks(self._connection)
        write_unsteady(self._connection)
        write_usual_gain(self._connection)
        write_steady(self._connection)
        if self._repeats is not None:
            self.noise = self._repeats.measure(self._connection, self._scale)
        # Parameters come first: what one table's judgement asks of another's pairs is in tables of its own by then.
        forget_left_out(self._connection)
        for table in LINK_TABLES:
            judged = self._judged(table, is_filled=table.table in filled)
            make_judged(self._connection, table, judged)
            self._connection.execute(f"DROP TABLE paired_{table.table}")

    def set_aside(self, *, known: bool) -> None:
        """Take out rows of one side alone that change nothing: of `known` kinds, or any."""
        if not self._exact:
            self.aside += set_aside(self._connection, known_only=known)

    def lower_bound(self) -> LowerBound:
        """The smallest tolerances that the rule can give: what is larger may exceed, once its step is open."""
        if self._repeats is not None:
            return LowerBound()
        layers, summands = self._sizes
        units = [
            roundoff(dtype)
            for side in SIDES
            for (dtype,) in self._connection.execute(
                f"SELECT DISTINCT output_dtype FROM {side}.module_calls WHERE step = (SELECT min(step) FROM common)"
            ).fetchall()
        ]
        finest = min(filter(None, units), default=FINEST)
        return LowerBound(self._scale, summands, layers, finest, is_plain(self._connection))

    def pair_repeats(self, *, is_arranged: bool, new_names: Mapping[str, str]) -> None:
        """Have repeats paired as the comparison pairs: by stage, or under the candidate's names."""
        if self._repeats is not None:
            self._repeats.is_arranged = is_arranged
            self._repeats.new_names = new_names

    def close(self) -> None:
        """Close the connections to repeats of the baseline. May be called more than once."""
        if self._repeats is not None:
            self._repeats.close()

    @cached_property
    def _first_step(self) -> int:
        """The baseline's first step with parameters, -1 where it has none."""
        row = self._connection.execute("SELECT min(step) FROM baseline.parameters").fetchone()
        return -1 if row is None or row[0] is None else int(row[0])

    def _filled(self) -> set[str]:
        """The tables of which any row differs: the others need no judgement."""
        union = " UNION ALL ".join(
            f"(SELECT '{t.table}' FROM kept_{t.table} LIMIT 1)" for t in LINK_TABLES
        )
        return {table for (table,) in self._connection.execute(union).fetchall()}

    def _rule(self, filled: Collection[str]) -> Rule:
        dtypes = self._dtypes(filled)
        coarsest = max(dtypes, key=roundoff, default="float32")
        unit, arithmetic = roundoff(coarsest), coarsest
        if self._declared and PRECISIONS[self._declared] > unit:
            unit, arithmetic = PRECISIONS[self._declared], f"products in {self._declared}"
        layers, summands = self._sizes
        return Rule(unit, arithmetic, summands, layers)

    @cached_property
    def _sizes(self) -> tuple[int, int]:
        """(modules with parameters of their own, terms of the longest sum that a product adds up), both of the first
        step.
        """
        row = self._connection.execute(
            "WITH owners AS (SELECT DISTINCT root, parameter_fqn, "
            "owner_of(parameter_fqn) AS owner, numel, shape FROM baseline.parameters "
            "WHERE kind = 'parameter' AND point = 'before' "
            f"AND step = {self._first_step}) "
            "SELECT (SELECT count(DISTINCT (root, owner)) FROM owners), "
            "(SELECT max(numel // greatest(shape[1], 1)) FROM owners WHERE len(shape) > 1), "
            "(SELECT max(m.output_numel // greatest(o.shape[1], 1)) FROM baseline.module_calls m JOIN owners o "
            "ON o.root = m.root AND o.owner = m.module_fqn "
            "WHERE m.step = (SELECT min(step) FROM common) AND len(o.shape) > 1)"
        ).fetchone()
        layers, inner, outer = row or (0, 0, 0)
        return max(layers or 0, 1), max(inner or 1, outer or 1)

    def _dtypes(self, filled: Collection[str]) -> list[str]:
        selects = [
            f"SELECT {role}_{side}_dtype AS dtype FROM kept_{table.table} WHERE {role}_differs"
            for table in LINK_TABLES
            if table.table in filled
            for role, _ in table.sides
            for side in "bc"
        ]
        union = " UNION ".join(["SELECT NULL AS dtype", *selects])
        found = self._connection.execute(f"SELECT dtype FROM ({union}) WHERE dtype IS NOT NULL")
        return sorted(dtype for (dtype,) in found.fetchall())

    def _write_rounding(self) -> None:
        """`rounding`: what the rule allows from a place of a rank's step on, by the arithmetic used so far."""
        declared = PRECISIONS[self._declared] if self._declared else 0.0
        rows: list[tuple[object, ...]] = []
        last: tuple[int, int] | None = None
        unit = 0.0
        for rank, step, new, place in self._units():
            if (rank, step) != last:
                last, unit = (rank, step), max(declared, FINEST)
            elif new <= unit:
                continue
            else:
                rows[-1] = (*rows[-1][:3], place, *rows[-1][4:])
            unit = max(unit, new)
            rule = Rule(unit, "", self.rule.summands, self.rule.layers)
            start = -1 if not rows or rows[-1][:2] != (rank, step) else place
            numbers = [
                self._scale * x
                for x in (rule.forward(), rule.backward(), rule.norm(), rule.layer())
            ]
            rows.append((rank, step, start, 2**62, unit, *numbers))
        columns = [list(column) for column in zip(*rows, strict=True)] or [[]] * 9
        derived(HERE, "rounding").make(self._connection, columns)

    def _units(self) -> list[tuple[int, int, float, float]]:
        """(rank, step, unit of roundoff, the first place that shows it), in order of place within each rank's step."""
        parts = [
            f"SELECT rank, step, place, greatest(roundoff({role}_b_dtype), "
            f"roundoff({role}_c_dtype)) AS unit FROM kept_{table.table} WHERE {role}_differs"
            for table in LINK_TABLES
            if table.table != "parameters"  # what they are kept in is given, not computed
            for role, _ in table.sides
        ]
        # A module may compute in a format that neither comes in nor goes out: its Nodes' gradients are in it.
        parts.append(
            "SELECT m.rank, m.step, m.place, greatest(roundoff(n.writes_b_dtype), "
            "roundoff(n.writes_c_dtype)) AS unit FROM kept_module_calls m JOIN kept_node_events n "
            "ON n.rank = m.rank AND n.step = m.step AND n.key_root = m.key_root "
            "AND n.key_module_fqn = m.key_module_fqn AND n.key_call_index = m.key_call_index "
            "AND n.key_microbatch = m.key_microbatch "
            "WHERE m.writes_differs AND m.key_phase = 'forward' AND n.writes_differs AND n.only_in IS NULL"
        )
        return self._connection.execute(
            "SELECT rank, step, unit, min(place) FROM "
            f"({' UNION ALL '.join(parts)}) WHERE unit > 0 GROUP BY ALL ORDER BY rank, step, min(place)"
        ).fetchall()

    def _judged(self, table: LinkTable, *, is_filled: bool) -> str:
        """The query of the rows of `differing_<table>`: by the rule, by noise where it was measured, by steadiness."""
        ruled = self._ruled(table) if is_filled else as_given(table)
        has_noise = self.noise is not None and not self.noise.is_zero
        if is_filled and has_noise and table in MEASURED:
            judged = judged_by_noise(ruled, table)
        else:
            judged = f"SELECT *, NULL::VARCHAR AS noise FROM ({ruled})"
        if table.table == "node_events" and is_filled:
            steady = expression("steady_factors", self._without)
            judged = derived(HERE, "judged_steady").rows(judged=judged, steady=steady)
        return judged

    def _ruled(self, table: LinkTable) -> str:
        """The query of the rows of a table that the rule has judged."""
        rule_forward = f"{self._scale * self.rule.forward()!r}::DOUBLE"
        if table.table == "parameters":
            return judged_parameters(
                self._connection,
                scale=self._scale,
                rule_forward=rule_forward,
                is_step_alone=self._is_step_alone,
                without=self._without,
            )
        if table.table == "inputs":
            return judged_inputs(without=self._without)
        if table.table == "backward_passes":
            return derived(HERE, "judged_losses").rows(
                rule_forward=rule_forward,
                scale=f"{self._scale!r}::DOUBLE",
                drift=expression("drift_backward", self._without),
            )
        if not table.sides:
            return as_given(table)
        return judged_links(
            table, scale=self._scale, layers=self.rule.layers, without=self._without
        )


def _switched_on(run: Run) -> str | None:
    """The precision of products in float32 that a job's switch asks for, where it is less."""
    for info in run.ranks.values():
        chosen = (info.facts.get("environment") or {}).get("float32_matmul_precision")
        return {"high": "tf32", "medium": "bf16"}.get(str(chosen))
    return None


def _has_device(run: Run) -> bool:
    return any((info.facts.get("device") or "cpu") != "cpu" for info in run.ranks.values())
