"""What each allowance of the tolerance pays for: the kept pairs judged again with one of them switched off.

Nothing is trained: the pairs are those of tests/frozen (`scripts/accuracy --seed 11 --recordings`), whose questions say
which case each is of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

from gradtrace_analyzer.diff import compare as comparison
from gradtrace_analyzer.diff.links import LINK_TABLES
from gradtrace_analyzer.diff.tolerances.allowances import NAMES
from gradtrace_analyzer.diff.tolerances.judgement import Judgement
from gradtrace_analyzer.reports.diff.json_object import as_object
from gradtrace_analyzer.runs.opening import open_run
from support.accuracy.measuring import DECLARED, Case, Outcome, outcome_of
from support.frozen.judging import Question

SECTION = "## Allowances, one at a time"

ABLATION = (
    SECTION
    + """

Made by `scripts/accuracy --ablation`: every {every}th of the kept pairs ({faults} faults, {sound} sound runs) judged
again with one allowance of the tolerance (`diff/tolerances/allowances.py`) switched off, the others as they are.
**Marked**: pairs in which a row is beyond its tolerance, or is not, that was otherwise; of the others the answer is the
same. The other numbers are the change in what is found, in what is placed at the Node, in false alarms, and how many
pairs have another verdict or place. Work that is divided otherwise is compared by sums, which none of these is about.

{rows}

What each is for, and what shows it beside this table:

{reasons}

"""
)


@dataclass(frozen=True)
class Pair:
    """A kept pair: its case, and both runs below the folder that they are unpacked in."""

    case: Case
    baseline: str
    candidate: str


def pairs_of(questions: Sequence[Question]) -> list[Pair]:
    """Those of `scripts/accuracy`, in the order in which they were made."""
    found = []
    for question in questions:
        source, _, about = question.about.partition(": ")
        if source == "accuracy" and question.arguments[0] == "diff":
            found.append(Pair(case_of(about), *question.arguments[-2:]))
    return found


def case_of(about: str) -> Case:
    """Of `mlp, bf16, another order of summation, times 2 at 3`: family, change, kind and place."""
    what, _, place = about.rpartition(" at ")
    family, _, rest = what.partition(", ")
    change, _, kind = rest.rpartition(", ")
    return Case(
        family, change, "" if place == "the root" else place, None if kind == "sound" else kind
    )


class _Trying(Judgement):
    """Judges as always, having tried what it marks without each allowance: `marked_otherwise` are those that tell."""

    marked_otherwise: ClassVar[set[str]] = set()

    def write(self) -> None:
        tables = [table.table for table in LINK_TABLES]
        for table in tables:
            self._connection.execute(
                f"CREATE OR REPLACE TEMP TABLE untouched_{table} AS FROM paired_{table}"
            )
        marked = {}
        for name in (*NAMES, None):  # as always comes last: it is what the answer is made of
            self._without = frozenset([] if name is None else [name])
            super().write()
            marked[name] = self._marked()
            for table in tables if name is not None else ():
                self._connection.execute(
                    f"CREATE OR REPLACE TEMP TABLE paired_{table} AS FROM untouched_{table}"
                )
        self.marked_otherwise.update(name for name in NAMES if marked[name] != marked[None])

    def _marked(self) -> list[list[tuple[object, ...]]]:
        return [
            self._connection.execute(
                f"SELECT rank, step, place, place_c, only_in, exceeds, shown_by FROM differing_{table.table} "
                "WHERE beyond OR exceeds ORDER BY ALL"
            ).fetchall()
            for table in LINK_TABLES
        ]


def tried(folder: Path, pair: Pair) -> tuple[Outcome, dict[str, Outcome]]:
    """(what `diff` says of a pair, what it says without each allowance). Where no row is marked otherwise without one,
    the answer is the same and is not asked for."""
    _Trying.marked_otherwise.clear()
    with patch.object(comparison, "Judgement", _Trying):
        whole = judged_without(folder, pair, ())
    asked = sorted(_Trying.marked_otherwise)
    return whole, {name: judged_without(folder, pair, [name]) for name in asked}


def judged_without(folder: Path, pair: Pair, allowances: Sequence[str]) -> Outcome:
    """What `diff` says of a pair without these allowances."""
    answer = comparison.compare(
        open_run(folder / pair.baseline),
        open_run(folder / pair.candidate),
        precision=DECLARED.get(pair.case.change),
        without=allowances,
    )
    return outcome_of(pair.case, as_object(answer))


def counts(outcomes: Sequence[Outcome]) -> tuple[int, int, int]:
    """(faults found, of these at the Node, false alarms)."""
    faults = [o for o in outcomes if o.case.kind is not None and o.is_found]
    alarms = sum(o.is_found for o in outcomes if o.case.kind is None)
    return len(faults), sum(o.placed == "exact" for o in faults), alarms


def rows(
    with_all: Sequence[Outcome],
    without: Mapping[str, Sequence[Outcome]],
    marked: Mapping[str, int],
) -> Iterator[str]:
    """One line for each allowance: in how many pairs it marks rows, and what changes when it is switched off."""
    yield "| without | marked | found | at the Node | false alarms | told otherwise |"
    yield "|---|---|---|---|---|---|"
    whole = counts(with_all)
    yield f"| (none) | | {whole[0]} | {whole[1]} | {whole[2]} | |"
    before = {o.case: (o.verdict, o.placed) for o in with_all}
    for name, outcomes in without.items():
        changes = [b - a for a, b in zip(whole, counts(outcomes), strict=True)]
        others = sum((o.verdict, o.placed) != before[o.case] for o in outcomes)
        cells = " | ".join(f"{change:+d}" if change else "0" for change in changes)
        yield f"| {name} | {marked[name]} | {cells} | {others} |"


def with_section(page: str, section: str) -> str:
    """A page with this section in place of its own, in front of what `diff` cannot do where it had none."""
    start = page.find(f"{SECTION}\n")
    if start < 0:
        start = end = page.index("## What it cannot do")
    else:
        end = page.index("\n## ", start) + 1
    return page[:start] + section + page[end:]


def section_of(page: str) -> str:
    """That of a page; empty where it has none."""
    start = page.find(f"{SECTION}\n")
    return "" if start < 0 else page[start : page.index("\n## ", start) + 1]
