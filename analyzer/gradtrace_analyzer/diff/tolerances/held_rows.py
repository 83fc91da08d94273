"""The query that holds rows of a link against what they are allowed: directions, lengths, how sure an estimate is."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from gradtrace_analyzer.diff.links import LinkTable
from gradtrace_analyzer.diff.tolerances.allowances import expression
from gradtrace_analyzer.diff.tolerances.lengths import MANY, USUAL_TIMES
from gradtrace_analyzer.sql.derived import derived

HERE = Path(__file__).parent

# What a gradient may be what is left of: joined where that is asked.
_FLOORS = """LEFT JOIN arriving a ON a.rank = d.rank AND a.step = d.step AND a.root IS NOT DISTINCT FROM d.key_root
        AND a.module_fqn = owner_of(d.key_parameter_fqn)
    LEFT JOIN shapes s ON s.root = d.key_root AND s.parameter_fqn = d.key_parameter_fqn
    LEFT JOIN (SELECT rank, step, max(norm) AS norm FROM arriving GROUP BY ALL) l
        ON l.rank = d.rank AND l.step = d.step"""
_GAIN = "gain(d.reads_b_norm, d.reads_c_norm, d.writes_b_norm, d.writes_c_norm)"


def as_given(table: LinkTable) -> str:
    """The rows of a table that count as they are."""
    tolerances = "".join(f"NULL::DOUBLE AS {role}_tolerance, " for role, _ in table.sides)
    return derived(HERE, "judged_values").rows(table=table.table, tolerances=tolerances)


def judged_links(
    table: LinkTable, *, scale: float, layers: int, without: Collection[str] = ()
) -> str:
    """The query of the judged rows of a table whose rows are computed; `scale` multiplies what is allowed."""
    times = f"{scale!r}::DOUBLE"
    direction, length = _allowed(table.table, times, layers, without)
    roles = [role for role, _ in table.sides]
    has_floor = table.table in ("gradients", "node_events")
    shares, beyond, decisive = [], [], []
    for role in roles:
        norm = f"greatest(d.{role}_b_norm, d.{role}_c_norm)"
        floor = (
            f"greatest({expression('flat_sums', without)}, {expression('noise_floor', without)})"
        )
        share = f"share_of_floor({norm}, {floor})" if has_floor else "1"
        shares.append(f"{share} AS {role}_share")
        error = f"d.{role}_error * d.{role}_share"
        sure = expression("decisive_estimates", without, role=role)
        beyond.append(f"(d.{role}_differs AND coalesce({error} > direction, true))")
        decisive.append(f"(d.{role}_differs AND coalesce({error} > direction * ({sure}), true))")
    longer = "false"
    if len(roles) == 2:
        is_longer = expression(
            "lengths", without, role_gain=_GAIN, writes_share="d.writes_share", length="length"
        )
        longer = f"coalesce(d.writes_differs AND {MANY} AND {is_longer}, false)"
    told = {role: f"direction / {role}_share" for role in roles}
    # Where its length alone tells, it is held against what lengths may do.
    if len(roles) == 2:
        told["writes"] = (
            f"CASE WHEN is_longer AND NOT is_decisive THEN length ELSE {told['writes']} END"
        )
    return derived(HERE, "judged_links").rows(
        table=table.table,
        direction=direction,
        length=length,
        shares=", ".join(shares),
        share_names=", ".join(f"{role}_share" for role in roles),
        floors=_FLOORS if has_floor else "",
        beyond=" OR ".join(beyond),
        decisive=" OR ".join(decisive),
        longer=longer,
        tolerances=", ".join(f"{text} AS {role}_tolerance" for role, text in told.items()),
    )


def _allowed(table: str, scale: str, layers: int, without: Collection[str]) -> tuple[str, str]:
    """(the relative error that a row is allowed, the change of its norm) as SQL."""

    def of(name: str, **filled: object) -> str:
        return expression(name, without, scale=scale, layers=layers, **filled)

    limit = of("usual_gain", usual_times=USUAL_TIMES[table]) if table in USUAL_TIMES else "1e9"
    if table == "module_calls":
        drift = of("drift")
        direction = f"r.forward + {scale} * {drift}"
        return direction, f"r.norm + {scale} * least({drift}, {limit})"
    rounding = f"least(r.backward + {scale} * {of('drift_backward')}, {of('seen_noise')})"
    kinks, unsteady, amplified = of("kinks"), of("unsteady_nodes"), of("normalisations")
    direction = f"({rounding} + {scale} * ({kinks} + {unsteady})) * {amplified}"
    longer = f"({of('drift_backward')} + {kinks} ** 2 + {unsteady})"
    return direction, f"(r.norm + {scale} * least({longer}, {limit})) * {amplified}"
