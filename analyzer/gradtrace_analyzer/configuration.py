"""What differs between the configurations of two runs: it is often the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradtrace_analyzer.run import Run


def apart_in_configuration(runs: Mapping[str, Run]) -> list[dict[str, Any]]:
    """What differs between the sides' versions, settings and switches: it is often the answer."""
    sides = {side: _facts(run) for side, run in runs.items()}
    names = sorted({name for facts in sides.values() for name in facts})
    found = []
    for name in names:
        a, b = sides["baseline"].get(name), sides["candidate"].get(name)
        if a != b:
            found.append({"name": name, "baseline": a, "candidate": b})
    return found if all(len(facts) > 1 for facts in sides.values()) else []


def _facts(run: Run) -> dict[str, Any]:
    facts: dict[str, Any] = {"world_size": run.world_size}
    for info in run.ranks.values():
        for group in ("versions", "environment"):
            facts.update(info.facts.get(group) or {})
        break
    facts.pop("gradtrace", None)
    return facts
