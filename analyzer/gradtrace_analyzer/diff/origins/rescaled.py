"""Where gradients that one factor explains stop following it: `.grad` was changed between two backward passes.

Pure, from the differences of one step and rank. A pass that is f times the baseline's adds f times as much to
`.grad`; as long as every pass of the step does, `.grad` is f times the baseline's too, or it was changed in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradtrace_analyzer.diff.difference import Change, Difference
from gradtrace_analyzer.diff.origin import Rescaled
from gradtrace_analyzer.numerics.sketches import closest_multiple, is_same_factor, on_node_lanes
from gradtrace_analyzer.words.nouns import SIDES

# What two sums leave over, beside what was multiplied, may be rounding up to this share of it.
_LEFT_OVER = 0.01


def first_rescaled(own: Sequence[Difference], factor: float) -> Rescaled | None:
    """The first gradient of a rank's step that was changed outside backward, where all passes are `factor` times
    the baseline's; None where they are not, or nothing was changed."""
    arrived = {
        _place(d): d.reads
        for d in own
        if d.table == "node_events" and d.key["parameter_fqn"] is not None and d.reads is not None
    }
    before: dict[object, Difference] = {}
    found: list[Rescaled] = []
    local = [d for d in own if d.key.get("point") == "local"]
    for d in sorted(local, key=lambda d: d.order):
        added = arrived.get(_place(d))
        if d.only_in is not None or added is None or not is_same_factor(added.factor, factor):
            break
        if found and d.key["backward_index"] != found[0].backward_index:
            break
        parameter = (d.key["root"], d.key["parameter_fqn"])
        last = before.get(parameter)
        if d.writes is not None and is_same_factor(d.writes.factor, factor):
            before[parameter] = d
        elif last is not None:
            side, times = _multiplied(last.writes, added, d.writes)
            found.append(Rescaled(d, int(last.key["backward_index"]), side, times))
    return replace(found[0], others=len(found) - 1) if found else None


def _place(d: Difference) -> tuple[object, ...]:
    return (d.key["backward_index"], d.key["root"], d.key["parameter_fqn"])


def _multiplied(
    last: Change | None, added: Change, now: Change | None
) -> tuple[str | None, float | None]:
    """(the side that multiplied its `.grad`, by what): now = times * last + added, in sketches of that side."""
    found: list[tuple[str, float]] = []
    for side in SIDES:
        sketches = [_sketch(change, side) for change in (last, added, now)]
        if not all(sketches):
            return None, None
        old, more, new = sketches
        kept = [a - b for a, b in zip(new, more, strict=True)]
        fit = closest_multiple(old, kept)
        if fit is None or fit.left_over / fit.norm > _LEFT_OVER:
            return None, None
        found.append((side, fit.factor))
    apart = [(side, times) for side, times in found if not is_same_factor(times, 1.0)]
    return apart[0] if len(apart) == 1 else (None, None)


def _sketch(change: Change | None, side: str) -> list[float]:
    """A side's sketch on as many lanes as those of Nodes have; empty where there is none."""
    statistics = None if change is None else getattr(change, side)
    return on_node_lanes((statistics or {}).get("sketch") or ())
