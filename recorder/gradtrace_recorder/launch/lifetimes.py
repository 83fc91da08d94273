"""When this process began, and whether an attempt lived at that moment: the ranks of one start do overlap.

A second start of the same command has the same address and port, and begins when the first has ended.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gradtrace_schemas import layout
from gradtrace_schemas.journal import HEADER
from gradtrace_schemas.processes import life_of, start_of

# A living rank says so once a second. From another machine that is seen late, and by another clock.
_HERE_SECONDS, _ELSEWHERE_SECONDS = 2.0, 60.0


def begin_of_this_process() -> float:
    """When this process began, or was forked; seconds since 1970 by the clock of this machine."""
    ticks = start_of(os.getpid())
    if not ticks:
        return time.time()
    since = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - since


def has_lived_at(moment: float, run: Path, attempt: int, about: Mapping[str, Any]) -> bool:
    """Whether a rank of the attempt gave a sign of life at that moment or later, or was just about to.

    `about` is the attempt's file. Ranks that never recorded are not seen.
    """
    opened = about.get("started_unix_ns")
    if isinstance(opened, int) and opened / 1e9 + _HERE_SECONDS >= moment:
        return True
    return any(last >= moment for last in _last_signs(run, attempt))


def _last_signs(run: Path, attempt: int) -> Iterator[float]:
    """For each rank until when it may have lived, in seconds since 1970; infinite while it does."""
    for name in os.listdir(run / layout.RANKS):
        place = layout.rank_and_attempt(name)
        if place is None or place[1] != attempt or not name.endswith(".json"):
            continue
        path = run / layout.RANKS / name
        try:
            facts = json.loads(path.read_text())
            changed = path.stat().st_mtime
        except (OSError, ValueError):
            continue
        ended = facts.get("wall_end_ns")
        if isinstance(ended, int):
            yield ended / 1e9 + _HERE_SECONDS
            continue
        yield _last_sign(layout.journal_file(run, place[0], attempt), changed)


def _last_sign(journal: Path, changed: float) -> float:
    try:
        with open(journal, "rb") as file:
            header = np.frombuffer(file.read(HEADER.itemsize), HEADER, 1)[0]
        changed = max(changed, journal.stat().st_mtime)
    except (OSError, ValueError):
        return changed + _HERE_SECONDS
    life = life_of(int(header["pid"]), int(header["process_start"]), int(header["machine"]))
    if life == "alive":
        return float("inf")
    last = max(int(header["heartbeat_ns"]), int(header["closed_ns"])) / 1e9
    return last + _HERE_SECONDS if life == "dead" else max(last, changed) + _ELSEWHERE_SECONDS
