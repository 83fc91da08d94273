"""The published numbers: outcomes into the tables of docs/internals/accuracy.md."""

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
    sharp = [o for o in outcomes if o.case.kind not in BELOW_NOISE]
    totals = [("**all**", list(outcomes)), (f"**all but {', '.join(BELOW_NOISE)}**", sharp)]
    for name, mine in [*groups.items(), *totals]:
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


def unlucky(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Each fault that was missed or placed elsewhere, but for those that no tolerance can tell; each false alarm."""
    yield "| change | kind | model | place | step | verdict | placed |"
    yield "|---|---|---|---|---|---|---|"
    for o in outcomes:
        case = o.case
        is_right = o.placed in ("exact", "module") and o.is_found
        if is_right if case.kind is not None else not o.is_found:
            continue
        if case.kind in BELOW_NOISE and not o.is_found:
            continue
        yield (
            f"| {case.change} | {case.kind or '(none)'} | {case.family} | {case.place} | {case.step} | "
            f"{o.verdict.replace('_', ' ')} | {o.placed or ''} |"
        )


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

Made by `scripts/accuracy` ({count} comparisons on small models, seed {seed}, CPU, torch {torch}). Each case trains a
model twice: a sound baseline, and a candidate under a legal change, mostly with a fault in the backward pass of one
module, from one of the first {steps} steps on. Nothing but the two recordings is given to `diff`; `fp8` alone is
declared (`--precision fp8`), since no dtype tells it.

- **at the Node**: step, module and Node are those of the fault. **In the module**: step right, and the module, one
  inside it or the one around it. **Elsewhere**: a difference was reported, of another place or step.
- A sound run is a false alarm when the verdict is `different`.
- Tolerances follow from dtype, sums, depth and the noise that a step shows (`tolerance.py`; numbers: `model.py`); no
  `--noise` run was given. With one they are narrower.
- The constants of the rule were chosen with other seeds, which draw the models' weights, the data, and the faults'
  places; {unseen} were never used for it. (When they were measured first, the translator gave false
  alarms under fp16, since its recurrent layers compute in half precision and hand on float32. That was mended, and
  all was measured anew: these numbers.)
- Runs have {steps} steps; where arithmetic is coarse (half precision, fp8) and the fault is a factor, {more}: what
  noise hides in one step shows in four.

## By change

{by_change}

## By kind of fault

{by_kind}

## By model

{by_family}

## Found, by kind and change

{grid}

## Missed, misplaced, false

All of them, but for missed faults of the kind `{below}`.

{unlucky}

## Tolerances, narrower and wider

Every {every}th case again, with all tolerances multiplied. (A job that is reproducible needs none: `none` is decided by
bits.)

{operating}

## What it cannot do

- A fault smaller than the rounding of a legal change is not told from it: one unit in the last place is found where the
  rest of the job is equal bit for bit, and nowhere else; one element by 1% is found in float32, not in half precision.
- In fp8 gradients are a few hundredths to a fifth off in direction: one row out of a batch, or two elements, are lost
  in it. A factor is told by lengths, which rounding changes far less, and where even these are too noisy by being the
  same four times in a row; a run that is too large to be open as a whole is not looked at that way.
- An activation with a kink (ReLU) turns whole elements on and off by rounding; what a few elements can do is allowed
  from there on.
- Where the work is divided otherwise (accumulation, ranks, shards, stages) sums over the parts are compared. What
  permutes the rows of a batch keeps norm and sum of a gradient: it shows only in the gradients of parameters, at the
  module.
- Batch normalisation over other microbatches is other training, and is reported as `different`.
- Compiled code has one Node for many: a fault inside is placed at the first parameter or module that shows it.
- CPU against GPU was simulated (exact sums, rounded once), and so was TF32 (factors rounded to 10 bits) and fp8
  (e4m3 with a scale for each tensor). No device was at hand.
- The models are small, the steps few. Long runs, in which noise has grown to the size of the training itself, are
  compared to where they part by more than their parameters' drift explains; later nothing is claimed.
"""
