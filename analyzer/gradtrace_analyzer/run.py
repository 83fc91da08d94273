"""Opens a run's directory: which ranks, which parts, whole or not, and what journals were left behind.

A run is read as it stands, while its job lives or after it was killed. What is missing never stops it: it
becomes a notice, which commands print on stderr. What the rows mean is left to the database.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from gradtrace_analyzer.errors import NewerSchema, NoSuchAttempt, NotARun
from gradtrace_analyzer.parts import DamagedPart, Part, found_parts, last_record
from gradtrace_schemas import SCHEMA_VERSION, TABLES, layout
from gradtrace_schemas.batches import arrow_table
from gradtrace_schemas.journal import JOURNAL_TABLES, Contents, UnreadableJournal, read_journal

PartsByRank = Mapping[int, tuple[Part, ...]]


@dataclass(frozen=True)
class RankInfo:
    """What a rank says of itself: its json, with the columns of the table `ranks` as keys."""

    rank: int
    facts: Mapping[str, Any]

    @property
    def is_complete(self) -> bool:
        """Whether the rank closed its recording itself."""
        return self.facts.get("complete") is True

    @property
    def host(self) -> str | None:
        """Name of its machine, None where it died before it said so."""
        host = self.facts.get("host")
        return host if isinstance(host, str) else None


@dataclass(frozen=True)
class Run:
    """One attempt of a run, as it stood when it was opened.

    `parts` and `leftovers` are by table, then rank; `leftovers` are the rows that only a journal holds, with a
    column `rank`. `journals` keeps each journal whole: what its threads were running is in there.
    """

    path: Path
    name: str
    attempt: int
    attempts: tuple[int, ...]
    run_info: Mapping[str, Any]
    world_size: int | None
    ranks: Mapping[int, RankInfo]
    parts: Mapping[str, PartsByRank]
    leftovers: Mapping[str, Mapping[int, pa.Table]]
    journals: Mapping[int, Contents]
    notices: tuple[str, ...]

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks of the job that left nothing."""
        return tuple(r for r in range(self.world_size or 0) if r not in self.ranks)

    @property
    def incomplete_ranks(self) -> tuple[int, ...]:
        """Ranks that did not close their recording: dead, or still running."""
        return tuple(r for r, info in self.ranks.items() if not info.is_complete)


def open_run(path: str | os.PathLike[str], attempt: int | None = None) -> Run:
    """The newest attempt of a run that recorded anything, or the one asked for.

    The order matters while the job lives: journals first, then parts, so that a row which moves from one to
    the other meanwhile is seen in at least one, and is taken from only one. The ranks' json come last.
    Raises NotARun, NoSuchAttempt, NewerSchema.
    """
    place = Path(path)
    absolute = os.path.abspath(place)
    _require_run(place)
    run_info = _read_json(place / layout.RUN_FILE) or {}
    _require_known_schema(place, run_info.get("schema_version"))
    journals, unreadable = _read_journals(place)
    parts = found_parts(absolute)
    rank_files = _rank_files(place)
    recorded = {a for _, a in rank_files} | {a for _, a in journals}
    recorded |= {p.part.attempt if isinstance(p, DamagedPart) else p.attempt for p in parts}
    attempts = tuple(sorted(recorded | _opened_attempts(place)))
    chosen = _chosen_attempt(place, attempts, recorded, attempt)
    about = _read_json(layout.attempt_file(place, chosen)) or {}
    _require_known_schema(place, about.get("schema_version"))

    of_attempt = {rank: found for (rank, a), found in journals.items() if a == chosen}
    for contents in of_attempt.values():
        _require_known_schema(place, contents.header["schema_version"])
    whole: dict[str, dict[int, list[Part]]] = {name: defaultdict(list) for name in TABLES}
    for part in parts:
        if isinstance(part, Part) and part.attempt == chosen:
            whole[part.table][part.rank].append(part)
    seen = set(of_attempt) | {rank for by_rank in whole.values() for rank in by_rank}
    ranks = _ranks(rank_files, chosen, seen, of_attempt)
    damaged = [p for p in parts if isinstance(p, DamagedPart) and p.part.attempt == chosen]
    leftovers = _leftovers(of_attempt, whole, chosen)
    world_size = _world_size(run_info, about, ranks)
    notices = [
        *_attempt_notices(place, chosen, attempts, recorded),
        *(
            f"{place}: {d.part.short_name} {d.why}; rank {d.part.rank}'s rows of {d.part.table} "
            "in it are missing from every answer"
            for d in damaged
        ),
        *(
            f"{place}: the journal of rank {rank} cannot be read: {why}"
            for (rank, a), why in unreadable.items()
            if a == chosen
        ),
    ]
    run = Run(
        path=place,
        name=os.path.basename(absolute),
        attempt=chosen,
        attempts=attempts,
        run_info=run_info,
        world_size=world_size,
        ranks=ranks,
        parts={t: {r: tuple(p) for r, p in by_rank.items()} for t, by_rank in whole.items()},
        leftovers=leftovers,
        journals=of_attempt,
        notices=(),
    )
    return Run(**{**vars(run), "notices": (*notices, *_rank_notices(run))})


