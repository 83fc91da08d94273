"""Which steps a question is about: Python slices over non-negative numbers, as a condition in SQL."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gradtrace_analyzer.errors import GradtraceError

_SLICE = re.compile(r"(?P<one>\d+)|(?P<first>\d*):(?P<end>\d*)(?::(?P<stride>\d*))?")


class BadSlice(GradtraceError):
    """What was given for --step is neither a number nor a slice."""


@dataclass(frozen=True)
class Steps:
    """Steps that a person asked for. `text` is what they wrote, empty for all."""

    text: str = ""
    parts: tuple[tuple[int, int | None, int], ...] = ()

    def condition(self, column: str = "step") -> str:
        """SQL that is true for the steps meant, of the `column` that holds a row's step."""
        chosen = []
        for first, end, stride in self.parts:
            terms = [f"{column} >= {first}"]
            terms += [] if end is None else [f"{column} < {end}"]
            terms += [] if stride == 1 else [f"({column} - {first}) % {stride} = 0"]
            chosen.append(f"({' AND '.join(terms)})")
        return f"({' OR '.join(chosen)})" if chosen else "true"


def steps_of(text: str | None) -> Steps:
    """The steps of `3`, `10:20`, `::50`, or several of these with commas; None is all. Raises BadSlice."""
    if text is None:
        return Steps()
    parts: list[tuple[int, int | None, int]] = []
    for part in text.split(","):
        found = _SLICE.fullmatch(part.strip())
        if found is None or found["stride"] == "0":
            raise BadSlice(
                f"--step is {text!r}, of which {part!r} is no slice; write 3 or 10:20,::50"
            )
        if found["one"]:
            parts.append((int(found["one"]), int(found["one"]) + 1, 1))
        else:
            end = int(found["end"]) if found["end"] else None
            parts.append((int(found["first"] or 0), end, int(found["stride"] or 1)))
    return Steps(text, tuple(parts))
