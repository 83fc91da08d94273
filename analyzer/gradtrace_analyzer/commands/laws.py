"""`analyzer laws`: what `analyzer check` holds a run against, as the laws themselves declare it."""

from __future__ import annotations

from typing import Literal

import click

from gradtrace_analyzer.check.law import Law
from gradtrace_analyzer.check.registry import all_laws
from gradtrace_analyzer.commands import answer, examples, report_format_option
from gradtrace_analyzer.errors import GradtraceError
from gradtrace_analyzer.reports.laws import law_object, law_text, laws_table
from gradtrace_analyzer.reports.tables import json_text


@click.command(epilog=examples("analyzer laws", "analyzer laws gradients_equal"))
@click.argument("name", required=False)
@report_format_option
def laws(name: str | None, format: Literal["table", "json"]) -> None:
    """The laws that `analyzer check` judges, or one law's text.

    They stand in the order in which one thing leads to another within a step.
    """
    asked = all_laws() if name is None else [_law(name)]
    if format == "json":
        objects = [law_object(law) for law in asked]
        answer([json_text(objects if name is None else objects[0], indent=2)])
    else:
        answer(laws_table() if name is None else law_text(asked[0]))


def _law(name: str) -> Law:
    known = {law.name: law for law in all_laws()}
    if name not in known:
        raise GradtraceError(f"there is no law {name!r}; there are {', '.join(known)}")
    return known[name]
