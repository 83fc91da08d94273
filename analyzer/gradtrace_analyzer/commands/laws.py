"""`analyzer laws`: what `analyzer check` holds a run against, as the laws themselves declare it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import click

from gradtrace_analyzer.check.law import Law
from gradtrace_analyzer.check.registry import all_laws, causes_of
from gradtrace_analyzer.commands import answer, report_format_option
from gradtrace_analyzer.errors import GradtraceError
from gradtrace_analyzer.reports.tables import json_text, table_lines

_WIDTH = 100


@click.command()
@click.argument("name", required=False)
@report_format_option
def laws(name: str | None, format: Literal["table", "json"]) -> None:
    """The laws that `analyzer check` judges, or one law's text.

    They stand in the order in which one thing leads to another within a step.
    """
    asked = all_laws() if name is None else [_law(name)]
    if format == "json":
        objects = [_object(law) for law in asked]
        answer([json_text(objects if name is None else objects[0], indent=2)])
    else:
        answer(_table() if name is None else _lines(asked[0]))


def _law(name: str) -> Law:
    known = {law.name: law for law in all_laws()}
    if name not in known:
        raise GradtraceError(f"there is no law {name!r}; there are {', '.join(known)}")
    return known[name]


def _table() -> Iterator[str]:
    rows = [(law.name, law.severity, law.unit[0], _first_sentence(law)) for law in all_laws()]
    widest = max(len(cell) for row in rows for cell in row)
    return table_lines(("law", "severity", "judged by the", "meaning"), rows, widest=widest)


def _first_sentence(law: Law) -> str:
    """As much of it as a line has room for, without its full stop."""
    return textwrap.shorten(law.doc.partition(". ")[0].removesuffix("."), 60, placeholder=" ...")


def _lines(law: Law) -> Iterator[str]:
    yield f"{law.name}  {law.severity}"
    yield ""
    yield from textwrap.wrap(law.doc, _WIDTH, break_on_hyphens=False)
    yield ""
    yield f"It is judged by the {law.unit[0]}."
    if law.after:
        yield f"In the chain of a step it stands after {', '.join(law.after)}."
    if causes_of(law):
        yield f"Broken in the same step, these explain it: {', '.join(_names(causes_of(law)))}."


def _object(law: Law) -> dict[str, Any]:
    return {
        "law": law.name,
        "severity": law.severity,
        "unit": law.unit[0],
        "meaning": law.doc,
        "after": law.after,
        "explained_by": _names(causes_of(law)),
    }


def _names(laws: Iterable[Law]) -> list[str]:
    return [law.name for law in laws]
