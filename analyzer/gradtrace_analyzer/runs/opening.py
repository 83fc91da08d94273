"""Opens a run's directory: which ranks, which parts, whole or not, and what journals were left behind.

A run is read as it stands, while its job lives or after it was killed. What is missing never stops it: it
becomes a notice, which commands print on stderr. What the rows mean is left to the database.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gradtrace_analyzer.errors import NewerSchema, NoSuchAttempt, NotARun
from gradtrace_analyzer.runs.facts import understood
from gradtrace_analyzer.runs.files import JsonFiles, names_in, unreadable
from gradtrace_analyzer.runs.journals import Journal, found_journals, leftover_rows, without_gap
from gradtrace_analyzer.runs.parts import DamagedPart, Part, found_parts
from gradtrace_analyzer.runs.run import RankInfo, Run
from gradtrace_analyzer.words.numbers import ranks_phrase, spans, verb
from gradtrace_schemas import SCHEMA_VERSION, TABLES, layout
from gradtrace_schemas.journal_reader import Contents


def open_run(path: str | os.PathLike[str], attempt: int | None = None) -> Run:
    """The newest attempt of a run that recorded anything, or the one asked for.

    The order matters while the job lives: journals first, then parts, so that a row which moves from one to
    the other meanwhile is seen in at least one, and is taken from only one. The ranks' json come last.
    Raises NotARun, NoSuchAttempt, NewerSchema, Unreadable.
    """
    place = Path(path)
    found = _everything(place)
    return _one_attempt(place, found, _chosen_attempt(place, found, attempt))


def open_attempts(path: str | os.PathLike[str]) -> tuple[Run, ...]:
    """Every attempt of a run that recorded anything, the oldest first; the one that was opened last, if none did.

    Raises NotARun, NewerSchema.
    """
    place = Path(path)
    found = _everything(place)
    chosen = sorted(found.recorded) or [_chosen_attempt(place, found, None)]
    return tuple(_one_attempt(place, found, attempt) for attempt in chosen)


@dataclass(frozen=True)
class _Everything:
    """What lies in a run's directory, of all attempts: which there are, and which of them `recorded` anything."""

    journals: Sequence[Journal]
    parts: Sequence[Part]
    damaged: Sequence[DamagedPart]
    rank_files: Mapping[tuple[int, int], Path]
    recorded: frozenset[int]
    attempts: tuple[int, ...]


def _everything(place: Path) -> _Everything:
    require_run(place)
    journals = found_journals(place)
    parts, damaged = _sorted_out(found_parts(os.path.abspath(place)))
    rank_files = _rank_files(place)
    recorded = {j.attempt for j in journals} | {p.attempt for p in parts}
    recorded |= {d.part.attempt for d in damaged} | {number for _, number in rank_files}
    attempts = tuple(sorted(recorded | _opened_attempts(place)))
    return _Everything(journals, parts, damaged, rank_files, frozenset(recorded), attempts)


def _one_attempt(place: Path, found: _Everything, chosen: int) -> Run:
    attempts, rank_files, damaged = found.attempts, found.rank_files, found.damaged
    journals = [j for j in found.journals if j.attempt == chosen]
    contents = {j.rank: j.contents for j in journals if j.contents is not None}
    by_table = _by_table_and_rank(p for p in found.parts if p.attempt == chosen)
    read = JsonFiles(place, understood)
    run_info = read(place / layout.RUN_FILE)
    about = read(layout.attempt_file(place, chosen))
    for source in (run_info, about, *(c.header for c in contents.values())):
        _require_known_schema(place, source.get("schema_version"))
    seen = set(contents) | {rank for by_rank in by_table.values() for rank in by_rank}
    ranks = _ranks(rank_files, chosen, seen, contents, read)
    flights = {rank for rank, info in ranks.items() if info.flight_steps}
    contents |= {rank: without_gap(contents[rank]) for rank in flights & set(contents)}
    run = Run(
        path=place,
        name=os.path.basename(os.path.abspath(place)),
        attempt=chosen,
        attempts=attempts,
        run_info=run_info,
        world_size=_world_size(run_info, about, ranks),
        ranks=ranks,
        parts=by_table,
        leftovers=_leftovers(contents, by_table, flights),
        journals=contents,
        schema_version=_schema_version(about, run_info, by_table),
    )
    damage = [d for d in damaged if d.part.attempt == chosen]
    notices = (*_notices(run, found.recorded, damage, journals), *read.notices)
    return replace(run, damaged=tuple(damage), notices=notices)


