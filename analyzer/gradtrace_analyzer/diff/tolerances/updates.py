"""Judges what is no output of the chain: parameters after the optimizer, and what a step is given (inputs, parameters).

Both write into the tables that `Judgement` has made ready.
"""

from __future__ import annotations

import duckdb

from gradtrace_analyzer.diff.pairing.pairs import opened_places, within
from gradtrace_analyzer.numerics.tolerance import (
    PASSED_ON,
    ROUNDED_ONCE,
    TURNED,
    TURNED_TIMES,
    UNJUDGED,
    UPDATE_ROUNDINGS,
    UPDATED,
    WIDER_STATISTICS,
    Rule,
)
from gradtrace_analyzer.words.nouns import SIDES

# By how much more than the other parameters a statistic of the last steps may differ.
_STATISTICS_GROWTH = 4.0


def judge_updates(connection: duckdb.DuckDBPyConnection, scale: float) -> None:
    """After the optimizer: the new difference, against the update and what the gradients explain of it.

    Plain SGD passes a gradient's error on. An adaptive optimizer makes a whole step of the sign of a gradient that is
    all rounding: of flat parameters (a bias in front of a softmax) any share may be, so they are not judged there.
    """
    places = opened_places(connection)
    change = "d.writes_error * greatest(d.writes_b_norm, d.writes_c_norm)"
    ulp = f"{UPDATE_ROUNDINGS} * greatest(roundoff(d.writes_b_dtype), roundoff(d.writes_c_dtype))"
    size = "greatest(d.writes_b_norm, d.writes_c_norm)"
    updates = " UNION ALL ".join(
        "SELECT b.rank, b.step, b.root, b.parameter_fqn, sketch_distance(b.sketch, a.sketch) "
        f"AS size FROM {side}.parameters b JOIN {side}.parameters a USING (rank, step, root, parameter_fqn) "
        "SEMI JOIN opened USING (rank, step) WHERE b.point = 'before' AND a.point = 'after' "
        f"AND len(a.sketch) = len(b.sketch) AND {within(places, 'a')} AND {within(places, 'b')}"
        for side in SIDES
    )
    share = (
        f"CASE WHEN coalesce(k.error, 0) = 0 THEN {UPDATED} "
        f"WHEN {str(is_plain(connection)).lower()} THEN {UPDATED} + {PASSED_ON} * k.error "
        f"WHEN k.is_flat THEN {UNJUDGED} "
        f"ELSE least({UNJUDGED}, {UPDATED} + {TURNED_TIMES} * sqrt({TURNED} * k.error)) END"
    )
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE judged AS WITH errors AS ("
        "SELECT rank, step, key_root, key_parameter_fqn, max(writes_error) OVER (PARTITION BY rank, key_root, "
        "key_parameter_fqn ORDER BY step) AS error FROM differing_gradients "
        "WHERE only_in IS NULL AND key_point = 'final'), "
        f"updates AS (SELECT rank, step, root, parameter_fqn, max(size) AS size FROM ({updates}) GROUP BY ALL), "
        "known AS (SELECT d.rowid AS id, "
        f"greatest(0, {change} - coalesce(before.was, 0)) AS added, {ulp} * {size} AS rounded, "
        f"u.size AS update_size, e.error, s.is_flat, {size} AS size "
        "FROM differing_parameters d "
        "LEFT JOIN (SELECT rank, step, key_root, key_parameter_fqn, writes_error * "
        "greatest(writes_b_norm, writes_c_norm) AS was FROM differing_parameters WHERE key_point = 'before') before "
        "ON before.rank = d.rank AND before.step = d.step AND before.key_root = d.key_root "
        "AND before.key_parameter_fqn = d.key_parameter_fqn "
        "LEFT JOIN updates u ON u.rank = d.rank AND u.step = d.step AND u.root = d.key_root "
        "AND u.parameter_fqn = d.key_parameter_fqn "
        "LEFT JOIN shapes s ON s.root = d.key_root AND s.parameter_fqn = d.key_parameter_fqn "
        "ASOF LEFT JOIN errors e ON e.rank = d.rank AND e.key_root = d.key_root "
        "AND e.key_parameter_fqn = d.key_parameter_fqn AND d.step >= e.step "
        "WHERE d.key_point = 'after' AND d.only_in IS NULL) "
        f"SELECT id, coalesce(added > {scale} * allowed, true) AS apart, "
        f"{scale} * allowed / nullif(size, 0) AS allowed FROM (SELECT *, "
        f"rounded + coalesce(update_size, 0) * ({share}) AS allowed FROM known k)"
    )
    connection.execute(
        "UPDATE differing_parameters d SET exceeds = d.exceeds OR j.apart, beyond = d.exceeds OR j.apart, "
        "writes_tolerance = j.allowed FROM judged j WHERE j.id = d.rowid"
    )


