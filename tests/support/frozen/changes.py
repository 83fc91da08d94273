"""How two answers of one question differ: key by key where they are JSON, line by line where they are text."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from support.frozen.judging import Answer

# A tolerance rests on sums inside DuckDB, whose hash tables choose anew in which order they are added up: its digits
# behind the ninth are not compared. (Seen: 3 in 10^12; which of 473 pairs show it is another from run to run.)
_TOLERANCE = re.compile(r'("tolerance": )([0-9][0-9.e+-]*)')

_ABSENT = "(absent)"
_LONGEST = 160


def changes(before: Mapping[str, Answer], now: Mapping[str, Answer]) -> list[str]:
    """A line for each thing that changed; none where all bytes are equal, but for the last digits of tolerances."""
    found: list[str] = []
    for format in dict.fromkeys((*before, *now)):
        if format not in before or format not in now:
            found.append(f"{format}: {'is new' if format in now else 'is gone'}")
            continue
        a, b = (_rounded(answer) for answer in (before[format], now[format]))
        if a.code != b.code:
            found.append(f"{format}: exit status: {a.code} -> {b.code}")
        if a.beside != b.beside:
            found += [f"{format}: stderr: {line}" for line in _lines(a.beside, b.beside)]
        if a.said != b.said:
            found += [f"{format}: {line}" for line in _said(a.said, b.said)]
    return found


def _rounded(answer: Answer) -> Answer:
    said = _TOLERANCE.sub(lambda found: f"{found[1]}{float(found[2]):.9g}", answer.said)
    return replace(answer, said=said)


def _said(before: str, now: str) -> list[str]:
    try:
        a, b = json.loads(before), json.loads(now)
    except ValueError:
        return list(_lines(before, now))
    found = [f"{path or 'all'}: {_short(x)} -> {_short(y)}" for path, x, y in _apart(a, b, "")]
    return found or ["the same values, written otherwise (order of keys, digits or layout)"]


def _apart(a: Any, b: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys((*a, *b)):
            yield from _apart(a.get(key, _ABSENT), b.get(key, _ABSENT), f"{path}.{key}".lstrip("."))
    elif isinstance(a, list) and isinstance(b, list):
        for n in range(max(len(a), len(b))):
            x, y = (entries[n] if n < len(entries) else _ABSENT for entries in (a, b))
            yield from _apart(x, y, f"{path}[{n}]")
    elif type(a) is not type(b) or a != b:
        yield path, a, b


def _lines(before: str, now: str) -> Iterator[str]:
    told = difflib.unified_diff(
        before.splitlines(), now.splitlines(), "before", "now", "", "", 0, ""
    )
    for line in list(told)[2:]:
        if not line.startswith("@@"):
            yield line
    if before.splitlines() == now.splitlines():
        yield "the ends of lines"


def _short(value: object) -> str:
    text = value if value is _ABSENT else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"
