"""What one side alone has, renames and configurations, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gradtrace_analyzer.diff.answer import Answer
from gradtrace_analyzer.diff.code.structure import OneSided
from gradtrace_analyzer.reports.diff.numbering import Steps
from gradtrace_analyzer.reports.tables import table_lines
from gradtrace_analyzer.words.nouns import SIDES, enumerated, module_phrase, other_side
from gradtrace_analyzer.words.numbers import (
    and_more,
    counted,
    noun,
    ranks_phrase,
    verb,
)

_MOST_LINES = 12
_MOST_CHARACTERS = 60


def structure_lines(structure: Sequence[OneSided], steps: Steps) -> Iterator[str]:
    """One line for each thing that a side alone has: a layer with what it holds, the Nodes of a module together."""
    said = [*_modules(structure), *_code_inside(structure), *_happened(structure, steps)]
    yield from said[:_MOST_LINES]
    if len(said) > _MOST_LINES:
        yield f"and {len(said) - _MOST_LINES} more (--format json has all)"


def code_phrase(code: Sequence[OneSided]) -> str:
    """Changed code in a few words: `blocks.2 (Block: 7 modules) is in the candidate alone (and 1 more change)`."""
    said = [*_modules(code), *_code_inside(code)] or ["a part of it is compiled on one side"]
    more = len(said) - 1
    return said[0] + (f" (and {more} {noun(more, 'more change')} of the code)" if more else "")


def naming_lines(answer: Answer) -> Iterator[str]:
    """Which renames were applied, and which options may be missing; six of each at most."""
    if answer.renames:
        names = ", ".join(map(str, answer.renames[:6]))
        more = and_more(len(answer.renames) - 6)
        yield f"Compared under the candidate's names: {names}{more}."
    if answer.likely_renames:
        options = " ".join(f"--rename '{rename}'" for rename in answer.likely_renames[:6])
        yield f"Modules of the candidate look renamed: try {options}."


def compiled_lines(structure: Sequence[OneSided]) -> Iterator[str]:
    """What ran inside compiled code on one side, and so was not seen there."""
    for side in SIDES:
        inside = [e for e in structure if e.is_compiled and e.only_in == side]
        if inside:
            modules = sum(max(e.holds.get("modules", 1), 1) for e in inside if e.kind == "module")
            own = [
                e for e in inside if e.kind == "node" and not e.name.startswith("CompiledFunction")
            ]
            nodes = sum(e.count or 0 for e in own)
            said = [f"the calls of {counted(modules, 'module')}"] * (modules > 0)
            said += [f"{nodes:,} runs of Nodes"] * (nodes > 0)
            if said:
                yield (
                    f"The {other_side(side)} is compiled: {' and '.join(said)} that the {side} recorded are inside "
                    "compiled code there, and were not compared."
                )


def configuration_lines(configuration: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What differs between the configurations, as a table."""
    if not configuration:
        return
    yield "The configurations differ:"
    rows = [(e["name"], _value(e["baseline"]), _value(e["candidate"])) for e in configuration]
    yield from table_lines(("", "baseline", "candidate"), rows)
    if any(e["name"] == "git_commit" for e in configuration):
        yield "(Of a commit, changes that are not committed are not seen.)"


def _value(value: Any) -> str:
    text = "-" if value is None else str(value)
    if len(text) > 12 and set(text) <= set("0123456789abcdef"):
        return text[:12]
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


def _modules(structure: Sequence[OneSided]) -> Iterator[str]:
    for e in structure:
        if e.kind == "rank":
            yield f"rank {e.name} is in the {e.only_in} alone"
        elif e.is_of_the_model:
            holds = [f"{n} {what[:-1] if n == 1 else what}" for what, n in e.holds.items()]
            about = ": ".join(filter(None, (e.module_class, ", ".join(holds))))
            kind = "" if e.kind == "module" else "parameter "
            name = module_phrase(e.name) if e.kind == "module" else e.name
            yield f"{kind}{name}{f' ({about})' if about else ''} is in the {e.only_in} alone"


def _code_inside(structure: Sequence[OneSided]) -> Iterator[str]:
    """Nodes and calls of changed code; modules whose code changed alike share a line."""
    by_module: dict[str | None, list[OneSided]] = {}
    for e in structure:
        if e.is_code and e.kind in ("node", "call") and not e.is_compiled:
            by_module.setdefault(e.module_fqn, []).append(e)
    alike: dict[str, list[str]] = {}
    for fqn, entries in by_module.items():
        sides = []
        for side in SIDES:
            names = [_inside(e) for e in entries if e.only_in == side]
            if names:
                sides.append(f"{enumerated(names, 4)} in the {side} alone")
        alike.setdefault(", ".join(sides), []).append(module_phrase(fqn))
    for said, modules in alike.items():
        more = f" (and {len(modules) - 1} more)" if len(modules) > 1 else ""
        yield f"{modules[0]}{more} runs {said}"


def _inside(entry: OneSided) -> str:
    if entry.kind == "call":
        return f"a {entry.phase} call"
    steps = (entry.last_step or 0) - (entry.first_step or 0) + 1
    each = (entry.count or 1) / (steps * max(len(entry.ranks), 1))
    return f"{each:.0f} {entry.name}" if each >= 1.5 else entry.name


def _happened(structure: Sequence[OneSided], numbered: Steps) -> Iterator[str]:
    """What is alone in some steps or ranks: alike things of a kind, side and time share a line."""
    alike: dict[tuple[Any, ...], list[OneSided]] = {}
    for e in structure:
        if not e.is_code and e.kind != "rank":
            alike.setdefault((e.kind, e.only_in, e.ranks, e.first_step, e.last_step), []).append(e)
    words = {"group": "optimizer group", "pass": "backward pass", "call": "call of"}
    for (kind, side, ranks, first, last), entries in alike.items():
        more = and_more(len(entries) - 1)
        name = module_phrase(entries[0].name) if kind == "call" else entries[0].name
        inside = f" of {module_phrase(entries[0].module_fqn)}" if kind == "node" else ""
        steps = numbered.many(range(first or 0, (last or 0) + 1))
        yield (
            f"{words.get(kind, kind)} {name}{inside}{more} {verb(entries, 'is', 'are')} in the {side} alone "
            f"({ranks_phrase(ranks)}, {steps})"
        )
