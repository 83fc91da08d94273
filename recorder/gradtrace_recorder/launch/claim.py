"""A rank's place in a run's directory: which attempt this is, and files that are nobody else's.

An attempt is one start of a job. Its file holds a token, which the first of its ranks makes; the others find it

1. by the launcher's ids, where no other start can have them: that costs nothing, and leaves the job's store alone;
2. else by the store of the process group, which is the group's alone (`agreement.py`);
3. else by what they share (ids that may be used again, an address and port, a parent, the world's size), in an attempt
   that has no such rank yet, and that lived when this process began: yesterday's is not joined.

What the third would join is also what a rank proposes to the store: the others may have begun before the group did.
Every name is claimed with O_EXCL, so that two processes, on whatever hosts, never write the same file.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradtrace_recorder.launch.agreement import agreed, group_store
from gradtrace_recorder.launch.identity import Identity
from gradtrace_recorder.launch.lifetimes import begin_of_this_process, has_lived_at
from gradtrace_schemas import SCHEMA_VERSION, layout
from gradtrace_schemas.journal import HEADER
from gradtrace_schemas.processes import life_of

_MOST_ATTEMPTS = 10_000
# Attempts that are looked at, from the newest: the others are of days ago.
_MOST_CANDIDATES = 200


@dataclass(frozen=True)
class Claim:
    """A rank's place: nobody else writes under this run, rank and attempt. `found_by` is how the ranks know it."""

    run: Path
    rank: int
    attempt: int
    found_by: str = "alone"

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
    rank: int
    attempt: int
    is_ancestor: bool


def living_rival(run: Path, identity: Identity) -> Rival | None:
    """Who else records this rank into this directory now: a second job by mistake, or the process that started us.

    A child with another world size is no helper: a job that looks at its model and then spawns its ranks. One of
    which nothing says how large its world is, is a helper of whatever ancestor is recorded.
    """
    ancestors = _ancestors()
    found: Rival | None = None
    for rank, attempt in _journals(run):
        is_ours = identity.world_size is None
        if rank != identity.rank and not is_ours:
            continue
        try:
            with open(layout.journal_file(run, rank, attempt), "rb") as file:
                header = np.frombuffer(file.read(HEADER.itemsize), HEADER, 1)[0]
            facts = json.loads(layout.rank_file(run, rank, attempt).read_text())
        except (OSError, ValueError):
            continue
        pid = int(header["pid"])
        if life_of(pid, int(header["process_start"]), int(header["machine"])) != "alive":
            continue
        is_ours = pid in ancestors and (is_ours or facts.get("world_size") == identity.world_size)
        if is_ours or (found is None and rank == identity.rank):
            found = Rival(pid, rank, attempt, is_ours)
    return found


def _journals(run: Path) -> list[tuple[int, int]]:
    try:
        names = os.listdir(run / layout.JOURNALS)
    except OSError:
        return []
    return sorted(place for name in names if (place := layout.rank_and_attempt(name)) is not None)


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


