"""What the ranks of a run recorded, what of it is lost or missing, and why."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gradtrace_analyzer.doctor.finding import Finding
from gradtrace_analyzer.failures.endings import Ending, Endings, State, endings
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.sql.inventory import Inventory, inventory
from gradtrace_analyzer.sql.views import connect
from gradtrace_analyzer.words.numbers import (
    counted,
    counts_phrase,
    ranks_phrase,
    spans,
    steps_phrase,
    verb,
)

_STEPS = """
SELECT rank, min(step), max(step), count(DISTINCT step) FROM steps GROUP BY rank ORDER BY rank
"""


@dataclass(frozen=True)
class RankRecorded:
    """What one rank of the job left. Steps are those that ended; None where none did."""

    rank: int
    state: State
    first_step: int | None
    last_step: int | None
    step_count: int
    tables: tuple[str, ...]


@dataclass(frozen=True)
class Recorded:
    """All ranks of an attempt, those that recorded nothing among them, and the findings on them."""

    run: Run
    ranks: tuple[RankRecorded, ...]
    findings: tuple[Finding, ...]


def recorded(run: Run) -> Recorded:
    """What the run holds, rank by rank, and what it lacks."""
    held, ended = inventory(run), endings(run)
    with contextlib.closing(connect([run])) as connection:
        steps = {rank: rest for rank, *rest in connection.execute(_STEPS).fetchall()}
    ranks = []
    for ending in ended.ranks:
        first, last, count = steps.get(ending.rank, (None, None, 0))
        tables = tuple(name for name in run.parts if ending.rank in _ranks_of(run, name))
        ranks.append(RankRecorded(ending.rank, ending.state, first, last, count, tables))
    findings = (
        *_ranks(run, ranks),
        *_closed(run, ended),
        *_lost(run, held),
        *_left_out(held, ranks),
    )
    return Recorded(run, tuple(ranks), findings)


def _ranks_of(run: Run, table: str) -> set[int]:
    return set(run.parts[table]) | set(run.leftovers.get(table, {}))


def _ranks(run: Run, ranks: Sequence[RankRecorded]) -> Iterator[Finding]:
    there = [one for one in ranks if one.state not in ("missing", "not_asked")]
    world = "" if run.world_size is None else f" of {run.world_size}"
    if not there:
        yield Finding(
            "ranks",
            "wrong",
            "nothing was recorded",
            "analyzer doctor, where the job is started, says whether one would be",
        )
        return
    alike: dict[tuple[int | None, int | None, int], list[int]] = {}
    for one in there:
        alike.setdefault((one.first_step, one.last_step, one.step_count), []).append(one.rank)
    said = "; ".join(
        f"{ranks_phrase(same)}{world if len(alike) == 1 else ''} recorded {_steps_text(*steps)}"
        for steps, same in alike.items()
    )
    yield Finding("ranks", "ok" if len(alike) == 1 else "note", said)
    if run.as_joined is not None:
        yield Finding("attempts", "ok", f"read as one history: {run.as_joined}")
    read = {run.attempt, *(of.run.attempt for of in run.history)}
    older = [number for number in run.attempts if number not in read]
    if older:
        yield Finding(
            "attempts",
            "note",
            f"this is attempt {run.attempt}; the directory holds {spans(older)} too",
            f"analyzer doctor --attempt {older[-1]} {run.path}",
        )


def _steps_text(first: int | None, last: int | None, count: int) -> str:
    if first is None or last is None:
        return "no step to its end"
    if count == last - first + 1:
        return steps_phrase(range(first, last + 1))
    return f"{counted(count, 'step')} from {first} to {last}"


def _closed(run: Run, ended: Endings) -> Iterator[Finding]:
    """How ranks ended, as far as it is about their recordings."""
    asked = f"analyzer failures {run.path}"

    def ranks(found: Sequence[Ending]) -> str:
        return ranks_phrase([ending.rank for ending in found])

    if missing := ended.of("missing"):
        yield Finding(
            "missing",
            "wrong",
            f"{ranks(missing)} of {run.world_size} left nothing here: "
            f"{verb(missing, 'it', 'they')} died before the first event, or ran without gradtrace, or with another "
            "GRADTRACE_DIR",
            "analyzer doctor, run as those ranks are, says whether they would be recorded",
        )
    if left_out := ended.of("not_asked"):
        yield Finding(
            "missing", "note", f"{ranks(left_out)} of {run.world_size} left out by GRADTRACE_RANKS"
        )
    well = ended.of("ended", "raised")
    if well:
        yield Finding(
            "closed", "ok", f"{ranks(well)} closed {verb(well, 'its', 'their')} recording"
        )
    if raised := ended.of("raised"):
        yield Finding(
            "exceptions", "note", f"{ranks(raised)} met an exception; no row is lost by it", asked
        )
    if died := ended.of("died"):
        yield _not_closed(run, died, f"{ranks(died)} died")
    if silent := ended.of("silent"):
        yield _not_closed(run, silent, f"{ranks(silent)} fell silent")
    if lives := ended.of("running", "stuck", "waits"):
        yield Finding(
            "closed",
            "note",
            f"{ranks(lives)} {verb(lives, 'is', 'are')} running: there will be more",
            asked,
        )
    if unknown := ended.of("unknown"):
        yield Finding(
            "closed",
            "wrong",
            f"{ranks(unknown)} did not close {verb(unknown, 'its', 'their')} recording, and the journal is gone "
            "or cannot be read: the last rows are lost",
            asked,
        )


def _not_closed(run: Run, gone: Sequence[Ending], said: str) -> Finding:
    """A rank that was killed loses nothing that its journal keeps."""
    ranks = {ending.rank for ending in gone}
    rows = sum(
        len(rows)
        for by_rank in run.leftovers.values()
        for rank, rows in by_rank.items()
        if rank in ranks
    )
    said += f" without closing {verb(gone, 'its', 'their')} recording"
    if rows:
        said += f"; {rows:,} {verb(rows, 'row is', 'rows are')} read from the journal"
    repair = f", analyzer repair {run.path}" if rows else ""
    return Finding("closed", "wrong", said, f"analyzer failures {run.path}{repair}")


def _lost(run: Run, held: Inventory) -> Iterator[Finding]:
    if held.dropped:
        yield Finding(
            "dropped",
            "wrong",
            f"{counts_phrase(held.dropped)} found no room in the journal: the disk was slower than the job",
            "record less (GRADTRACE_STEPS, GRADTRACE_DETAIL, GRADTRACE_SUMMARY=norms), or on a faster disk",
        )
    for damage in run.damaged:
        part = damage.part
        yield Finding(
            "damaged",
            "wrong",
            f"{part.short_name} {damage.why}: the rows of {part.table} that it held of rank {part.rank} are lost",
        )
    torn = sum(contents.torn_count for contents in run.journals.values())
    if torn:
        yield Finding(
            "torn",
            "note",
            f"{counted(torn, 'record')} of journals were only half written at the end",
        )
    for problem in held.problems:
        yield Finding("problem", "wrong", problem)


def _left_out(held: Inventory, ranks: Sequence[RankRecorded]) -> Iterator[Finding]:
    """What is not there by somebody's choice, or by its nature."""
    if asked := _asked(held.settings):
        yield Finding("settings", "note", f"by request: {asked}")
    if held.unsummarised:
        yield Finding(
            "unsummarised",
            "note",
            f"without a summary, by reason: {counts_phrase(held.unsummarised)}",
        )
    if held.left_to_python:
        yield Finding(
            "left to Python",
            "note",
            f"backward passes, by reason: {counts_phrase(held.left_to_python)}",
        )
    if held.replay_skipped:
        yield Finding(
            "not run again", "note", f"Nodes, by reason: {counts_phrase(held.replay_skipped)}"
        )
    there = [one for one in ranks if one.tables]
    for table in sorted({name for one in there for name in one.tables}):
        of = [one.rank for one in there if table in one.tables]
        if len(of) < len(there):
            yield Finding("tables", "note", f"{table} are of {ranks_phrase(of)} alone")


def _asked(settings: Mapping[str, Sequence[str]]) -> str:
    """Settings that leave something out."""
    usual = {
        "detail": {"nodes"}, "summary": {"full"}, "steps": {"[]"}, "ranks": {"[]"}, "modules": {"[]"},
        "mode": {"whole"},
    }  # fmt: skip
    return ", ".join(
        f"{name} {' and '.join(map(_plain, values))}"
        for name, values in settings.items()
        if name in usual and set(values) - usual[name]
    )


def _plain(value: str) -> str:
    """`0:10:1,50:51:1` of a list in JSON, as settings lie in the inventory."""
    return ",".join(json.loads(value)) if value.startswith("[") else value
