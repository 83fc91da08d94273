"""What a run holds, as a colleague would want it told: text for a terminal, rows, or JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gradtrace_analyzer.reports.tables import table_lines
from gradtrace_analyzer.runs.attempts import OTHER_PARAMETERS, SOURCES, AttemptStory
from gradtrace_analyzer.runs.flight import shortened_count, trigger_lines
from gradtrace_analyzer.runs.last_seen import last_seen
from gradtrace_analyzer.sql.inventory import Inventory
from gradtrace_analyzer.words.numbers import bytes_text, counted, counts_phrase, spans

_MOST_PROBLEMS = 5
# What ended the steps, where it was no torch optimizer.
_RULES = {
    "parameters": "by changes of parameters (no torch optimizer was seen)",
    "job": "as the job numbered them",
    None: "nothing was seen that ends one",
}
SIZE_COLUMNS = ("run", "table", "rows", "parts", "bytes", "journal_rows")


def info_lines(name: str, held: Inventory) -> Iterator[str]:
    """The lines for one run. Lines that would say nothing are left out."""
    run = held.run
    of_attempts = f" of {spans(run.attempts)}" if len(run.attempts) > 1 else ""
    if run.history:
        read = [of.run.attempt for of in run.history]
        others = "" if len(read) == len(run.attempts) else of_attempts
        yield f"{name}  (attempts {spans(read)}{others} as one, {run.path})"
    else:
        yield f"{name}  (attempt {run.attempt}{of_attempts}, {run.path})"
    for number, story in enumerate(run.stories):
        yield f"  {'' if number else 'history':<14}{attempt_sentence(story)}"
    for label, text in _facts(held):
        if text:
            yield f"  {label:<14}{text}"
    for problem in held.problems[:_MOST_PROBLEMS]:
        yield f"  {'problem':<14}{problem}"
    if len(held.problems) > _MOST_PROBLEMS:
        yield f"  {'':<14}and {len(held.problems) - _MOST_PROBLEMS} more (--format json)"
    if not held.tables:
        yield "  no rows were recorded"
        return
    yield ""
    columns = ["table", "rows", "parts", "size"]
    rows = [
        [one.table, f"{one.rows:,}", f"{one.part_count:,}", bytes_text(one.size_bytes)]
        for one in held.tables
    ]
    if any(one.journal_rows for one in held.tables):
        columns.append("rows in journals")
        for row, one in zip(rows, held.tables, strict=True):
            row.append(f"{one.journal_rows:,}")
    for line in table_lines(columns, rows, right=columns[1:]):
        yield f"  {line}"


def attempt_sentence(story: AttemptStory) -> str:
    """What became of an attempt: `attempt 1: steps 5 to 9, continues those before (GRADTRACE_STEP_OFFSET); ended`."""
    name = f"attempt {story.attempt}"
    if story.first is None or story.last is None:
        return f"{name}: no step; {story.ending}"
    said = [f"{name}: {_stretch_of_steps(story.first, story.last)}"]
    if story.step_shift:
        said[0] += f" (it counted from {story.first - story.step_shift})"
    if story.joined_by is not None:
        said[0] += f", continues those before ({SOURCES[story.joined_by]})"
    if story.same_parameters is False:
        said.append(OTHER_PARAMETERS)
    if story.why_not is not None:
        said.append(f"not joined to those before: {story.why_not}")
    if story.repeated is not None:
        again = _stretch_of_steps(*story.repeated)
        were = "was" if story.repeated[0] == story.repeated[1] else "were"
        said.append(f"{again} {were} done before, too: {name}'s rows are read")
    if story.gap is not None:
        gap = _stretch_of_steps(*story.gap)
        said.append(f"{gap} {'is' if story.gap[0] == story.gap[1] else 'are'} not there")
    said.append(story.ending)
    if story.read is None:
        said.append("not read")
    elif story.read != (story.first, story.last):
        said.append(
            f"{_stretch_of_steps(*story.read)} {'is' if story.read[0] == story.read[1] else 'are'} read"
        )
    return "; ".join(said)


def _stretch_of_steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def size_rows(name: str, held: Inventory) -> list[tuple[Any, ...]]:
    """A row per table, in the order of SIZE_COLUMNS, for CSV."""
    return [
        (name, s.table, s.rows, s.part_count, s.size_bytes, s.journal_rows) for s in held.tables
    ]


def info_object(name: str, held: Inventory) -> dict[str, Any]:
    """The same for a program. `recorder_share` is a fraction of the steps' time."""
    run = held.run
    return {
        "run": name,
        "path": str(run.path),
        "attempt": run.attempt,
        "attempts": run.attempts,
        "history": [
            {
                **{k: v for k, v in vars(story).items() if k != "ending"},
                "ending": story.ending,
                "sentence": attempt_sentence(story),
            }
            for story in run.stories
        ],
        "hosts": held.hosts,
        "devices": held.devices,
        "versions": held.versions,
        "settings": held.settings,
        "world_size": run.world_size,
        "ranks": {
            "present": list(run.ranks),
            "missing": run.missing_ranks,
            "incomplete": run.incomplete_ranks,
        },
        "flight": None
        if run.flight_steps is None
        else {
            "steps": run.flight_steps,
            "held": held.flight_spans,
            "triggers": list(trigger_lines(run)),
            "went_early": shortened_count(run),
        },
        "steps": {"first": held.first_step, "last": held.last_step, "count": held.step_count},
        "tables": [
            {
                "table": s.table,
                "rows": s.rows,
                "parts": s.part_count,
                "bytes": s.size_bytes,
                "journal_rows": s.journal_rows,
            }
            for s in held.tables
        ],
        "dropped": held.dropped,
        "unsummarised": held.unsummarised,
        "replay_skipped": held.replay_skipped,
        "problems": held.problems,
        "observers": held.observers,
        "left_to_python": held.left_to_python,
        "launcher": {name: held.launchers.get(name, ()) for name in ("kind", "found_by")},
        "recorder_share": held.recorder_share,
        "notices": run.notices,
    }


