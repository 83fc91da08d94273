"""What may have made a value a constant multiple of the other run's: the recorded counts that fit the factor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import duckdb

from gradtrace_analyzer.diff.explanations.explanation import Context, Explainer, Explanation
from gradtrace_analyzer.diff.links import LINKS
from gradtrace_analyzer.diff.origin import Origin
from gradtrace_analyzer.numerics.sketches import SAME_FACTOR, is_same_factor
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.words.nouns import SIDES


@dataclass(frozen=True)
class Count:
    """Something that gradients are commonly divided by, on both sides."""

    what: str
    baseline: float
    candidate: float
    # Whether it is told of in the plural: `the rows of input 'x'`.
    is_of_many: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class FactorCauses(Explanation):
    """What of the recorded counts equals a factor, the likeliest first; where none does, perhaps a loss scale: the
    power of two that it is."""

    factor: float
    counts: tuple[Count, ...] = ()
    loss_scale: int | None = None


def likely_causes(
    connection: duckdb.DuckDBPyConnection, runs: Mapping[str, Run], origin: Origin
) -> FactorCauses | None:
    """What of the recorded counts equals the factor of an origin, most likely first; None where nothing does."""
    factor = origin.factor
    if factor is None or abs(factor - 1) < 10 * SAME_FACTOR or origin.link not in _LINKS:
        return None
    return explained(abs(factor), list(_counts(connection, runs, origin)))


def explained(factor: float, counts: list[Count]) -> FactorCauses | None:
    """The counts of which this is the ratio, then those which it is itself (a division that one side forgot)."""
    apart = [c for c in counts if c.baseline != c.candidate and c.baseline and c.candidate]
    alike = [c for c in counts if c.baseline == c.candidate and c.baseline > 1]
    found = [
        *(c for c in apart if _is_one(factor, c.baseline / c.candidate)),
        *(c for c in alike if _is_one(factor, c.baseline)),
    ]
    if found:
        return FactorCauses(factor, tuple(found))
    power = round(factor).bit_length() - 1
    if power >= 8 and is_same_factor(factor, 2.0**power):
        return FactorCauses(factor, loss_scale=power)
    return None


def _is_one(factor: float, ratio: float) -> bool:
    return is_same_factor(factor, ratio) or is_same_factor(factor, 1 / ratio)


def _counts(
    connection: duckdb.DuckDBPyConnection, runs: Mapping[str, Run], origin: Origin
) -> Iterator[Count]:
    sizes = [runs[side].world_size or 1 for side in SIDES]
    yield Count("the world size", *sizes)
    at = {"rank": origin.difference.rank, "step": origin.step}
    here = "WHERE rank = $rank AND step = $step"

    def both(query: str) -> list[list[tuple[object, ...]]]:
        return [connection.execute(query.format(side=side), at).fetchall() for side in SIDES]

    passes = both(
        f"SELECT count(*) FROM {{side}}.backward_passes {here} AND kind = 'backward' "
        "AND parent_backward_index IS NULL"
    )
    yield Count("the number of backward passes in the step", *(float(str(p[0][0])) for p in passes))
    divisors = both(f"SELECT max(divisor) FROM {{side}}.buckets {here}")
    values = [rows[0][0] for rows in divisors]
    if None not in values:
        yield Count("the divisor of the reduction", *(float(str(v)) for v in values))
    shapes = [
        {str(name): list(shape) for name, shape in rows if isinstance(shape, list)}
        for rows in both(
            f"SELECT name, arg_min(shape, record_index) FROM {{side}}.inputs {here} GROUP BY name "
            "ORDER BY name"
        )
    ]
    for name in shapes[0].keys() & shapes[1].keys():
        old, new = shapes[0][name], shapes[1][name]
        if old and new:
            yield Count(f"the rows of input {name!r}", old[0], new[0], is_of_many=True)
            yield Count(
                f"the elements of input {name!r}", _product(old), _product(new), is_of_many=True
            )
        if len(old) > 2 and len(new) > 2:
            yield Count(
                f"the tokens of input {name!r}", old[0] * old[1], new[0] * new[1], is_of_many=True
            )


def _product(sizes: list[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _explain(context: Context) -> FactorCauses | None:
    return likely_causes(context.connection, context.runs, context.origins[0])


# Between stages nothing is divided, and changed code has its own reasons.
_LINKS = frozenset(LINKS) - {"stage", "structure"}

EXPLAINER = Explainer(FactorCauses, _explain, links=_LINKS)
