"""Opens a run's attempts as the history that they are: which of them continue each other, and what is read of each."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import duckdb

from gradtrace_analyzer.runs.attempts import AttemptStory, Link, Span, is_doubtful, link
from gradtrace_analyzer.runs.last_seen import last_seen
from gradtrace_analyzer.runs.opening import open_attempts, open_run
from gradtrace_analyzer.runs.run import RankInfo, Run, Stretch
from gradtrace_analyzer.sql.views import connect
from gradtrace_analyzer.words.numbers import ranks_phrase, spans
from gradtrace_schemas.modules import MODULE_CALLS
from gradtrace_schemas.nodes import BACKWARD_PASSES
from gradtrace_schemas.steps import PARAMETERS, STEPS

# Those of which any row says that a step was reached. Nodes are many, and lie in backward passes.
_TABLES = (STEPS, PARAMETERS, MODULE_CALLS, BACKWARD_PASSES)

# Settings that decide which rows there are.
_ASKED = ("detail", "summary", "modules", "steps", "ranks", "mode")
_TOLD_TEXT = 100


def open_history(path: str | os.PathLike[str], attempt: int | None = None) -> Run:
    """The newest attempt of a run with those that it continues, or the attempt asked for, alone.

    Raises NotARun, NoSuchAttempt, NewerSchema.
    """
    if attempt is not None:
        return open_run(path, attempt)
    runs = open_attempts(path)
    return runs[0] if len(runs) == 1 else _joined(runs)


@dataclass(frozen=True)
class _Member:
    """An attempt of a history, in whose numbers its `span` is, and the step with which it took over."""

    run: Run
    span: Span
    link: Link
    begins: int


def _joined(runs: Sequence[Run]) -> Run:
    chain: list[_Member] = []
    told: dict[int, AttemptStory] = {}
    for run in runs:
        span = _span(run)
        if span.first is None:
            told[run.attempt] = AttemptStory(run.attempt, _ending(run), None, None)
            continue
        found = _link(chain, run, span) if chain else Link()
        member = _member(run, span, found)
        same = None if found.joined_by is None else _same_parameters(chain, member)
        chain = [*chain, member] if found.joined_by is not None else [member]
        told[run.attempt] = AttemptStory(
            run.attempt,
            _ending(member.run),
            member.span.first,
            member.span.last,
            step_shift=found.step_shift,
            joined_by=found.joined_by,
            why_not=found.why_not,
            same_parameters=same,
            **_against_earlier(chain),
        )
    newest = runs[-1]
    if (
        not chain or chain[-1].run.attempt != newest.attempt
    ):  # it recorded no step: what it is, nobody can tell
        chain = []
    history = _history(chain)
    for of in history:
        story = told[of.run.attempt]
        assert story.first is not None and story.last is not None
        last = story.last if of.end is None else min(story.last, of.end - 1)
        told[of.run.attempt] = replace(
            story, read=(story.first, last) if last >= story.first else None
        )
    if not history and newest.attempt in told:
        alone = told[newest.attempt]
        read = None if alone.first is None or alone.last is None else (alone.first, alone.last)
        told[newest.attempt] = replace(alone, read=read)
    stories = tuple(told.values())
    if len(history) < 2:
        return replace(newest, stories=stories)
    return replace(
        newest,
        history=history,
        stories=stories,
        step_shift=chain[-1].run.step_shift,
        ranks=_merged_ranks(history),
        damaged=tuple(d for of in history for d in of.run.damaged),
        notices=tuple(_notices(newest, history)),
        schema_version=min(of.run.schema_version for of in history),
    )


def _member(run: Run, span: Span, found: Link) -> _Member:
    shift = found.step_shift
    assert span.first is not None and span.last is not None
    begins = span.first if span.begins is None else span.begins
    moved = replace(span, first=span.first + shift, last=span.last + shift)
    return _Member(run.shifted(shift), moved, found, begins + shift)


def _link(chain: Sequence[_Member], run: Run, span: Span) -> Link:
    first, last = _bounds(chain)
    equal: frozenset[int] = frozenset()
    if span.numbered_by is None or is_doubtful(chain[-1].span, span):
        equal = continued_steps([of.run for of in chain], run)
    return link([of.span for of in chain], first, last, span, equal)


def _same_parameters(chain: Sequence[_Member], member: _Member) -> bool | None:
    """Whether an attempt began with the parameters that the history had where it took over: numbers alone do not say.

    None where either did not record them, or the attempt recorded nothing of the step with which it took over.
    """
    if member.link.joined_by == "parameters":
        return True
    if member.span.first != member.begins:
        return None
    step, ranks = member.begins, sorted(member.run.ranks)
    mine = _states_of(member.run, ranks, "before", step)
    for earlier in reversed(chain):
        for point, at in (("before", step), ("after", step - 1)):
            theirs = _states_of(earlier.run, ranks, point, at)
            both = mine.keys() & theirs.keys()
            if both:
                return all(mine[rank] == theirs[rank] for rank in both)
    return None


def _states_of(run: Run, ranks: Sequence[int], point: str, step: int) -> dict[int, tuple[int, int]]:
    with contextlib.closing(connect([run], tables=(PARAMETERS,))) as connection:
        found = _states(connection, ranks, point, step=step)
    return {rank: state for (rank, _), state in found.items()}


def _bounds(chain: Sequence[_Member]) -> tuple[int, int]:
    firsts = [of.span.first for of in chain if of.span.first is not None]
    lasts = [of.span.last for of in chain if of.span.last is not None]
    return min(firsts), max(lasts)


def _against_earlier(chain: Sequence[_Member]) -> dict[str, Any]:
    """Of the newest of a history, the steps that others had done before, and those that nobody did."""
    *earlier, mine = chain
    if not earlier:
        return {}
    _, last = _bounds(earlier)
    if mine.begins > last + 1:
        return {"gap": (last + 1, mine.begins - 1)}
    return {"repeated": (mine.begins, last)} if mine.begins <= last else {}


def _history(chain: Sequence[_Member]) -> tuple[Stretch, ...]:
    """What is read of each: up to where the first of those after it took over."""
    found: list[Stretch] = []
    end: int | None = None
    for of in reversed(chain):
        assert of.span.last is not None
        found.insert(0, Stretch(of.run, end, end is None or of.span.last < end))
        end = of.begins if end is None else min(end, of.begins)
    return tuple(found)


def _span(run: Run) -> Span:
    with contextlib.closing(connect([run], tables=_TABLES)) as connection:
        union = " UNION ALL ".join(
            f"SELECT min(step) AS first, max(step) AS last FROM {table.name}" for table in _TABLES
        )
        row = connection.execute(f"SELECT min(first), max(last) FROM ({union})").fetchone()
        first, last = row if row is not None else (None, None)
        # A rank that was killed did not say why its first step has its number.
        is_counted = connection.execute(
            "SELECT bool_or(framework_step IS NOT NULL) FROM steps WHERE step = ?", [first]
        ).fetchone() == (True,)
    offset = max((_setting(info, "step_offset") or 0 for info in run.ranks.values()), default=0)
    said = {info.facts.get("first_step_from") for info in run.ranks.values()}
    rules = {info.facts.get("step_rule") for info in run.ranks.values()}
    numbered_by: Any = None
    if offset:
        numbered_by = "offset"
    elif "framework" in said or is_counted:
        numbered_by = "framework"
    elif first and ("job" in rules or not _is_filtered(run)):
        numbered_by = "job"
    asked = {
        name: value
        for info in run.ranks.values()
        for name in _ASKED
        if (value := _setting(info, name)) not in (None, [], "")
    }
    return Span(
        attempt=run.attempt,
        first=first,
        last=last,
        numbered_by=numbered_by,
        begins=offset if numbered_by == "offset" else None,
        world_size=run.world_size,
        asked=", ".join(
            f"{name} {value if isinstance(value, str) else json.dumps(value)}"
            for name, value in asked.items()
        ),
        began_ns=min(_times(run, "wall_start_ns"), default=None),
        seen_ns=max(_last_seen_ns(run), default=None),
    )


def _times(run: Run, name: str) -> Iterator[int]:
    return (t for info in run.ranks.values() if isinstance(t := info.facts.get(name), int))


def _last_seen_ns(run: Run) -> Iterator[int]:
    yield from _times(run, "wall_end_ns")
    for rank in run.incomplete_ranks:
        seen = last_seen(run, rank)
        if seen is not None:
            yield time.time_ns() if seen.life == "alive" else seen.last_unix_ns


def _setting(info: RankInfo, name: str) -> Any:
    settings = info.facts.get("settings")
    return settings.get(name) if isinstance(settings, dict) else None


def _is_filtered(run: Run) -> bool:
    """Whether the first step that is there need not be the first that was made."""
    return run.flight_steps is not None or any(
        _setting(info, "steps") for info in run.ranks.values()
    )


def _ending(run: Run) -> str:
    """`ended`, `rank 0 ended with ValueError: its text`, `ranks 0-1 died in step 7`."""
    said: dict[str, list[int]] = {}
    for rank, info in run.ranks.items():
        uncaught = info.facts.get("uncaught")
        if isinstance(uncaught, list) and len(uncaught) == 2:
            text = str(uncaught[1]).strip().splitlines()
            told = f"{uncaught[0]}: {text[0][:_TOLD_TEXT]}" if text else str(uncaught[0])
            said.setdefault(f"ended with {told}", []).append(rank)
        elif not info.is_complete:
            seen = last_seen(run, rank)
            if seen is None or seen.closed_ns:
                continue
            did = {"dead": "died", "silent": "gave no sign of life any more"}.get(seen.life)
            if did is None:
                said.setdefault("runs", []).append(rank)
                continue
            where = "" if seen.place is None else f" in step {seen.place.step}"
            said.setdefault(f"{did}{where}", []).append(rank)
    if not said:
        return "ended" if run.ranks and not run.incomplete_ranks else "left no word of its end"
    return "; ".join(f"{ranks_phrase(ranks)} {how}" for how, ranks in said.items())


def _merged_ranks(history: Sequence[Stretch]) -> dict[int, RankInfo]:
    """What each rank says of itself in the newest attempt that has it, with what was lost in all that is read.

    How many rows it recorded is not said: what is read is less.
    """
    found: dict[int, RankInfo] = {}
    for rank in sorted({rank for of in history for rank in of.run.ranks}):
        infos = [(of, of.run.ranks[rank]) for of in history if rank in of.run.ranks]
        facts = {k: v for k, v in infos[-1][1].facts.items() if k != "recorded"}
        for name in ("dropped", "unsummarised", "replay_skipped"):
            facts[name] = _summed(
                _lost_in(of, info, name) if name == "dropped" else info.facts.get(name)
                for of, info in infos
            )
        facts["problems"] = [p for _, info in infos for p in info.facts.get("problems") or ()]
        facts["complete"] = infos[-1][1].is_complete and infos[-1][0] is history[-1]
        found[rank] = RankInfo(rank, facts)
    return found


def _lost_in(of: Stretch, info: RankInfo, name: str) -> dict[str, int]:
    """The rows that had no room, of the tables of which some may be of steps that are read."""
    steps = info.facts.get("dropped_steps")
    steps = steps if isinstance(steps, dict) else {}
    counts = info.facts.get(name)
    return {
        table: count
        for table, count in (counts.items() if isinstance(counts, dict) else ())
        if of.end is None or not (span := steps.get(table)) or span[0] is None or span[0] < of.end
    }


def _summed(counts: Iterator[Any]) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in counts:
        for reason, count in one.items() if isinstance(one, dict) else ():
            if isinstance(count, int):
                total[reason] = total.get(reason, 0) + count
    return total


def _notices(newest: Run, history: Sequence[Stretch]) -> Iterator[str]:
    read = [of.run.attempt for of in history]
    others = [a for a in newest.attempts if a < newest.attempt and a not in read]
    besides = f", not {spans(others)} before them" if others else ""
    yield (
        f"{newest.path}: attempts {spans(read)} are read as one history{besides} (analyzer info says how; --attempt)"
    )
    for notice in newest.notices:
        if "(--attempt)" not in notice or " is read, not " not in notice:
            yield notice
    for of in history[:-1]:
        for notice in of.run.notices:
            if any(lost in notice for lost in ("missing", "half written")):
                yield notice


def continued_steps(earlier: Sequence[Run], later: Run) -> frozenset[int]:
    """The steps of a history that began with just the parameters that the first recorded step of `later` began with.

    Of a step that was reached and not begun, what the step before left is asked. Steps have the numbers under which
    `earlier` runs are read. Nothing is said where a parameter has no fingerprint, or the runs share no rank.
    """
    ranks = sorted({rank for run in earlier for rank in run.ranks} & set(later.ranks))
    if not ranks:
        return frozenset()
    with contextlib.closing(connect([later], tables=(PARAMETERS,))) as connection:
        first = _states(connection, ranks, "before", only_first=True)
    wanted = {rank: state for (rank, _), state in first.items()}
    if not wanted:
        return frozenset()
    before: dict[int, set[int]] = {rank: set() for rank in wanted}
    for run in earlier:
        with contextlib.closing(connect([run], tables=(PARAMETERS,))) as connection:
            for point, ahead in (("before", 0), ("after", 1)):
                for (rank, step), state in _states(connection, sorted(wanted), point).items():
                    if state == wanted[rank]:
                        before[rank].add(step + ahead)
    return frozenset(set.intersection(*before.values()))


def _states(
    connection: duckdb.DuckDBPyConnection,
    ranks: Sequence[int],
    point: str,
    *,
    only_first: bool = False,
    step: int | None = None,
) -> Mapping[tuple[int, int], tuple[int, int]]:
    """By rank and step (all, or the one), a number that stands for all its parameters at that point, and how many
    there are."""
    chosen = f"point = '{point}' AND kind = 'parameter' AND rank IN ({', '.join(map(str, ranks))})"
    chosen += "" if step is None else f" AND step = {step}"
    first = (
        f" SEMI JOIN (SELECT rank, min(step) AS step FROM parameters WHERE {chosen} GROUP BY rank) USING (rank, step)"
        if only_first
        else ""
    )
    rows = connection.execute(
        "SELECT rank, step, sum(hash(root, parameter_fqn, fingerprint)), count(*) "
        f"FROM parameters{first} WHERE {chosen} "
        "GROUP BY rank, step HAVING count(fingerprint) = count(*)"
    ).fetchall()
    return {(rank, step): (int(state), count) for rank, step, state, count in rows}
