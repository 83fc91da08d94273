"""Flight recordings: what of them is there, and asking one that runs to write out what it holds."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradtrace_analyzer.errors import NoFlight
from gradtrace_analyzer.runs.files import MOST_JSON_BYTES, opened, parsed
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.words.numbers import ranks_phrase, steps_phrase
from gradtrace_schemas import layout

_PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class Written:
    """What a rank answered: the steps that it wrote. None of `steps` where it did not answer in time."""

    rank: int
    steps: tuple[int, int] | None


def trigger_lines(run: Run) -> Iterator[str]:
    """What made each rank write parts, alike ones together: `rank 0, step 30: a loss that is not finite`."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for rank, info in run.ranks.items():
        for trigger in _triggers(info.facts):
            known = ("step", "reason", "first_step", "last_step")
            alike.setdefault(tuple(trigger.get(name) for name in known), []).append(rank)
    for (step, reason, first, last), ranks in alike.items():
        at = "" if step is None else f", step {step}"
        steps = steps_phrase(range(first, last + 1))
        yield f"{ranks_phrase(ranks)}{at}: {reason} ({steps} written)"


def shortened_count(run: Run) -> int:
    """How often a rank let go of a step early, because the journal had no room for all that it should keep."""
    return sum(
        int((info.facts.get("flight") or {}).get("shortened") or 0) for info in run.ranks.values()
    )


def triggered(run: Run, patience_s: float) -> tuple[Written, ...]:
    """Ask all ranks in flight mode that may still run for parts, and wait for their answers.

    Raises NoFlight where there is none, OSError where the run's directory cannot be written.
    """
    if run.flight_steps is None:
        raise NoFlight(
            f"{run.path} is no flight recording: all its steps are written as they come (GRADTRACE_MODE=flight "
            "would keep the last ones until it is asked)"
        )
    waiting = set(run.incomplete_ranks)
    if not waiting:
        raise NoFlight(
            f"{run.path} has ended, and has written what it kept; analyzer info says which steps"
        )
    token = uuid.uuid4().hex
    path = layout.trigger_file(run.path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps({"token": token, "unix_ns": time.time_ns()}) + "\n")
    temporary.replace(path)
    found: dict[int, Written] = {}
    end = time.monotonic() + patience_s
    while waiting - set(found):
        for rank in waiting - set(found):
            for trigger in _triggers(_facts(layout.rank_file(run.path, rank, run.attempt))):
                if trigger.get("token") == token:
                    found[rank] = Written(rank, (trigger["first_step"], trigger["last_step"]))
        if time.monotonic() > end:
            break
        time.sleep(_PAUSE_SECONDS)
    return tuple(found.get(rank, Written(rank, None)) for rank in sorted(waiting))


def _triggers(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    triggers = (facts.get("flight") or {}).get("triggers")
    return [t for t in triggers if isinstance(t, dict)] if isinstance(triggers, list) else []


def _facts(path: Path) -> dict[str, Any]:
    try:
        with opened(path) as file:
            return parsed(file.read(MOST_JSON_BYTES)) or {}
    except OSError:
        return {}
