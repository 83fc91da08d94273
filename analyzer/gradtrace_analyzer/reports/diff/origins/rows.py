"""Origins of links that have no kind of their own."""

from __future__ import annotations

from gradtrace_analyzer.diff.origin import RowOrigin
from gradtrace_analyzer.reports.diff.origins.clause import clause
from gradtrace_analyzer.reports.diff.places import row_name, size_phrase
from gradtrace_analyzer.reports.diff.wording import Wording


@clause.register
def row(origin: RowOrigin, _: Wording) -> str:
    """What it is of, in the words that its table declares, and how it differs."""
    return f"{row_name(origin)} {size_phrase(origin)}."
