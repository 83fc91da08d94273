"""What differs between the configurations of two runs: it is often the answer.

What can change numbers (versions, world size, devices, switches) is told from what only says that another job was asked
for (command line, commit): the first takes the determinism witness away, since other kernels may round otherwise.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.words.nouns import SIDES
from gradtrace_analyzer.words.numbers import ranks_phrase

# Of our own, which changes no number of the job.
_OURS = frozenset({"gradtrace", "schema"})
# Facts of a rank, in the order in which they are told.
_GROUPS = ("world_size", "device", "versions", "environment")


def apart_in_configuration(runs: Mapping[str, Run]) -> list[dict[str, Any]]:
    """What differs between the sides, the most telling first; `changes_numbers` where kernels may round otherwise."""
    sides = {side: _facts(run) for side, run in runs.items()}
    if not all(len(facts) > 1 for facts in sides.values()):
        return []  # a side whose ranks died before they said anything
    # What an older recorder did not write down is unknown, not different.
    is_known = len({run.schema_version for run in runs.values()}) == 1
    a, b = sides["baseline"], sides["candidate"]
    names = [*a, *(name for name in b if name not in a)]
    found = [
        {"name": name, "baseline": a.get(name), "candidate": b.get(name), "changes_numbers": True}
        for name in names
        if a.get(name) != b.get(name) and (is_known or (name in a and name in b))
    ]
    return found + _observers(runs) + _commits(runs) + _commands(runs)


def changes_numbers(configuration: Sequence[Mapping[str, Any]]) -> bool:
    """Whether any entry says that the sides may round otherwise: then one changed bit proves nothing."""
    return any(entry["changes_numbers"] for entry in configuration)


def _facts(run: Run) -> dict[str, Any]:
    """Name to value; where ranks of one run disagree, which has what."""
    by_rank: dict[str, dict[int, Any]] = {}
    for rank, info in run.ranks.items():
        for group in _GROUPS[1:]:
            value = info.facts.get(group)
            given = (
                value if isinstance(value, dict) else {group: value} if value is not None else {}
            )
            for name, one in given.items():
                if name not in _OURS:
                    by_rank.setdefault(name, {})[rank] = one
    facts: dict[str, Any] = {"world_size": run.world_size}
    for name, values in by_rank.items():
        facts[name] = _told(values)
    return facts


def _told(values: Mapping[int, Any]) -> Any:
    """The value that all ranks have, else `1 (ranks 0-2), 4 (rank 3)`."""
    alike: dict[str, list[int]] = {}
    for rank, value in values.items():
        alike.setdefault(json.dumps(value, sort_keys=True), []).append(rank)
    if len(alike) == 1:
        return next(iter(values.values()))
    return ", ".join(f"{json.loads(said)} ({ranks_phrase(of)})" for said, of in alike.items())


def recorded_alike(runs: Mapping[str, Run]) -> bool:
    """Whether both sides' norms and sums were added up in the same order: by one observer, on one kind of device."""
    ways = [
        (_observer(run), {info.facts.get("device") for info in run.ranks.values()})
        for run in runs.values()
    ]
    return all(way == ways[0] for way in ways)


def _observer(run: Run) -> str:
    """What watched the run: `native`, `python` (which recorders before schema 6 do not say), or both."""
    said = (info.facts.get("observer") or {} for info in run.ranks.values())
    return ", ".join(sorted({str(about.get("kind", "python")) for about in said}))


def _observers(runs: Mapping[str, Run]) -> list[dict[str, Any]]:
    a, b = (_observer(runs[side]) for side in SIDES)
    if a == b:
        return []
    return [{"name": "observer", "baseline": a, "candidate": b, "changes_numbers": False}]


def _commits(runs: Mapping[str, Run]) -> list[dict[str, Any]]:
    said = {
        side: sorted(
            {c for i in run.ranks.values() if isinstance(c := i.facts.get("git_commit"), str)}
        )
        for side, run in runs.items()
    }
    a, b = (", ".join(commits) or None for commits in (said["baseline"], said["candidate"]))
    if a == b or len({run.schema_version for run in runs.values()}) > 1:
        return []
    return [{"name": "git_commit", "baseline": a, "candidate": b, "changes_numbers": False}]


def _commands(runs: Mapping[str, Run]) -> list[dict[str, Any]]:
    """The words of the command lines that differ, with the option that each belongs to."""
    words = {}
    for side, run in runs.items():
        said = [i.facts.get("command") for i in run.ranks.values()]
        words[side] = next((c for c in said if isinstance(c, list)), None)
    a, b = words["baseline"], words["candidate"]
    if a is None or b is None or a == b:
        return []
    kept: tuple[list[str], list[str]] = ([], [])
    for kind, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if kind != "equal":
            option = a[i - 1 : i] if i and a[i - 1].startswith("-") and i < j and k < m else []
            kept[0].extend([*option, *a[i:j]])
            kept[1].extend([*option, *b[k:m]])
    old, new = (" ".join(map(str, side)) or None for side in kept)
    return [{"name": "command", "baseline": old, "candidate": new, "changes_numbers": False}]
