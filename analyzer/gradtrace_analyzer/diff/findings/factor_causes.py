"""What may have made a value a constant multiple of the other run's: the recorded counts that fit the factor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import duckdb

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


def likely_causes(
    connection: duckdb.DuckDBPyConnection, runs: Mapping[str, Run], origin: Origin
) -> list[str]:
    """What of the recorded counts equals the factor of an origin, most likely first; empty where it has none."""
    factor = origin.factor
    # Between stages nothing is divided.
    if (
        factor is None
        or abs(factor - 1) < 10 * SAME_FACTOR
        or origin.code
        or origin.link == "stage"
    ):
        return []
    counts = list(_counts(connection, runs, origin))
    return explained(abs(factor), counts)


def explained(factor: float, counts: list[Count]) -> list[str]:
    """In words, the counts of which this is the ratio, or which it is itself (a division that one side forgot)."""
    found = []
    for c in counts:
        if c.baseline != c.candidate and c.baseline and c.candidate:
            for ratio in (c.baseline / c.candidate, c.candidate / c.baseline):
                if is_same_factor(factor, ratio):
                    found.append(
                        f"{_fraction(factor)}: {c.what} {_verb(c.what)} {c.baseline:,.10g} in the baseline and "
                        f"{c.candidate:,.10g} in the candidate"
                    )
                    break
    for c in counts:
        if c.baseline == c.candidate and c.baseline > 1:
            for times, how in (
                (c.baseline, "no longer divided by"),
                (1 / c.baseline, "divided by"),
            ):
                if is_same_factor(factor, times):
                    found.append(
                        f"{_fraction(factor)}: {c.what} {_verb(c.what)} {c.baseline:,.10g} on both sides; is it "
                        f"{how} that in the candidate, or once {'less' if times > 1 else 'more'} than in the baseline?"
                    )
                    break
    if not found:
        power = round(factor).bit_length() - 1
        if power >= 8 and is_same_factor(factor, 2.0**power):
            found.append(f"{2**power:,} = 2^{power}: a loss scale that was not taken out again?")
    return found


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
            yield Count(f"the rows of input {name!r}", old[0], new[0])
            yield Count(f"the elements of input {name!r}", _product(old), _product(new))
        if len(old) > 2 and len(new) > 2:
            yield Count(f"the tokens of input {name!r}", old[0] * old[1], new[0] * new[1])


def _product(sizes: list[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _verb(what: str) -> str:
    return "are" if what.startswith(("the rows", "the elements", "the tokens")) else "is"


def _fraction(factor: float) -> str:
    """`0.5 = 1/2`, `4`, `0.6 = 3/5`."""
    for below in range(1, 65):
        above = round(factor * below)
        if above and is_same_factor(factor, above / below):
            return f"{factor:.4g}" if below == 1 else f"{factor:.4g} = {above}/{below}"
    return f"{factor:.4g}"