def spans(numbers: Iterable[int]) -> str:
    """Numbers as a person writes them: `0-3,8-15`."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in found)


def ranks_phrase(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 4-7`."""
    text = spans(ranks)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


def _require_run(place: Path) -> None:
    if not place.exists():
        raise NotARun(f"{place} does not exist; give the directory that GRADTRACE_DIR named")
    if not place.is_dir():
        raise NotARun(f"{place} is a file; give the directory of a run")
    names = set(os.listdir(place))
    if not names:
        raise NotARun(f"{place} is empty; nothing was recorded there yet")
    if not names & {layout.RUN_FILE, layout.RANKS, layout.JOURNALS, *TABLES}:
        raise NotARun(
            f"{place} is no run: it has neither {layout.RUN_FILE} nor a table's folder; "
            "give the directory that GRADTRACE_DIR named"
        )


def _require_known_schema(place: Path, version: object) -> None:
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise NewerSchema(
            f"{place} was written with schema {version}, this gradtrace reads up to "
            f"{SCHEMA_VERSION}; install a newer one"
        )


def _read_json(path: Path) -> dict[str, Any] | None:
    """The file's object, None where it is absent, cut off or no object."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _listed(folder: Path, suffix: str) -> dict[tuple[int, int], Path]:
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    found = ((layout.rank_and_attempt(name), name) for name in names if name.endswith(suffix))
    return {place: folder / name for place, name in found if place is not None}


def _rank_files(run: Path) -> dict[tuple[int, int], Path]:
    return _listed(run / layout.RANKS, ".json")


def _opened_attempts(run: Path) -> set[int]:
    try:
        names = os.listdir(run / layout.ATTEMPTS)
    except (FileNotFoundError, NotADirectoryError):
        return set()
    return {number for name in names if (number := layout.attempt_of(name)) is not None}


def _chosen_attempt(
    place: Path, attempts: tuple[int, ...], recorded: set[int], asked: int | None
) -> int:
    if asked is None:
        return max(recorded, default=max(attempts, default=0))
    if asked not in attempts:
        held = f"attempts {spans(attempts)}" if attempts else "no attempt at all"
        raise NoSuchAttempt(f"{place} holds no attempt {asked}; it has {held}")
    return asked


def _read_journals(
    run: Path,
) -> tuple[dict[tuple[int, int], Contents], dict[tuple[int, int], str]]:
    """(journals, why others are unreadable), each by rank and attempt."""
    read: dict[tuple[int, int], Contents] = {}
    unreadable: dict[tuple[int, int], str] = {}
    for place, path in _listed(run / layout.JOURNALS, ".journal").items():
        try:
            with open(path, "rb", buffering=0) as file:
                records_first = file.readall()
                # The records of a living rank may use strings that are newer than the header just read.
                file.seek(0)
                start = records_first.find(b"\0" * 64, len(records_first))
                del start
                data = file.readall()
            read[place] = read_journal(data)
        except FileNotFoundError:
            continue  # the rank ended meanwhile: all its rows are in parts
        except (OSError, UnreadableJournal) as error:
            unreadable[place] = str(error)
    return read, unreadable
