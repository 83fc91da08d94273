"""What a legal change of the code leaves behind: rows of one side alone, and gradients scaled for a while.

Casts of mixed precision, forwards that are recomputed, Nodes that a compiler fused, an optimizer's other kernel: where
what the optimizer saw agrees, they are set aside, so that the comparison goes on around them. They are counted and
named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import duckdb

from gradtrace_analyzer.diff.pairing.pairs import leave_out, opened_places, within
from gradtrace_analyzer.numerics.sketches import relative_error_sql
from gradtrace_analyzer.words.nouns import SIDES
from gradtrace_analyzer.words.numbers import counted

# Nodes that exist to convert between dtypes, which is what mixed precision is.
_CASTS = "('ToCopyBackward0')"

# What is left of a ratio that is a power of two where nothing but the scale differs: the rounding of norms.
_EXACTLY = 1e-5

# By rank, whether the losses of the first step that has any differ by a power of two, within what other arithmetic
# makes of the same parameters.
_FROM_FIRST = """
SELECT rank, CASE WHEN ratio > 0 THEN
    round(log2(ratio)) <> 0 AND abs(ratio / 2.0 ** round(log2(ratio)) - 1) < 0.02 END AS is_scaled
FROM (SELECT rank, median(c.loss / nullif(b.loss, 0)) AS ratio FROM baseline.backward_passes b
    JOIN candidate.backward_passes c USING (rank, step, backward_index)
    WHERE b.kind = 'backward' AND c.kind = 'backward' AND isfinite(b.loss) AND isfinite(c.loss)
    GROUP BY rank, step QUALIFY row_number() OVER (PARTITION BY rank ORDER BY step) = 1)