def is_plain(connection: duckdb.DuckDBPyConnection) -> bool:
    """Whether all optimizers pass a gradient on in proportion."""
    row = connection.execute(
        "SELECT coalesce(bool_and(optimizer_class IN ('SGD', 'ASGD')), false) FROM baseline.optimizer_groups"
    ).fetchone()
    return bool(row is not None and row[0])


def judge_given(
    connection: duckdb.DuckDBPyConnection, rule: Rule, scale: float, *, is_step_alone: bool
) -> None:
    """Inputs, and parameters before a step: given, not computed. Of another dtype they are rounded once.

    Where a step is compared alone what it was given is not judged in the step before it: it counts here.
    """
    once = (
        f"CASE WHEN writes_b_dtype <> writes_c_dtype THEN {ROUNDED_ONCE} * greatest("
        "roundoff(writes_b_dtype), roundoff(writes_c_dtype)) ELSE 0 END"
    )
    connection.execute(
        f"UPDATE differing_inputs SET writes_tolerance = {once}, beyond = exceeds OR "
        f"coalesce(writes_error > {once}, true), exceeds = exceeds OR coalesce(writes_error > {once}, true)"
    )
    # What the last step left is judged there: here only what changed since. Buffers, which the forward
    # changes, have no row after the optimizer: statistics are held against a far wider tolerance.
    places = opened_places(connection)
    before = [] if is_step_alone else [(rank, step - 1) for rank, step in places]
    handed_on = " UNION ALL ".join(
        "SELECT b.rank, b.step, b.root, b.parameter_fqn, "
        f"{side == 'baseline'} AND b.kind = 'buffer' AS is_buffer, "
        f"{side == 'baseline'} AND a.step IS NOT NULL AS has_last, "
        "coalesce(a.fingerprint = b.fingerprint, false) AS is_kept "
        f"FROM {side}.parameters b LEFT JOIN (FROM {side}.parameters a WHERE a.point = 'after' "
        f"AND {within(before, 'a')}) a ON a.rank = b.rank AND a.step = b.step - 1 AND a.root = b.root "
        f"AND a.parameter_fqn = b.parameter_fqn WHERE b.point = 'before' AND {within(places, 'b')}"
        for side in SIDES
    )
    # What a buffer counts, in integers, is exact.
    computed = (
        "d.step > (SELECT min(step) FROM common) AND NOT h.has_last AND h.is_buffer "
        "AND roundoff(writes_b_dtype) > 0"
    )
    loose = (
        f"greatest({WIDER_STATISTICS} * {scale * rule.forward()!r}::DOUBLE, "
        f"{_STATISTICS_GROWTH} * coalesce(g.weights, 0))"
    )
    connection.execute(
        "UPDATE differing_parameters d SET writes_tolerance = allowed, beyond = exceeds OR apart, "
        "exceeds = exceeds OR apart FROM (SELECT id, NOT kept AND coalesce(writes_error > allowed, true) AS apart, "
        "allowed FROM (SELECT d.rowid AS id, d.writes_error, coalesce(h.is_kept, false) AS kept, "
        f"CASE WHEN {computed} THEN {loose} ELSE {once} END AS allowed FROM differing_parameters d LEFT JOIN ("
        "SELECT rank, step, root, parameter_fqn, "
        "bool_and(is_kept) AS is_kept, bool_or(is_buffer) AS is_buffer, bool_or(has_last) AS has_last "
        f"FROM ({handed_on}) GROUP BY ALL) h ON h.rank = d.rank AND h.step = d.step AND h.root = d.key_root "
        "AND h.parameter_fqn = d.key_parameter_fqn LEFT JOIN growth g "
        "ON g.rank = d.rank AND g.step = d.step WHERE key_point = 'before' AND only_in IS NULL)) j "
        "WHERE j.id = d.rowid"
    )