def require_run(place: Path) -> None:
    """Raise NotARun, with what is there instead, where this is no run's directory; Unreadable where it may not be."""
    try:
        place.stat()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise unreadable(place, error) from None
    if not place.exists():
        raise NotARun(f"{place} does not exist; give the directory that GRADTRACE_DIR named")
    if not place.is_dir():
        raise NotARun(f"{place} is a file; give the directory of a run")
    names = set(names_in(place))
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


def _schema_version(
    about: Mapping[str, Any],
    run_info: Mapping[str, Any],
    by_table: Mapping[str, Mapping[int, Sequence[Part]]],
) -> int:
    """What the attempt or the run says; of a run that lost its json what its parts say, else today's."""
    for said in (about.get("schema_version"), run_info.get("schema_version")):
        if isinstance(said, int):
            return said
    for by_rank in by_table.values():
        for part in itertools.chain.from_iterable(by_rank.values()):
            with contextlib.suppress(OSError, pa.ArrowException, ValueError):
                metadata = pq.read_schema(part.path).metadata or {}
                return int(metadata.get(layout.PART_SCHEMA_VERSION, b""))
    return SCHEMA_VERSION


def _rank_files(run: Path) -> dict[tuple[int, int], Path]:
    """The paths of the ranks' json, by (rank, attempt), of all attempts."""
    folder = run / layout.RANKS
    found = ((layout.rank_and_attempt(n), n) for n in names_in(folder) if n.endswith(".json"))
    return {place: folder / name for place, name in found if place is not None}


def _opened_attempts(run: Path) -> set[int]:
    numbers = (layout.attempt_of(name) for name in names_in(run / layout.ATTEMPTS))
    return {number for number in numbers if number is not None}


def _chosen_attempt(place: Path, found: _Everything, asked: int | None) -> int:
    if asked is None:
        return max(found.recorded or found.attempts, default=0)
    if asked not in found.attempts:
        held = (
            f"it has {spans(found.attempts)}"
            if found.attempts
            else "nothing was recorded there yet"
        )
        raise NoSuchAttempt(f"{place} holds no attempt {asked}; {held}")
    return asked


def _sorted_out(found: Iterable[Part | DamagedPart]) -> tuple[list[Part], list[DamagedPart]]:
    whole: list[Part] = []
    damaged: list[DamagedPart] = []
    for part in found:
        if isinstance(part, DamagedPart):
            damaged.append(part)
        else:
            whole.append(part)
    return whole, damaged


def _by_table_and_rank(parts: Iterable[Part]) -> dict[str, dict[int, tuple[Part, ...]]]:
    """Every table is a key; a rank is one where it has parts."""
    collected: dict[str, dict[int, list[Part]]] = {name: {} for name in TABLES}
    for part in parts:
        collected[part.table].setdefault(part.rank, []).append(part)
    return {
        table: {rank: tuple(by_rank[rank]) for rank in sorted(by_rank)}
        for table, by_rank in collected.items()
    }


