"""Names of a run's folders and files; the only place that joins them.

RUN/run.json                                      who started it, versions, settings, world size
RUN/attempts/<attempt>.json                       which start of the job an attempt number stands for
RUN/ranks/rank=00003-<attempt>.json               identity, counts, clock anchors; "complete" last
RUN/journals/rank=00003-<attempt>.journal         while the rank lives, or after it was killed
RUN/trigger                                       written by `analyzer trigger`, for ranks in flight mode
RUN/<table>/rank=00003/part-<attempt>-<n>.parquet
"""

from __future__ import annotations

import re
from pathlib import Path

RUN_FILE = "run.json"
ATTEMPTS, RANKS, JOURNALS = "attempts", "ranks", "journals"

# Numbers that fit the columns: a name with longer ones is none of ours.
_RANK_FILE = re.compile(r"rank=(\d{5,9})-(\d{1,9})\.(?:json|journal)$")
_RANK_FOLDER = re.compile(r"rank=(\d{5,9})$")
_PART = re.compile(r"part-(\d{1,9})-(\d{1,9})\.parquet$")
_ATTEMPT_FILE = re.compile(r"(\d{1,9})\.json$")

# Key of the Parquet metadata that says up to which record a part holds the journal's rows.
PART_LAST_RECORD = b"gradtrace.last_record_index"
PART_SCHEMA_VERSION = b"gradtrace.schema_version"


def trigger_file(run: Path) -> Path:
    """What ranks in flight mode look at: a new one asks them for parts."""
    return run / "trigger"


def rank_name(rank: int) -> str:
    """`rank=00003`: Hive-style, so that any engine reads the rank from the folder."""
    return f"rank={rank:05d}"


def attempt_file(run: Path, attempt: int) -> Path:
    """Where an attempt says which start of the job it stands for."""
    return run / ATTEMPTS / f"{attempt}.json"


def rank_file(run: Path, rank: int, attempt: int) -> Path:
    """The rank's json."""
    return run / RANKS / f"{rank_name(rank)}-{attempt}.json"


def journal_file(run: Path, rank: int, attempt: int) -> Path:
    """The rank's journal."""
    return run / JOURNALS / f"{rank_name(rank)}-{attempt}.journal"


def table_folder(run: Path, table: str, rank: int) -> Path:
    """The folder that holds a rank's parts of a table."""
    return run / table / rank_name(rank)


def part_file(run: Path, table: str, rank: int, attempt: int, number: int) -> Path:
    """One part of a table. While it is written, its name has a suffix in front of `.parquet`."""
    return table_folder(run, table, rank) / f"part-{attempt}-{number}.parquet"


def rank_and_attempt(name: str) -> tuple[int, int] | None:
    """(rank, attempt) of a rank's json or journal by its file name, None for any other file."""
    found = _RANK_FILE.search(name)
    return (int(found[1]), int(found[2])) if found else None


def rank_of_folder(name: str) -> int | None:
    """The rank that a Hive-style folder name stands for."""
    found = _RANK_FOLDER.fullmatch(name)
    return int(found[1]) if found else None


def attempt_and_number(name: str) -> tuple[int, int] | None:
    """(attempt, number) of a part by its file name, None for any other file."""
    found = _PART.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


def attempt_of(name: str) -> int | None:
    """The number of an attempt by its file name."""
    found = _ATTEMPT_FILE.fullmatch(name)
    return int(found[1]) if found else None
