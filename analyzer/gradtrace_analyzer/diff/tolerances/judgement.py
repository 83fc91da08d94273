"""Holds each pair that differs against its tolerance: the columns `tolerance`, `beyond`, `exceeds` of `differing_*`.

A row is `beyond` when its estimated error is larger than its tolerance: that places an origin. It `exceeds` when the
estimate is so much larger that the verdict may rest on it (`DECISIVE`: an estimate from 4 lanes has a standard error
of 0.37). What a step is allowed grows with what it received: the parameters' measured difference, never its number.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

import duckdb

from gradtrace_analyzer.diff.code.legal_changes import (
    LossScale,
    SetAside,
    divide_out_loss_scales,
    set_aside,
)
from gradtrace_analyzer.diff.links import LINK_TABLES, LinkTable
from gradtrace_analyzer.diff.tolerances.amplification import (
    write_arriving,
    write_kinks,
    write_unsteady,
)
from gradtrace_analyzer.diff.tolerances.lengths import (
    GAIN,
    MANY,
    SEEN_GAINS,
    mark_steady_factors,
    write_usual_gain,
)
from gradtrace_analyzer.diff.tolerances.noise import Noise, RepeatRuns
from gradtrace_analyzer.diff.tolerances.updates import is_plain, judge_given, judge_updates
from gradtrace_analyzer.numerics.tolerance import (
    DECISIVE,
    FINEST,
    GROWTH,
    NOISE_FLOOR,
    PRECISIONS,
    SEEN,
    LowerBound,
    Rule,
    roundoff,
)
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.words.nouns import SIDES
from gradtrace_schemas.table import NODE_SKETCH_LANES, SKETCH_LANES


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
    ) -> None:
        """With `exact` nothing is set aside. `repeats` are repeats of the baseline, from which noise is measured.

        `precision` is that of the matrix products on one side, where nothing recorded tells it; `scale` multiplies
        every tolerance of the rule (to measure how sharp it is).
        """
        self._connection = connection
        self._scale = scale
        self._exact = exact
        self._is_step_alone = is_step_alone
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
        """Add the columns and fill them, in the tables of the steps that are open.

        What grows over steps is measured in the open ones: a step's own parameters say how far it has drifted, so that
        no step before it is needed but for the gradients that an adaptive optimizer remembers.
        """
        self.aside = []
        filled = self._filled()
        self.rule = self._rule(filled)
        for table in LINK_TABLES:
            name = f"differing_{table.table}"
            for role, _ in table.sides:
                self._connection.execute(f"ALTER TABLE {name} ADD COLUMN {role}_tolerance DOUBLE")
            self._connection.execute(
                f"ALTER TABLE {name} ADD COLUMN noise VARCHAR; ALTER TABLE {name} ADD COLUMN shown_by VARCHAR;"
                f"ALTER TABLE {name} ADD COLUMN given BOOLEAN; ALTER TABLE {name} ADD COLUMN beyond BOOLEAN;"
                # What is no summary (a setting, a row of one side) has no tolerance: it counts as it is.
                f"UPDATE {name} SET given = exceeds, beyond = exceeds"
            )
        self.scaled = divide_out_loss_scales(self._connection)
        self._shapes()
        self._growth()
        self._rounding()
        write_arriving(self._connection)
        write_kinks(self._connection)
        write_unsteady(self._connection)
        write_usual_gain(self._connection)
        for table in LINK_TABLES:
            if table.table in filled:
                self._judge(table)
        self._judge_losses()
        if "parameters" in filled:
            judge_updates(self._connection, self._scale)
        if filled & {"parameters", "inputs"}:
            judge_given(self._connection, self.rule, self._scale, is_step_alone=self._is_step_alone)
        if self._repeats is not None:
            self.noise = self._repeats.measure(self._connection, self._scale)
        mark_steady_factors(self._connection)

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
            f"(SELECT '{t.table}' FROM differing_{t.table} LIMIT 1)" for t in LINK_TABLES
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
            f"SELECT {role}_{side}_dtype AS dtype FROM differing_{table.table} WHERE {role}_differs"
            for table in LINK_TABLES
            if table.table in filled
            for role, _ in table.sides
            for side in "bc"
        ]
        union = " UNION ".join(["SELECT NULL AS dtype", *selects])
        found = self._connection.execute(f"SELECT dtype FROM ({union}) WHERE dtype IS NOT NULL")
        return sorted(dtype for (dtype,) in found.fetchall())

    def _rounding(self) -> None:
        """`rounding`: what the rule allows from a place of a rank's step on, by the arithmetic used so far."""
        parts = [
            f"SELECT rank, step, place, greatest(roundoff({role}_b_dtype), "
            f"roundoff({role}_c_dtype)) AS unit FROM differing_{table.table} WHERE {role}_differs"
            for table in LINK_TABLES
            if table.table
            in ("inputs", "module_calls", "node_events", "gradients", "buckets", "stage_events")
            for role, _ in table.sides
        ]
        # A module may compute in a format that neither comes in nor goes out: its Nodes' gradients are in it.
        parts.append(
            "SELECT m.rank, m.step, m.place, greatest(roundoff(n.writes_b_dtype), "
            "roundoff(n.writes_c_dtype)) AS unit FROM differing_module_calls m JOIN differing_node_events n "
            "ON n.rank = m.rank AND n.step = m.step AND n.key_root = m.key_root "
            "AND n.key_module_fqn = m.key_module_fqn AND n.key_call_index = m.key_call_index "
            "AND n.key_microbatch = m.key_microbatch "
            "WHERE m.writes_differs AND m.key_phase = 'forward' AND n.writes_differs AND n.only_in IS NULL"
        )
        firsts = self._connection.execute(
            "SELECT rank, step, unit, min(place) FROM "
            f"({' UNION ALL '.join(parts)}) WHERE unit > 0 GROUP BY ALL ORDER BY rank, step, min(place)"
        ).fetchall()
        declared = PRECISIONS[self._declared] if self._declared else 0.0
        rows: list[tuple[object, ...]] = []
        last: tuple[int, int] | None = None
        unit = 0.0
        for rank, step, new, place in firsts:
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
        self._connection.execute(
            "CREATE OR REPLACE TEMP TABLE rounding (rank INT, step BIGINT, start DOUBLE, until DOUBLE, "
            "unit DOUBLE, forward DOUBLE, backward DOUBLE, norm DOUBLE, layer DOUBLE)"
        )
        if rows:
            self._connection.executemany("INSERT INTO rounding VALUES (?,?,?,?,?,?,?,?,?)", rows)

    def _growth(self) -> None:
        """`growth`: by how much the parameters of a rank's step differ before it, and how much its forward then does.

        What a buffer holds is no drift of what is trained.

        The parameters' is the largest of any module, whose parameters are taken together; the forward's is the larger
        of the root's output and the median of all modules.
        """
        self._connection.execute(
            "CREATE OR REPLACE TEMP TABLE seen_noise AS SELECT rank, step, greatest(median(writes_error), "
            "max(writes_error) FILTER (key_module_fqn = '')) AS change FROM differing_module_calls "
            "WHERE only_in IS NULL AND writes_differs AND key_phase = 'forward' AND writes_error > 0 GROUP BY ALL"
        )
        self._connection.execute(
            "CREATE OR REPLACE TEMP TABLE growth AS WITH modules AS ("
            "SELECT rank, step, key_root, owner_of(key_parameter_fqn) AS owner, "
            "sqrt(sum((writes_error * greatest(writes_b_norm, writes_c_norm)) ** 2) "
            "/ nullif(sum(greatest(writes_b_norm, writes_c_norm) ** 2), 0)) AS change "
            "FROM differing_parameters d WHERE key_point = 'before' AND only_in IS NULL AND NOT EXISTS "
            "(SELECT 1 FROM shapes s WHERE s.root = d.key_root AND s.parameter_fqn = d.key_parameter_fqn "
            "AND s.is_buffer) GROUP BY ALL), "
            "received AS (SELECT rank, step, max(change) AS change FROM modules GROUP BY ALL) "
            "SELECT r.rank, r.step, r.change AS weights, coalesce(f.change, 0) AS forward "
            "FROM received r LEFT JOIN seen_noise f USING (rank, step)"
        )

    def _judge(self, table: LinkTable) -> None:
        if not table.sides or table.table in ("parameters", "inputs"):
            return
        name = f"differing_{table.table}"
        is_forward = table.table == "module_calls"
        base = "r.forward" if is_forward else "r.backward"
        growth = (
            f"{GROWTH} * ((1 + coalesce(g.weights, 0)) ** {self.rule.layers} - 1)"
            if is_forward
            else "(coalesce(f.extra, 0) + coalesce(u.extra, 0))"
        )
        amplified = "1" if is_forward else "coalesce(k.times, 1)"
        rounding = base
        if not is_forward:
            rounding = (
                f"least({base} + {self._scale * GROWTH} * coalesce(g.forward, 0), "
                f"coalesce(r.layer + {self._scale * SEEN} * w.change, 1e9))"
            )
        tolerance = f"({rounding} + {self._scale} * {growth}) * {amplified}"
        lengthening = (
            growth
            if is_forward
            else f"({GROWTH} * coalesce(g.forward, 0) + coalesce(f.extra, 0) ** 2 + coalesce(u.extra, 0))"
        )
        if table.table in SEEN_GAINS:
            lengthening = f"least({lengthening}, coalesce({SEEN_GAINS[table.table]} * q.gain, 1e9))"
        norm_tolerance = f"(r.norm + {self._scale} * {lengthening}) * {amplified}"
        joins = (
            f"FROM {name} d LEFT JOIN rounding r ON r.rank = d.rank AND r.step = d.step AND r.start <= d.place "
            "AND d.place < r.until LEFT JOIN growth g ON g.rank = d.rank AND g.step = d.step "
            "LEFT JOIN cancelling k ON k.rank = d.rank AND k.step = d.step AND k.place <= d.place AND "
            "d.place < k.until "
            "LEFT JOIN seen_noise w ON w.rank = d.rank AND w.step = d.step "
            f"LEFT JOIN usual_gain q ON q.rank = d.rank AND q.step = d.step AND q.link_table = '{table.table}' "
            "LEFT JOIN kinked f ON f.rank = d.rank AND f.step = d.step AND f.place <= d.place AND d.place < f.until "
            "LEFT JOIN unsteady u ON u.rank = d.rank AND u.step = d.step AND u.place <= d.place AND d.place < u.until"
        )
        cancelled = {role: "1" for role, _ in table.sides}
        if table.table in ("gradients", "node_events"):
            joins += (
                " LEFT JOIN arriving a ON a.rank = d.rank AND a.step = d.step AND a.root IS NOT DISTINCT FROM "
                "d.key_root AND a.module_fqn = owner_of(d.key_parameter_fqn) LEFT JOIN shapes s ON s.root = d.key_root "
                "AND s.parameter_fqn = d.key_parameter_fqn LEFT JOIN (SELECT rank, step, max(norm) AS norm "
                "FROM arriving GROUP BY ALL) l ON l.rank = d.rank AND l.step = d.step"
            )
            for role, _ in table.sides:
                own = f"greatest(d.{role}_b_norm, d.{role}_c_norm)"
                floor = (
                    f"greatest(CASE WHEN s.is_flat THEN a.norm ELSE 0 END, {NOISE_FLOOR} * l.norm)"
                )
                cancelled[role] = f"least(1, coalesce({own} / nullif({floor}, 0), 1))"
        beyond, exceeds, sets = [], [], []
        lengthened = "false"
        for role, _ in table.sides:
            error, share = f"(d.{role}_error * {cancelled[role]})", f"({tolerance})"
            lanes = f"len(d.{role}_c_sketch)"
            decisive = (
                f"CASE {lanes} WHEN {NODE_SKETCH_LANES} THEN {DECISIVE[NODE_SKETCH_LANES]} "
                f"WHEN {SKETCH_LANES} THEN {DECISIVE[SKETCH_LANES]} ELSE 1 END"
            )
            sets.append(f"{tolerance} / {cancelled[role]} AS {role}_tolerance")
            beyond.append(f"(d.{role}_differs AND coalesce({error} > {share}, true))")
            exceeds.append(f"(d.{role}_differs AND coalesce({error} > {share} * {decisive}, true))")
        if len(table.sides) == 2:
            seen = f"{GAIN} * {cancelled['writes']} > {norm_tolerance}"
            lengthened = f"coalesce(d.writes_differs AND {MANY} AND {seen}, false)"
            beyond.append(lengthened)
            exceeds.append(lengthened)
        self._connection.execute(
            f"CREATE OR REPLACE TEMP TABLE judged AS SELECT d.rowid AS id, {', '.join(sets)}, "
            f"({' OR '.join(beyond)}) AS is_beyond, ({' OR '.join(exceeds)}) AS is_decisive, "
            f"{lengthened} AND NOT ({' OR '.join(exceeds[: len(table.sides)])}) AS is_longer, {norm_tolerance} AS "
            f"length_tolerance {joins}"
        )
        columns = ", ".join(f"{role}_tolerance = j.{role}_tolerance" for role, _ in table.sides)
        self._connection.execute(
            f"UPDATE {name} d SET {columns}, beyond = d.exceeds OR j.is_beyond, "
            "exceeds = d.exceeds OR j.is_decisive FROM judged j WHERE j.id = d.rowid"
        )
        # Where its length alone tells, it is held against what lengths may do.
        if len(table.sides) == 2:
            self._connection.execute(
                f"UPDATE {name} d SET shown_by = 'length', writes_tolerance = j.length_tolerance FROM judged j "
                "WHERE j.id = d.rowid AND j.is_longer"
            )

    def _shapes(self) -> None:
        self._connection.execute(
            "CREATE OR REPLACE TEMP TABLE shapes AS SELECT root, parameter_fqn, "
            "bool_or(len(shape) < 2) AS is_flat, bool_or(kind = 'buffer') AS is_buffer FROM baseline.parameters "
            f"WHERE step = {self._first_step} GROUP BY ALL"
        )

    def _judge_losses(self) -> None:
        """A loss is one number, made from the last output."""
        self._connection.execute(
            "CREATE OR REPLACE TEMP TABLE judged AS SELECT d.rowid AS id, coalesce(abs(value_b_loss - value_c_loss) > "
            "greatest(abs(value_b_loss), abs(value_c_loss)) * "
            f"(coalesce(r.forward, {self._scale * self.rule.forward()!r}::DOUBLE) "
            f"+ {self._scale * GROWTH} * coalesce(g.forward, 0)) OR isnan(value_b_loss) <> isnan(value_c_loss), "
            "value_b_loss IS DISTINCT FROM value_c_loss) AS apart FROM differing_backward_passes d "
            "LEFT JOIN rounding r ON r.rank = d.rank AND r.step = d.step AND r.start <= d.place AND d.place < r.until "
            "LEFT JOIN growth g ON g.rank = d.rank AND g.step = d.step"
        )
        self._connection.execute(
            "UPDATE differing_backward_passes d SET exceeds = d.exceeds OR j.apart, beyond = d.exceeds OR j.apart "
            "FROM judged j WHERE j.id = d.rowid"
        )


def _switched_on(run: Run) -> str | None:
    """The precision of products in float32 that a job's switch asks for, where it is less."""
    for info in run.ranks.values():
        chosen = (info.facts.get("environment") or {}).get("float32_matmul_precision")
        return {"high": "tf32", "medium": "bf16"}.get(str(chosen))
    return None


def _has_device(run: Run) -> bool:
    return any((info.facts.get("device") or "cpu") != "cpu" for info in run.ranks.values())
