"""`--fail-on LINK>=X`: which differences make a comparison fail in CI, and the result for each link of the chain."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gradtrace_analyzer.diff.answer import Answer
from gradtrace_analyzer.diff.links import LINKS
from gradtrace_analyzer.diff.origin import FailureOrigin, Origin
from gradtrace_analyzer.errors import BadGate

ANY = "any"
# Short names of links, as a person would write them.
_ALIASES = {
    "final": "clip",
    "local": "local_gradient",
    "reduced": "reduced_gradient",
    "carried": "carried_gradient",
}
_WRITTEN = re.compile(r"\s*([a-z_]+)\s*>=\s*(\S+)\s*")

# Links that have no relative error: that they differ is all that can be said.
NO_ERROR = frozenset({"configuration", "rng", "structure"})


@dataclass(frozen=True)
class Gate:
    """A link and the relative error from which on a difference there fails.

    `any` stands for every link, of the structure for what is no mere change of code.
    """

    link: str
    at_least: float

    def covers(self, link: str) -> bool:
        """Whether the gate speaks of that link. `any` leaves the configuration out, which is no value."""
        return self.link == link or (self.link == ANY and link != "configuration")


@dataclass(frozen=True)
class GateFailure:
    """A link that failed: its largest relative error (None: no number, such as NaN or a missing row), and where:
    the words of a row that was only counted, or an origin, which reports say in theirs."""

    link: str
    gate: Gate
    error: float | None
    step: int | None
    ranks: tuple[int, ...]
    place: str | Origin


def gate_of(text: str) -> Gate:
    """The gate of a text such as `clip>=1e-3`. Raises BadGate for one without a link, a comparison or a number."""
    found = _WRITTEN.fullmatch(text)
    if found is None:
        raise BadGate(f"{text!r} is no threshold; write LINK>=X, such as 'clip>=1e-3' or 'any>=0'")
    link = _ALIASES.get(found[1], found[1])
    if link not in (*LINKS, ANY):
        raise BadGate(f"{found[1]!r} is no link; the links are {', '.join((ANY, *LINKS))}")
    try:
        at_least = float(found[2])
    except ValueError:
        at_least = math.nan
    if not at_least >= 0:
        raise BadGate(f"{found[2]!r} in {text!r} is no relative error; write a number such as 1e-3")
    return Gate(link, at_least)


def gate_failures(answer: Answer, gates: Sequence[Gate]) -> dict[str, GateFailure]:
    """The links with a difference at or above a gate, each with its worst; none where nothing can be compared."""
    found: dict[str, GateFailure] = {}
    for gate in gates if answer.verdict != "incomparable" else ():
        for one in _differences(answer, gate):
            if gate.covers(one.link) and (one.error is None or one.error >= gate.at_least):
                known = found.get(one.link)
                found[one.link] = one if known is None else _together(known, one)
    return {link: found[link] for link in LINKS if link in found}


def _together(a: GateFailure, b: GateFailure) -> GateFailure:
    worst = None if a.error is None or b.error is None else max(a.error, b.error)
    first = min((a, b), key=lambda one: -1 if one.step is None else one.step)
    ranks = tuple(sorted({*a.ranks, *b.ranks}))
    return replace(first, error=worst, ranks=ranks, place=first.place or a.place or b.place)


def _differences(answer: Answer, gate: Gate) -> Iterator[GateFailure]:
    """All that differs, by link and rank."""
    for entry in answer.configuration:
        if entry["changes_numbers"]:
            yield GateFailure("configuration", gate, None, None, (), str(entry["name"]))
    for e in answer.spread:
        error = None if e["unmeasured_count"] else e["largest_error"]
        if error is not None or e["unmeasured_count"]:
            yield GateFailure(
                e["link"], gate, error, e["first_step"], (e["rank"],), e["place"] or ""
            )
    for lone in answer.structure:
        # Other code for the same numbers is no difference of values.
        if gate.link == ANY and lone.is_code and not lone.has_parameters:
            continue
        yield GateFailure("structure", gate, None, lone.first_step, lone.ranks, lone.name)
    for o in answer.origins:
        if o.link in NO_ERROR or isinstance(o, FailureOrigin):
            yield GateFailure(o.link, gate, None, o.step, o.ranks, o.module_fqn or "")
        elif o.change is not None and o.change.factor is not None:
            # Known exactly, where the spread's errors are estimates.
            error = abs(o.change.factor - 1)
            yield GateFailure(o.link, gate, error, o.step, o.ranks, o)


def exit_status(answer: Answer, found: Mapping[str, GateFailure]) -> int:
    """1 where something failed, 2 where nothing could be compared, else 0, whatever else differs."""
    if found:
        return 1
    return 2 if answer.verdict == "incomparable" else 0
