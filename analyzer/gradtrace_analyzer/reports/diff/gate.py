"""What `--fail-on` found, in words: one line for each link that failed."""

from __future__ import annotations

from gradtrace_analyzer.diff.gate import NO_ERROR, GateFailure
from gradtrace_analyzer.reports.diff.places import place_of
from gradtrace_analyzer.words.numbers import ranks_phrase


def failure_words(found: GateFailure) -> str:
    """What failed, in one line: step, ranks, place, error and threshold."""
    said = (
        f"step {found.step}" if found.step is not None else "",
        ranks_phrase(found.ranks) if found.ranks else "",
        found.place if isinstance(found.place, str) else place_of(found.place),
    )
    where = ", ".join(filter(None, said))
    error = "different" if found.error is None else f"relative error {found.error:.2g}"
    limit = "" if found.link in NO_ERROR else f", fails from {found.gate.at_least:g}"
    return f"{found.link}: {error}{limit}{f' ({where})' if where else ''}"