def _ranks(
    files: Mapping[tuple[int, int], Path],
    attempt: int,
    seen: set[int],
    journals: Mapping[int, Contents],
    read: JsonFiles,
) -> dict[int, RankInfo]:
    """Every rank that left a json, a part or a journal. A journal tells what a json does not."""
    known = {rank: path for (rank, number), path in files.items() if number == attempt}
    found: dict[int, RankInfo] = {}
    for rank in sorted(seen | set(known)):
        facts: dict[str, Any] = {"complete": False}
        if rank in journals:
            header = journals[rank].header
            facts |= {name: header[name] for name in ("pid", "wall_start_ns", "monotonic_start_ns")}
        facts |= read(known[rank]) if rank in known else {}
        found[rank] = RankInfo(rank, facts | {"rank": rank, "attempt": attempt})
    return found


def _world_size(
    run_info: Mapping[str, Any], about: Mapping[str, Any], ranks: Mapping[int, RankInfo]
) -> int | None:
    sources = (*(info.facts for info in ranks.values()), about or run_info)
    sizes = [size for s in sources if isinstance(size := s.get("world_size"), int)]
    return max(sizes, default=None)


def _leftovers(
    journals: Mapping[int, Contents],
    parts: Mapping[str, Mapping[int, tuple[Part, ...]]],
    flights: Collection[int],
) -> dict[str, dict[int, pa.Table]]:
    found: dict[str, dict[int, pa.Table]] = {}
    for rank, contents in sorted(journals.items()):
        of_rank = {table: by_rank.get(rank, ()) for table, by_rank in parts.items()}
        for table, rows in leftover_rows(contents, of_rank, is_ring=rank in flights).items():
            found.setdefault(table, {})[rank] = rows
    return found


def _notices(
    run: Run, recorded: Collection[int], damaged: Iterable[DamagedPart], journals: Iterable[Journal]
) -> Iterator[str]:
    older = [a for a in run.attempts if a < run.attempt and a in recorded]
    newer = [a for a in run.attempts if a > run.attempt]
    if older:
        yield f"{run.path}: attempt {run.attempt} is read, not {spans(older)} before it (--attempt)"
    if newer:
        why = "which is newer" if set(newer) & set(recorded) else "which recorded nothing"
        yield f"{run.path}: attempt {run.attempt} is read, not {spans(newer)}, {why} (--attempt)"
    if run.missing_ranks:
        asked = {
            ",".join(map(str, chosen))
            for info in run.ranks.values()
            if (chosen := (info.facts.get("settings") or {}).get("ranks"))
        }
        because = f"; GRADTRACE_RANKS was {' or '.join(sorted(asked))}" if asked else ""
        yield f"{run.path} lacks {ranks_phrase(run.missing_ranks)} of {run.world_size}{because}"
    if run.incomplete_ranks:
        read = sum(len(rows) for by_rank in run.leftovers.values() for rows in by_rank.values())
        were = verb(read, "row was", "rows were")
        rows = f"; {read:,} {were} read from journals" if read else ""
        repaired = [r for r in run.incomplete_ranks if run.ranks[r].facts.get("left_behind")]
        others = [r for r in run.incomplete_ranks if r not in repaired]
        if repaired:
            yield (
                f"{run.path}: {ranks_phrase(repaired)} did not close the recording (killed), which was repaired"
            )
        if others:
            yield (
                f"{run.path}: {ranks_phrase(others)} did not close the recording "
                f"(killed, or still running){rows}"
            )
    if run.flight_steps is not None:
        yield (
            f"{run.path} is a flight recording: of each rank its last steps ({run.flight_steps} at most) are there, "
            "and those before a trigger (analyzer info)"
        )
    torn = sum(contents.torn_count for contents in run.journals.values())
    if torn:
        yield f"{run.path}: {torn:,} journal records were only half written, and are left out"
    for journal in journals:
        if journal.contents is None:
            yield (
                f"{run.path}: the journal of rank {journal.rank} cannot be read, "
                f"its last rows are missing: {journal.why_unreadable}"
            )
    for d in damaged:
        yield (
            f"{run.path}: {d.part.short_name} {d.why}; the rows of {d.part.table} that rank "
            f"{d.part.rank} had in it are missing from every answer"
        )
