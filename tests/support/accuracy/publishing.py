"""The published numbers: outcomes into the tables of docs/accuracy.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from support.accuracy.measuring import Outcome

# Kinds that change less than rounding does somewhere else: under a legal change no tolerance can tell them.
BELOW_NOISE = ("one ulp",)


def table(title: str, outcomes: Sequence[Outcome], key: Callable[[Outcome], str]) -> Iterator[str]:
    """One line for each value of the key: how many faults, found, where, missed; sound runs, false alarms."""
    yield f"| {title} | faults | found | at the Node | in the module | elsewhere | missed | sound runs | false alarms |"
    yield "|---|---|---|---|---|---|---|---|---|"
    groups: dict[str, list[Outcome]] = {}
    for o in outcomes:
        groups.setdefault(key(o), []).append(o)
    for name, mine in [*groups.items(), ("**all**", list(outcomes))]:
        faults = [o for o in mine if o.case.kind is not None]
        sound = [o for o in mine if o.case.kind is None]
        found = [o for o in faults if o.is_found]
        exact = sum(o.placed == "exact" for o in found)
        module = sum(o.placed == "module" for o in found)
        numbers = (
            len(faults), len(found), exact, module, len(found) - exact - module, len(faults) - len(found),
            len(sound), sum(o.is_found for o in sound),
        )  # fmt: skip
        yield f"| {name} | {' | '.join(map(str, numbers))} |"


def grid(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Found of faults, by kind and change."""
    changes = list(dict.fromkeys(o.case.change for o in outcomes))
    kinds = list(dict.fromkeys(o.case.kind for o in outcomes if o.case.kind is not None))
    yield f"| | {' | '.join(changes)} |"
    yield "|---" * (len(changes) + 1) + "|"
    for kind in kinds:
        cells = []
        for change in changes:
            mine = [o for o in outcomes if (o.case.kind, o.case.change) == (kind, change)]
            cells.append(f"{sum(o.is_found for o in mine)}/{len(mine)}" if mine else "")
        yield f"| {kind} | {' | '.join(cells)} |"


def operating(by_scale: Mapping[float, Sequence[Outcome]]) -> Iterator[str]:
    """Found and false alarms when all tolerances are multiplied."""
    yield "| tolerances times | faults | found | at the Node or in the module | sound runs | false alarms |"
    yield "|---|---|---|---|---|---|"
    for scale, outcomes in sorted(by_scale.items()):
        faults = [o for o in outcomes if o.case.kind is not None]
        sound = [o for o in outcomes if o.case.kind is None]
        yield (
            f"| {scale:g} | {len(faults)} | {sum(o.is_found for o in faults)} | "
            f"{sum(o.placed in ('exact', 'module') for o in faults)} | {len(sound)} | "
            f"{sum(o.is_found for o in sound)} |"
        )


PAGE = """# How accurate `analyzer diff` is

Made by `scripts/accuracy` ({count} comparisons on small models, CPU, torch {torch}). Each case trains a model
twice: a sound baseline, and a candidate under a legal change, half of the time with a fault in the backward pass of
one module at step 1. Nothing but the two recordings is given to `diff`; `fp8` alone is declared (`--precision
fp8`), since no dtype tells it.

- **at the Node**: step, module and Node are those of the fault. **In the module**: step right, and the module, one
  inside it or the one around it. **Elsewhere**: a difference was reported, of another place.
- A sound run is a false alarm when the verdict is `different`.
- Tolerances follow from dtype, sums, depth and the noise that a step's forward shows (see the docstring of
  `tolerance.py`); no `--noise` run was given. With one they are narrower.

## By change

{by_change}

## By kind of fault

{by_kind}

## By model

{by_family}

## Found, by kind and change

{grid}

## Tolerances, narrower and wider

Every {every}th case again, with all tolerances multiplied. (A job that is reproducible needs none: `none` is decided by
bits.)

{operating}

## What it cannot do

- A fault smaller than the rounding of a legal change is not told from it: one unit in the last place is found where the
  rest of the job is equal bit for bit, and nowhere else; one element by 1% is found in float32, not in half precision.
- In fp8 noise is 6% and more: a factor of 1.01 is lost in it. In bf16 and fp16 a factor is told by norms, which
  rounding hardly changes; a wrong direction of that size is not.
- Where the work is divided otherwise (accumulation, ranks, shards, stages) sums over the parts are compared. What
  permutes the rows of a batch keeps norm and sum of a gradient: it shows only in the gradients of parameters, at
the module. - Batch normalisation over other microbatches is other training, and is reported as `different`.
- Compiled code has one Node for many: a fault inside is placed at the first parameter or module that shows it.
- CPU against GPU was simulated (exact sums, rounded once), and so was TF32 (factors rounded to 10 bits) and fp8
  (e4m3 with a scale for each tensor). No device was at hand.
- The models are small, the steps two. Long runs, in which noise has grown to the size of the training itself, are
  compared to where they part by more than their parameters' drift explains; later nothing is claimed.
"""
