"""What an origin's sentence says was equal: only what both sides recorded (`Origin.rests_on`); else that it was not."""

from __future__ import annotations

from gradtrace_analyzer.diff.origin import Ground, Origin
from gradtrace_analyzer.reports.diff.wording import Wording
from gradtrace_analyzer.words.nouns import enumerated
from gradtrace_analyzer.words.numbers import verb


def if_known(origin: Origin, ground: Ground, words: str) -> str:
    """The words, where the origin rests on that ground."""
    return words if ground in origin.rests_on else ""


def unless_known(origin: Origin, ground: Ground, words: str) -> str:
    """The words, where it does not."""
    return "" if ground in origin.rests_on else words


def nodes_equal(origin: Origin, say: Wording) -> str:
    """That what Nodes gave is equal, where they were recorded."""
    return if_known(
        origin, "nodes", f", although the gradients that the Nodes gave are {say.equal}"
    )


def call_equal(origin: Origin, say: Wording) -> str:
    """`, although its inputs are equal` of what a module's output is made of, and what of it nobody knows."""
    knows_inputs = "reads" in origin.rests_on
    knows_parameters = bool(origin.rests_on & {"parameters", "no parameters"})
    said = f", although its inputs are {say.equal}" if knows_inputs else ""
    if "parameters" in origin.rests_on and knows_inputs:
        said += ", and its parameters were when the step began"
    elif "parameters" in origin.rests_on:
        said += f", although its parameters were when the step began {say.equal}"
    parts = (("inputs", knows_inputs), ("parameters", knows_parameters))
    unknown = [what for what, is_known in parts if not is_known]
    return f"{said}{f'; its {enumerated(unknown, 2)} were not recorded on both sides' if unknown else ''}"


_SETTINGS = "the optimizer's settings"
# What an update is made of, by the ground on which it is known.
_UPDATED_BY: tuple[tuple[Ground, str], ...] = (
    ("final", "its gradient"),
    ("before", "its value before the forward"),
    ("settings", _SETTINGS),
)


def update_equal(origin: Origin, say: Wording) -> str:
    """`although ... are equal` of what an update is made of, as far as both sides recorded it; else nothing."""
    known = [words for ground, words in _UPDATED_BY if ground in origin.rests_on]
    if not known:
        return ""
    return f"although {enumerated(known, 3)} {verb(known, 'is', 'are')} {say.equal}"


def update_unknown(origin: Origin) -> str:
    """`; ... were not recorded on both sides` of what an update is made of; else nothing."""
    unknown = [words for ground, words in _UPDATED_BY if ground not in origin.rests_on]
    if not unknown:
        return ""
    were = "were" if unknown[0] == _SETTINGS else verb(unknown, "was", "were")
    return f"; {enumerated(unknown, 3)} {were} not recorded on both sides"
