"""By how much Nodes and modules lengthen what they hand on, more in one run than in the other: directions cannot tell.

Rounding turns a vector further than it lengthens it, so that a factor of 1.01 shows in a norm where it is lost in
the distance of two vectors. What lengths do without a fault is seen in the rest of the step. And where that is
too much, a factor still gives itself away: rounding errs otherwise each time, a factor is the same at every step.
"""

from __future__ import annotations

import duckdb

from gradtrace_analyzer.numerics.tolerance import AS_ADDED_UP, FEWEST_NUMBERS

# How many times the lengthening that is usual in a step one Node, or module, may show. (In sound runs of six small
# models in five arithmetics the largest Node's was 13 times that of the others, in bfloat16, and less than the rule
# allows alone; the largest module's 38 times their median, in bfloat16 too, and less than the rule allows.)
SEEN_GAINS = {"node_events": 10.0, "module_calls": 32.0}

# A Node shows noise when it lengthens by more than its norm is rounded, and what is usual needs a few of them.
_FEW = 6

MANY = f"writes_b_numel >= {FEWEST_NUMBERS} AND writes_b_numel = writes_c_numel"

# So often the same lengthening, to a thousandth of it, is no chance: four Nodes of which each could be anywhere in
# the noise agree so closely about once in a thousand million times.
_TIMES, _ALIKE = 4, 1e-3

# What is given to 1e-7 is not the same to a thousandth when smaller than this; and a constant that was rounded to the
# row's dtype on either side is a factor too, which is legal.
_LEAST, _AS_CONSTANT = 5e-4, 2.0

# Where the noise itself comes back (the same batch at every step) nothing is said.
_MOST_STEADY = 0.25

_SIGNED = "(writes_c_norm / nullif(writes_b_norm, 0)) / nullif(reads_c_norm / nullif(reads_b_norm, 0), 0) - 1"
GAIN = f"abs({_SIGNED})"
_JUDGED = (
    "only_in IS NULL AND key_parameter_fqn IS NULL AND key_node_name IS NOT NULL AND writes_differs "
    f"AND {MANY}"
)


def write_usual_gain(connection: duckdb.DuckDBPyConnection) -> None:
    """`usual_gain`: what is usual in a rank's step, of the Nodes and of the modules.

    Of Nodes it is the root of the mean square without the largest. Modules hold each other, so that one that lengthens
    makes several do so: of them it is the median.
    """
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE usual_gain AS WITH gains AS ("
        f"SELECT 'node_events' AS link_table, rank, step, {GAIN} AS gain FROM differing_node_events WHERE {_JUDGED} "
        f"UNION ALL SELECT 'module_calls', rank, step, {GAIN} FROM differing_module_calls "
        f"WHERE only_in IS NULL AND key_phase = 'forward' AND writes_differs AND {MANY}) "
        "SELECT link_table, rank, step, if(link_table = 'node_events', "
        "sqrt(greatest(0, sum(gain * gain) - max(gain) ** 2) / (count(*) - 1)), median(gain)) AS gain "
        f"FROM gains WHERE gain > {AS_ADDED_UP} AND isfinite(gain) GROUP BY link_table, rank, step "
        f"HAVING count(*) >= {_FEW}"
    )


def mark_steady_factors(connection: duckdb.DuckDBPyConnection) -> None:
    """Mark Nodes that lengthen by the same factor time after time as beyond their tolerance, `shown_by` that."""
    place = "key_root, key_module_fqn, key_call_index, key_node_name, key_occurrence"
    unit = "greatest(roundoff(writes_b_dtype), roundoff(writes_c_dtype))"
    connection.execute(
        f"CREATE OR REPLACE TEMP TABLE steady AS WITH gains AS (SELECT rowid AS id, rank, step, place, {place}, "
        f"{_SIGNED} AS gain, greatest({_LEAST}, {_AS_CONSTANT} * {unit}) AS least, "
        f"4 * {unit} / sqrt(writes_b_numel) AS rounded FROM differing_node_events "
        f"WHERE {_JUDGED}), spans AS (SELECT *, min(gain) OVER w AS lowest, max(gain) OVER w AS highest, "
        f"count(gain) OVER w AS times FROM gains WINDOW w AS (PARTITION BY {place} ORDER BY step, rank, gains.place "
        f"ROWS BETWEEN CURRENT ROW AND {_TIMES - 1} FOLLOWING)), "
        f"begun AS (SELECT *, times = {_TIMES} AND lowest * highest > 0 AND least(abs(lowest), abs(highest)) > least "
        f"AND highest - lowest <= {_ALIKE} * abs(lowest) + rounded AS is_alike FROM spans), "
        f"told AS (SELECT *, bool_or(is_alike) OVER (PARTITION BY {place} ORDER BY step, rank, begun.place "
        f"ROWS BETWEEN {_TIMES - 1} PRECEDING AND CURRENT ROW) AS is_steady FROM begun), "
        f"counts AS (SELECT count(*) FILTER (is_steady) AS steady, count(*) AS noisy FROM (SELECT "
        f"bool_or(is_steady) AS is_steady FROM told WHERE abs(gain) > least GROUP BY {place} "
        f"HAVING count(*) >= {_TIMES})) "
        f"SELECT id, least FROM told, counts WHERE is_steady AND steady <= greatest(1, {_MOST_STEADY} * noisy)"
    )
    connection.execute(
        "UPDATE differing_node_events d SET beyond = true, exceeds = true, shown_by = 'steady', "
        "writes_tolerance = s.least FROM steady s "
        "WHERE s.id = d.rowid AND NOT d.exceeds"
    )
