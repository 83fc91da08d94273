"""Where gradients that one factor explains stop following it: `.grad` was changed between two backward passes.

Pure, from the differences of one step and rank. A pass that is f times the baseline's adds f times as much to
`.grad`; as long as every pass of the step does, `.grad` is f times the baseline's too, or it was changed in between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from gradtrace_analyzer.diff.difference import Change, Difference
from gradtrace_analyzer.diff.origin import Rescaled
from gradtrace_schemas.table import NODE_SKETCH_LANES

# Two factors are the same within what their sketches can tell.
_CLOSE = 1e-3


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
        if d.only_in is not None or added is None or not _is_close(added.factor, factor):
            break
        if found and d.key["backward_index"] != found[0].backward_index:
            break
        parameter = (d.key["root"], d.key["parameter_fqn"])
        last = before.get(parameter)
        if d.writes is not None and _is_close(d.writes.factor, factor):
            before[parameter] = d
        elif last is not None:
            side, times = _multiplied(last.writes, added, d.writes)
            found.append(Rescaled(d, int(last.key["backward_index"]), side, times))
    return replace(found[0], others=len(found) - 1) if found else None


def _place(d: Difference) -> tuple[object, ...]:
    return (d.key["backward_index"], d.key["root"], d.key["parameter_fqn"])


def _is_close(a: float | None, b: float) -> bool:
    return a is not None and abs(a / b - 1) < _CLOSE


def _multiplied(
    last: Change | None, added: Change, now: Change | None
) -> tuple[str | None, float | None]:
    """(the side that multiplied its `.grad`, by what): now = times * last + added, in sketches of that side."""
    found: list[tuple[str, float]] = []
    for side in ("baseline", "candidate"):
        sketches = [_folded(change, side) for change in (last, added, now)]
        if not all(sketches):
            return None, None
        old, more, new = sketches
        kept = [a - b for a, b in zip(new, more, strict=True)]
        square = sum(x * x for x in old)
        if square == 0 or not math.isfinite(square):
            return None, None
        times = sum(x * y for x, y in zip(kept, old, strict=True)) / square
        rest = sum((x - times * y) ** 2 for x, y in zip(kept, old, strict=True))
        if math.sqrt(rest / square) > 0.01:
            return None, None
        found.append((side, times))
    apart = [(side, times) for side, times in found if not _is_close(times, 1.0)]
    return apart[0] if len(apart) == 1 else (None, None)


def _folded(change: Change | None, side: str) -> list[float]:
    """A sketch on as many lanes as those of Nodes have; empty where there is none."""
    statistics = None if change is None else getattr(change, side)
    lanes = (statistics or {}).get("sketch") or ()
    if len(lanes) % NODE_SKETCH_LANES:
        return []
    return [
        math.fsum(lanes[lane::NODE_SKETCH_LANES])
        for lane in range(NODE_SKETCH_LANES if lanes else 0)
    ]