def _facts(held: Inventory) -> Iterator[tuple[str, str]]:
    versions = held.versions
    yield (
        "versions",
        ", ".join(
            f"{name} {' and '.join(versions[name])}"
            for name in ("torch", "python", "gradtrace")
            if name in versions
        ),
    )
    yield "hosts", ", ".join(held.hosts)
    yield "device", ", ".join(held.devices)
    yield "ranks", _ranks(held)
    yield "launcher", _launcher(held)
    yield "steps", _steps(held)
    yield "recorded", _choices(held.settings)
    yield "flight", _flight(held)
    for trigger in trigger_lines(held.run):
        yield "trigger", trigger
    left = counts_phrase(held.left_to_python)
    yield (
        "observer",
        ", ".join(held.observers) + (f"; passes left to Python: {left}" if left else ""),
    )
    if held.recorder_share is not None:
        yield "recorder took", f"{held.recorder_share:.2%} of the steps' time"
    yield "dropped", counts_phrase(held.dropped)
    yield "unsummarised", counts_phrase(held.unsummarised)
    yield "not run again", counts_phrase(held.replay_skipped)


# Of ranks that did not close their recording, by what can be told of their processes.
_NOT_CLOSED = {
    ("alive",): "still running",
    ("dead",): "not closed (its process is gone)",
    ("silent", ""): "not closed (killed, or running)",
}


def _ranks(held: Inventory) -> str:
    run = held.run
    said = f"{spans(run.ranks) or 'none'} of {'?' if run.world_size is None else run.world_size}"
    if run.missing_ranks:
        said += f"; missing: {spans(run.missing_ranks)}"
    by_life: dict[str, list[int]] = {}
    for rank in run.incomplete_ranks:
        seen = last_seen(run, rank)
        by_life.setdefault("" if seen is None else seen.life, []).append(rank)
    for life, words in _NOT_CLOSED.items():
        ranks = [rank for told in life for rank in by_life.get(told, ())]
        if ranks:
            said += f"; {words}: {spans(sorted(ranks))}"
    return said


# How the ranks of one start found each other, as the recorder says it and as a person would.
_FOUND_BY = {
    "store": "the process group's store",
    "ids": "the launcher's ids",
    "address": "MASTER_ADDR and MASTER_PORT",
    "parent": "the process that started them",
    "world": "the world's size and the time",
}


def _launcher(held: Inventory) -> str:
    kinds = [kind for kind in held.launchers.get("kind", ()) if kind != "none"]
    ways = [_FOUND_BY[way] for way in held.launchers.get("found_by", ()) if way in _FOUND_BY]
    said = " and ".join(kinds)
    if ways:
        said += f"{'; ' if said else ''}its ranks found each other by {', or '.join(ways)}"
    return said


def _flight(held: Inventory) -> str:
    kept = held.run.flight_steps
    if kept is None:
        return ""
    said = (
        f"the last {kept} steps are kept, and those before a trigger: {held.flight_spans or 'none'}"
    )
    count = shortened_count(held.run)
    if count:
        said += f"; the journal had no room for all of them, {count:,} went early"
    return said


def _steps(held: Inventory) -> str:
    if held.first_step is None:
        return ""
    said = f"{held.first_step}-{held.last_step} ({counted(held.step_count, 'step')})"
    facts = [info.facts for info in held.run.ranks.values()]
    rules = {fact["step_rule"] for fact in facts if fact.get("complete") and "step_rule" in fact}
    for rule, text in _RULES.items():
        if rule in rules:
            said += f"; {text}"
    if any(fact.get("first_step_from") == "framework" for fact in facts):
        said += "; numbered on from the framework's counter"
    return said


def _choices(settings: Mapping[str, Sequence[str]]) -> str:
    """What the recorder was asked for: detail and summary, and whatever leaves something out."""
    said = [
        f"{name} {' and '.join(settings[name])}"
        for name in ("detail", "summary")
        if name in settings
    ]
    said += [
        f"{name} {' and '.join(settings[name])}"
        for name in ("steps", "modules", "replay")
        if set(settings.get(name, ())) - {"[]", "null", '["0::1"]', '["::"]'}
    ]
    return ", ".join(said)
