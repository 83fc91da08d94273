"""Judges what is no output of the chain: parameters after the optimizer; inputs and parameters that a step is given."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import duckdb

from gradtrace_analyzer.diff.pairing.pairs import opened_places, within
from gradtrace_analyzer.diff.tolerances.allowances import expression
from gradtrace_analyzer.numerics.model import MODEL
from gradtrace_analyzer.sql.derived import derived
from gradtrace_analyzer.words.nouns import SIDES

HERE = Path(__file__).parent


def judged_parameters(
    connection: duckdb.DuckDBPyConnection,
    *,
    scale: float,
    rule_forward: str,
    is_step_alone: bool,
    without: Collection[str] = (),
) -> str:
    """The query of the judged rows of `parameters`; the tables that it reads are made. `rule_forward` is what the rule
    allows an output, times the scale, as SQL.

    Plain SGD passes a gradient's error on. An adaptive optimizer makes a whole step of the sign of a gradient that is
    all rounding: of flat parameters (a bias in front of a softmax) any share may be, so they are not judged there.
    Where a step is compared alone what it was given is not judged in the step before it: it counts here.
    """
    _write_update_sizes(connection)
    _write_handed_on(connection, is_step_alone=is_step_alone)
    derived(HERE, "gradient_errors").make(connection)
    share = (
        f"CASE WHEN coalesce(e.error, 0) = 0 THEN {MODEL.updated} "
        f"WHEN {str(is_plain(connection)).lower()} THEN share_in_proportion(e.error) "
        f"ELSE coalesce({expression('flat_updates', without)}, {expression('turned_signs', without)}) END"
    )
    return derived(HERE, "judged_parameters").rows(
        scale=f"{scale!r}::DOUBLE",
        share=share,
        carried=expression("carried_differences", without),
        statistics=expression("wider_statistics", without, rule_forward=rule_forward),
        drifted=expression("drifted_statistics", without),
        once=expression("rounded_once", without),
    )


def judged_inputs(*, without: Collection[str] = ()) -> str:
    """The query of the judged rows of `inputs`."""
    return derived(HERE, "judged_inputs").rows(once=expression("rounded_once", without))


def is_plain(connection: duckdb.DuckDBPyConnection) -> bool:
    """Whether all optimizers pass a gradient on in proportion."""
    row = connection.execute(
        "SELECT coalesce(bool_and(optimizer_class IN ('SGD', 'ASGD')), false) FROM baseline.optimizer_groups"
    ).fetchone()
    return bool(row is not None and row[0])


def _write_update_sizes(connection: duckdb.DuckDBPyConnection) -> None:
    places = opened_places(connection)
    updates = " UNION ALL ".join(
        "SELECT b.rank, b.step, b.root, b.parameter_fqn, sketch_distance(b.sketch, a.sketch) "
        f"AS size FROM {side}.parameters b JOIN {side}.parameters a USING (rank, step, root, parameter_fqn) "
        "SEMI JOIN opened USING (rank, step) WHERE b.point = 'before' AND a.point = 'after' "
        f"AND len(a.sketch) = len(b.sketch) AND {within(places, 'a')} AND {within(places, 'b')}"
        for side in SIDES
    )
    derived(HERE, "update_sizes").make(connection, updates=updates)


def _write_handed_on(connection: duckdb.DuckDBPyConnection, *, is_step_alone: bool) -> None:
    places = opened_places(connection)
    before = [] if is_step_alone else [(rank, step - 1) for rank, step in places]
    rows = " UNION ALL ".join(
        "SELECT b.rank, b.step, b.root, b.parameter_fqn, "
        f"{side == 'baseline'} AND b.kind = 'buffer' AS is_buffer, "
        f"{side == 'baseline'} AND a.step IS NOT NULL AS has_last, "
        "coalesce(a.fingerprint = b.fingerprint, false) AS is_kept "
        f"FROM {side}.parameters b LEFT JOIN (FROM {side}.parameters a WHERE a.point = 'after' "
        f"AND {within(before, 'a')}) a ON a.rank = b.rank AND a.step = b.step - 1 AND a.root = b.root "
        f"AND a.parameter_fqn = b.parameter_fqn WHERE b.point = 'before' AND {within(places, 'b')}"
        for side in SIDES
    )
    derived(HERE, "handed_on").make(connection, rows=rows)