"""

# By rank, the first step that a scaler is known to have skipped, on either side.
_AFTER_SKIP = """
SELECT rank, min(step) AS skipped
FROM (FROM baseline.steps UNION ALL BY NAME FROM candidate.steps) WHERE skipped GROUP BY rank
"""

_GRADIENT_TABLES = {
    "node_events": ("reads", "writes"),
    "gradients": ("writes",),
    "buckets": ("reads", "writes"),
}


@dataclass(frozen=True)
class SetAside:
    """Rows that one side alone has and that change nothing: `count` of this kind and name, from `first_step` on."""

    kind: str
    name: str
    only_in: str
    count: int
    first_step: int


@dataclass(frozen=True)
class LossScale:
    """Steps in which the candidate's loss and gradients are `factor` times the baseline's until they are unscaled."""

    factor: float
    first_step: int
    step_count: int


def divide_out_loss_scales(connection: duckdb.DuckDBPyConnection) -> list[LossScale]:
    """Divide the candidate's rows by a loss scale, where one was taken back before the optimizer saw the gradients.

    A loss scale is a power of two, by which the loss of each pass differs, and by which the accumulated gradients
    differ more than the final ones do (in the median over the parameters: a fault changes both). Where no optimizer was
    recorded to have seen the gradients nothing tells a scale from a fault.

    Once runs have parted a loss may be about four times the other's by chance, and clipping then takes the gradients
    back. So the losses must differ by a power of two from the first step on, where the parameters are still the same;
    or exactly; or after a step that a scaler is known to have skipped.
    """
    if not _any(connection, "paired_backward_passes"):
        return []
    # A step that a scaler skips has none, where others have.
    if not all(_any(connection, f"{side}.gradients WHERE point = 'final'") for side in SIDES):
        return []
    ratio = "writes_c_norm / nullif(writes_b_norm, 0)"
    finite = "(coalesce(writes_c_nan_count, 0) + coalesce(writes_c_inf_count, 0) = 0)"
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE scaling AS WITH losses AS ("
        "SELECT rank, step, list(value_c_loss / nullif(value_b_loss, 0)) AS ratios FROM paired_backward_passes "
        "WHERE only_in IS NULL AND key_kind = 'backward' GROUP BY ALL), "
        "rounded AS (SELECT *, CASE WHEN list_min(ratios) > 0 THEN 2.0 ** round(log2(list_median(ratios))) END "
        "AS factor FROM losses), "
        "powers AS (SELECT rank, step, factor, list_max([abs(r / factor - 1) FOR r IN ratios]) < "
        f"{_EXACTLY} AS is_exact FROM rounded "
        "WHERE factor <> 1 AND list_max([abs(r / factor - 1) FOR r IN ratios]) < 0.1), "
        f"from_first AS ({_FROM_FIRST}), after_skip AS ({_AFTER_SKIP}), "
        f"points AS (SELECT rank, step, median({ratio}) FILTER (key_point = 'local' AND {finite}) AS local, "
        f"coalesce(bool_or(key_point = 'local' AND NOT {finite}), false) AS is_spoilt, "
        f"coalesce(median({ratio}) FILTER (key_point = 'final'), 1) AS final "
        "FROM paired_gradients WHERE only_in IS NULL GROUP BY ALL) "
        "SELECT rank, step, factor FROM powers JOIN points USING (rank, step) "
        "LEFT JOIN from_first USING (rank) LEFT JOIN after_skip USING (rank) "
        f"WHERE (is_scaled OR skipped <= step OR (is_exact AND abs(local / factor - 1) < {_EXACTLY})) "
        # Where a fault left no finite gradient nothing tells, but that losses are no powers of two by themselves.
        "AND coalesce(local = 0 OR abs(local / factor / nullif(final, 0) - 1) < 0.2, is_spoilt)"
    )
    found = connection.execute(
        "SELECT factor, min(step), count(DISTINCT step) FROM scaling GROUP BY ALL ORDER BY 2"
    ).fetchall()
    if not found:
        return []
    for table, roles in _GRADIENT_TABLES.items():
        points = " AND d.key_point <> 'final'" * (table == "gradients")
        for role in roles:
            c = f"{role}_c_"
            divided = ", ".join(f"{c}{s} = d.{c}{s} / f.factor" for s in ("norm", "abs_max", "sum"))
            connection.execute(
                f"UPDATE paired_{table} d SET {divided}, {c}sketch = "
                f"[(x / f.factor)::FLOAT FOR x IN d.{c}sketch] FROM scaling f "
                f"WHERE f.rank = d.rank AND f.step = d.step{points}"
            )
            connection.execute(
                f"UPDATE paired_{table} d SET {role}_error = {relative_error_sql(f'd.{role}_b_', f'd.{c}')} "
                "FROM scaling f WHERE f.rank = d.rank "
                f"AND f.step = d.step AND d.{role}_error IS NOT NULL{points}"
            )
        errors = ", ".join(f"CASE WHEN {role}_differs THEN {role}_error END" for role in roles)
        connection.execute(f"UPDATE paired_{table} SET error = greatest({errors}, NULL)")
    connection.execute(
        "UPDATE paired_backward_passes d SET value_c_loss = d.value_c_loss / f.factor, "
        "error = abs(d.value_c_loss / f.factor - d.value_b_loss) / greatest(abs(d.value_b_loss), 1e-300) "
        "FROM scaling f WHERE f.rank = d.rank AND f.step = d.step"
    )
    return [LossScale(*row) for row in found]


def set_aside(connection: duckdb.DuckDBPyConnection, *, known_only: bool = False) -> list[SetAside]:
    """Leave rows of one side alone out of `differing_*` where they change nothing; the judgement must be written.

    They do not where all gradients that the optimizer saw pair and agree in that step; where the same row is
    alone in such a step; and where they are casts or recomputed forwards (`known_only`: these alone), or lie in a
    module of which the other side runs compiled code in that step.
    """
    lone = [
        t
        for t in ("node_events", "module_calls")
        if _any(connection, f"differing_{t} WHERE only_in IS NOT NULL")
    ]
    here = within(opened_places(connection)) if lone else "false"
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE anchored AS SELECT DISTINCT rank, step FROM baseline.gradients t "
        f"SEMI JOIN opened USING (rank, step) WHERE point = 'final' AND {here} EXCEPT "
        "(SELECT rank, step FROM differing_gradients WHERE key_point = 'final' AND (beyond OR only_in IS NOT NULL) "
        "UNION SELECT rank, step FROM differing_backward_passes WHERE beyond OR only_in IS NOT NULL "
        "UNION SELECT rank, step FROM differing_parameters WHERE only_in IS NOT NULL)"
    )
    found: list[SetAside] = []
    for table, key, name in (
        ("node_events", ("root", "module_fqn", "node_name"), "key_node_name"),
        ("module_calls", ("root", "module_fqn", "phase"), "key_module_fqn"),
    ):
        same = " AND ".join(f"o.key_{k} IS NOT DISTINCT FROM d.key_{k}" for k in key)
        known = (
            f"d.key_node_name IN {_CASTS}"
            if table == "node_events"
            else "d.key_phase = 'recompute' AND EXISTS (SELECT 1 FROM baseline.module_calls m WHERE m.rank = d.rank "
            "AND m.step = d.step AND m.root = d.key_root AND m.module_fqn = d.key_module_fqn)"
        )
        condition = (
            "d.only_in IS NOT NULL AND (EXISTS (SELECT 1 FROM anchored a WHERE a.rank = d.rank AND a.step = d.step) "
            f"OR {known} OR EXISTS (SELECT 1 FROM differing_{table} o SEMI JOIN anchored USING (rank, step) "
            f"WHERE o.only_in = d.only_in AND {same}) OR {_in_compiled()})"
        )
        if known_only:
            condition = f"d.only_in IS NOT NULL AND ({known})"
        if table not in lone:
            continue
        found += [
            SetAside({"node_events": "node", "module_calls": "call"}[table], *row)
            for row in connection.execute(
                f"SELECT {name}, only_in, count(*), min(step) FROM differing_{table} d WHERE {condition} "
                "GROUP BY ALL ORDER BY count(*) DESC, 1"
            ).fetchall()
        ]
        leave_out(connection, table, "it changes nothing", condition)
    # A group whose only difference is the kernel that computes its update.
    kernels = connection.execute(
        "SELECT count(*), min(step) FROM differing_optimizer_groups WHERE NOT exceeds"
    ).fetchone()
    if kernels is not None and kernels[0]:
        found.append(SetAside("optimizer kernel", "fused or foreach", "both", *kernels))
        leave_out(
            connection, "optimizer_groups", "another kernel of the same update", "NOT exceeds"
        )
    return found


def _any(connection: duckdb.DuckDBPyConnection, rows: str) -> bool:
    return connection.execute(f"SELECT 1 FROM {rows} LIMIT 1").fetchone() is not None


def _in_compiled() -> str:
    """A condition: the other side's backward pass of the row's module, or of one around it, is one compiled Node."""
    return " OR ".join(
        f"(d.only_in = '{side}' AND EXISTS (SELECT 1 FROM {other}.node_events n WHERE n.rank = d.rank "
        "AND n.step = d.step AND n.node_name LIKE 'CompiledFunction%' AND (coalesce(n.module_fqn, '') = '' "
        "OR d.key_module_fqn = n.module_fqn OR starts_with(d.key_module_fqn, n.module_fqn || '.'))))"
        for side, other in (SIDES, SIDES[::-1])
    )


def aside_sentence(found: Sequence[SetAside], *, sees_optimizer: bool = True) -> str:
    """What was set aside, in one sentence: how many of which Nodes and calls on which side. Empty for none.

    `sees_optimizer`: both sides recorded the gradients that the optimizer saw.
    """
    said = []
    for kind, one in (("node", "Node"), ("call", "module call")):
        for side in SIDES:
            mine = [a for a in found if (a.kind, a.only_in) == (kind, side)]
            if mine:
                named = ", ".join(a.name or "the root" for a in mine[:3])
                more = ", ..." if len(mine) > 3 else ""
                count = sum(a.count for a in mine)
                said.append(f"{counted(count, one)} in the {side} ({named}{more})")
    effect = ", without effect on what the optimizer saw" if sees_optimizer else " and set aside"
    alone = f"On one side alone{effect}: {'; '.join(said)}."
    return (alone if said else "") + (
        f"{' ' * bool(said)}The optimizer computes its update with another kernel (fused, foreach)."
        if any(a.kind == "optimizer kernel" for a in found)
        else ""
    )
