"""What the laws declare of themselves, as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from gradtrace_analyzer.check.law import Law
from gradtrace_analyzer.check.registry import all_laws, causes_of
from gradtrace_analyzer.reports.tables import table_lines

_WIDTH = 100


def laws_table() -> Iterator[str]:
    """A line a law, in the order of the chain."""
    rows = [(law.name, law.severity, law.unit[0], _first_sentence(law)) for law in all_laws()]
    widest = max(len(cell) for row in rows for cell in row)
    return table_lines(("law", "severity", "judged by the", "meaning"), rows, widest=widest)


def _first_sentence(law: Law) -> str:
    """As much of it as a line has room for, without its full stop."""
    return textwrap.shorten(law.doc.partition(". ")[0].removesuffix("."), 60, placeholder=" ...")


def law_text(law: Law) -> Iterator[str]:
    """All that one law says of itself."""
    yield f"{law.name}  {law.severity}"
    yield ""
    yield from textwrap.wrap(law.doc, _WIDTH, break_on_hyphens=False)
    yield ""
    yield f"It is judged by the {law.unit[0]}."
    if law.after:
        yield f"In the chain of a step it stands after {', '.join(law.after)}."
    if causes_of(law):
        yield f"Broken in the same step, these explain it: {', '.join(_names(causes_of(law)))}."


def law_object(law: Law) -> dict[str, Any]:
    """The same as a JSON object; its keys are declared in `json_keys`."""
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