def claim_place(run: Path, identity: Identity, about: dict[str, Any]) -> Claim:
    """Join the attempt of this start of the job, or open it.

    `about` goes into run.json and the attempt's file. Raises OSError where the directory cannot be written.
    """
    for folder in (run / layout.ATTEMPTS, run / layout.RANKS, run / layout.JOURNALS):
        folder.mkdir(parents=True, exist_ok=True)
    launcher = identity.launcher
    store = None if launcher.is_certain else group_store()
    started = {
        "world_size": identity.world_size,
        "schema_version": SCHEMA_VERSION,
        "started_unix_ns": time.time_ns(),
        **about,
    }
    _create(run / layout.RUN_FILE, started)
    began = begin_of_this_process()
    known: set[int] = set()
    generation = 0
    for _ in range(_MOST_ATTEMPTS):
        known |= _attempts(run)
        found = _joinable(run, identity, began, known, has_store=store is not None)
        token = uuid.uuid4().hex if found is None else found[1]
        found_by: str = launcher.how
        if store is not None:
            # A store may outlive a restart, and ranks that have a place there already begin the next start.
            said = agreed(store, f"{launcher.restart}/{generation}", token)
            if said is None:
                store = None
                continue
            token, found_by = said, "store"
        facts = {"kind": launcher.kind, "found_by": found_by, "key": launcher.key}
        facts["parent"] = launcher.parent
        attempt = _attempt_of(run, token, {"token": token, **started, "launcher": facts}, known)
        if attempt is None:
            continue  # another process has just opened that number: this start's, perhaps
        path = layout.rank_file(run, identity.rank, attempt)
        empty = {"rank": identity.rank, "attempt": attempt, "complete": False}
        if _create(path, {**empty, "world_size": identity.world_size}):
            return Claim(run, identity.rank, attempt, found_by)
        generation += 1
    raise OSError(f"{run} holds {_MOST_ATTEMPTS} attempts already; record into another directory")


def _joinable(
    run: Path, identity: Identity, began: float, known: set[int], *, has_store: bool
) -> tuple[int, str] | None:
    """(attempt, token) of the newest one that this rank may be part of, by what it knows without the store."""
    launcher = identity.launcher
    # The size of a world is next to nothing, and a store tells any two jobs apart.
    if launcher.how == "alone" or (has_store and launcher.how == "world"):
        return None
    found: list[tuple[int, str]] = []
    for attempt in sorted(known, reverse=True)[:_MOST_CANDIDATES]:
        about = _about(layout.attempt_file(run, attempt))
        token, of = about.get("token"), about.get("launcher")
        if not isinstance(token, str) or not isinstance(of, dict):
            continue
        if of.get("key") != launcher.key or not _fits(about.get("world_size"), identity.world_size):
            continue
        if has_store and of.get("found_by") == "store":
            continue  # it stood in its store before it stood here: if that were ours, we would be told
        if layout.rank_file(run, identity.rank, attempt).exists():
            if launcher.is_certain:
                break  # a second start in there: one that is older and lacks this rank is not its
            continue
        # Where ranks never talk, one may end before the next begins: a loop in a shell.
        is_sibling = launcher.how == "world" and of.get("parent") == launcher.parent
        if launcher.is_certain or is_sibling or has_lived_at(began, run, attempt, about):
            found.append((attempt, token))
            if launcher.how != "world" or is_sibling:
                return found[-1]
    # Of two jobs of one size, neither is preferred: they would be mixed.
    return found[0] if len(found) == 1 else None


def _fits(one: object, other: int | None) -> bool:
    return one is None or other is None or one == other


def _attempts(run: Path) -> set[int]:
    numbers = (layout.attempt_of(name) for name in os.listdir(run / layout.ATTEMPTS))
    return {number for number in numbers if number is not None}


def _attempt_of(run: Path, token: str, content: dict[str, Any], known: set[int]) -> int | None:
    """The attempt of this token, opened if there is none; None where another one was opened meanwhile.

    It gets the number after those that are `known`, which were looked at: one that is taken by now goes there too, and
    is looked at next. (A network's file system may list it later still.)
    """
    for attempt in sorted(known | _attempts(run), reverse=True):
        if _about(layout.attempt_file(run, attempt)).get("token") == token:
            return attempt
    attempt = max(known, default=-1) + 1
    if _create(layout.attempt_file(run, attempt), content):
        return attempt
    known.add(attempt)
    return None


def _create(path: Path, content: dict[str, Any]) -> bool:
    """Create the file whole, or say that it was there: a link is never seen half written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex}")
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


def _about(path: Path) -> dict[str, Any]:
    """What an attempt's file says; empty where it cannot be read."""
    for _ in range(50):
        try:
            content = json.loads(path.read_text())
            return content if isinstance(content, dict) else {}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            time.sleep(0.01)  # only where O_EXCL stood in for a link
    return {}
