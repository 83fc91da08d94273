"""A rank's place in a run's directory: which attempt this is, and files that are nobody else's.

Every name is claimed with O_EXCL, so that two processes, on whatever hosts, never write the same file.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradtrace_recorder.identity import Identity
from gradtrace_schemas import SCHEMA_VERSION, layout
from gradtrace_schemas.journal import HEADER
from gradtrace_schemas.processes import life_of

_MOST_ATTEMPTS = 10_000


@dataclass(frozen=True)
class Claim:
    """A rank's place: nobody else writes under this run, rank and attempt."""

    run: Path
    rank: int
    attempt: int

    def write_rank_file(self, content: dict[str, Any]) -> None:
        """Replace the rank's json. Raises OSError."""
        path = layout.rank_file(self.run, self.rank, self.attempt)
        temporary = path.with_suffix(".writing")
        temporary.parent.mkdir(parents=True, exist_ok=True)  # the directory may have been removed
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.rename(path)


class NotOurs(Exception):
    """This process is a helper of one that is recorded: it is left alone."""


@dataclass(frozen=True)
class Rival:
    """A living process that records the same rank into the same directory; an ancestor of this one, or not."""

    pid: int
    attempt: int
    is_ancestor: bool


def living_rival(run: Path, identity: Identity) -> Rival | None:
    """Who else records this rank into this directory now: a second job by mistake, or the process that started us.

    A child with another world size is no helper: a job that looks at its model and then spawns its ranks.
    """
    ancestors = _ancestors()
    found: Rival | None = None
    for attempt in sorted(_attempts(run)) if (run / layout.ATTEMPTS).is_dir() else ():
        try:
            with open(layout.journal_file(run, identity.rank, attempt), "rb") as file:
                header = np.frombuffer(file.read(HEADER.itemsize), HEADER, 1)[0]
            facts = json.loads(layout.rank_file(run, identity.rank, attempt).read_text())
        except (OSError, ValueError):
            continue
        pid = int(header["pid"])
        if life_of(pid, int(header["process_start"]), int(header["machine"])) != "alive":
            continue
        is_ours = pid in ancestors and facts.get("world_size") == identity.world_size
        if found is None or is_ours:
            found = Rival(pid, attempt, is_ours)
    return found


def _ancestors() -> set[int]:
    """The processes that started this one, as far as can be seen."""
    found: set[int] = set()
    pid = os.getppid()
    while pid > 1 and pid not in found:
        found.add(pid)
        try:
            with open(f"/proc/{pid}/stat") as stat:
                pid = int(stat.read().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError, IndexError):
            break
    return found


def claim_place(run: Path, identity: Identity, token: str, about: dict[str, Any]) -> Claim:
    """Join the newest attempt of the same start of the job, or open the next one.

    `about` goes into run.json and the attempt's file. Raises OSError where the directory cannot be written.
    """
    for folder in (run / layout.ATTEMPTS, run / layout.RANKS, run / layout.JOURNALS):
        folder.mkdir(parents=True, exist_ok=True)
    started = {
        "token": token,
        "world_size": identity.world_size,
        "schema_version": SCHEMA_VERSION,
        "started_unix_ns": time.time_ns(),
        **about,
    }
    _create(run / layout.RUN_FILE, started)
    attempt = max(_attempts(run), default=0)
    while attempt < _MOST_ATTEMPTS:
        path = layout.attempt_file(run, attempt)
        if not _create(path, started) and _token(path) != token:
            attempt += 1
            continue
        if _create(
            layout.rank_file(run, identity.rank, attempt),
            {"rank": identity.rank, "attempt": attempt, "complete": False},
        ):
            return Claim(run, identity.rank, attempt)
        attempt += 1
    raise OSError(f"{run} holds {_MOST_ATTEMPTS} attempts already; record into another directory")


def _attempts(run: Path) -> list[int]:
    numbers = (layout.attempt_of(name) for name in os.listdir(run / layout.ATTEMPTS))
    return [number for number in numbers if number is not None]


def _create(path: Path, content: dict[str, Any]) -> bool:
    """Create the file whole, or say that it was there: a link is never seen half written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:
        # Some file systems know no hard links: O_EXCL then, whose content comes a moment later.
        try:
            with open(path, "x") as file:
                file.write(temporary.read_text())
        except FileExistsError:
            return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _token(path: Path) -> str | None:
    for _ in range(50):
        try:
            token = json.loads(path.read_text()).get("token")
            return token if isinstance(token, str) else None
        except (OSError, ValueError):
            time.sleep(0.01)  # only where O_EXCL stood in for a link
    return None
