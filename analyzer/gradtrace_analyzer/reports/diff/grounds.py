"""What an origin's sentence says was equal: only what both sides recorded (`Origin.rests_on`); else that it was not."""

from __future__ import annotations

from gradtrace_analyzer.diff.origin import Ground, Origin
from gradtrace_analyzer.reports.diff.places import parameter_of
from gradtrace_analyzer.words.nouns import enumerated, other_side
from gradtrace_analyzer.words.numbers import verb


def if_known(origin: Origin, ground: Ground, words: str) -> str:
    """The words, where the origin rests on that ground."""
    return words if ground in origin.rests_on else ""


def unless_known(origin: Origin, ground: Ground, words: str) -> str:
    """The words, where it does not."""
    return "" if ground in origin.rests_on else words


def gradient_of_one(origin: Origin) -> str:
    """That the optimizer saw a gradient on one side alone; or that on the other nothing tells what it saw."""
    other = other_side(str(origin.difference.only_in))
    if "final" not in origin.rests_on:
        return (
            f"what the optimizer saw was not recorded in the {other}, that of {parameter_of(origin)} was in the "
            f"{origin.difference.only_in}."
        )
    return (
        f"the optimizer saw no gradient of {parameter_of(origin)} in the {other}: it had none when the "
        "optimizer stepped, or is in no group of it. All that was recorded before it is equal."
    )


def in_microbatch(origin: Origin) -> str:
    """` in microbatch 2`, of a call that is not of the step's first; where a stage is named, it names that too."""
    number = origin.difference.key.get("microbatch")
    return f" in microbatch {number}" if number and origin.place is None else ""


def output_sentence(origin: Origin, module: str, size: str) -> str:
    """That a module's output differs, and which of its inputs and parameters are known to be equal."""
    grounds = origin.rests_on
    again = (
        ", recomputed in the backward pass,"
        if origin.difference.key.get("phase") == "recompute"
        else ""
    )
    said = f"the output of {module}{in_microbatch(origin)}{again} {size}"
    said += if_known(origin, "reads", ", although its inputs are equal")
    knows_parameters = bool(grounds & {"parameters", "no parameters"})
    if "parameters" in grounds:
        said += ", and its" if "reads" in grounds else ", although its"
        said += " parameters were when the step began"
        said += "" if "reads" in grounds else " equal"
    unknown = [
        what
        for what, is_known in (("inputs", "reads" in grounds), ("parameters", knows_parameters))
        if not is_known
    ]
    return f"{said}{f'; its {enumerated(unknown, 2)} were not recorded on both sides' if unknown else ''}."


def unread(origin: Origin) -> str:
    """That nothing tells what a Node read."""
    return unless_known(origin, "reads", " What it reads was not recorded on both sides.")


def nodes_equal(origin: Origin) -> str:
    """That what Nodes gave is equal, where they were recorded."""
    return if_known(origin, "nodes", ", although the gradients that the Nodes gave are equal")


_SETTINGS = "the optimizer's settings"


def update_grounds(origin: Origin) -> tuple[str, str]:
    """`, although ... are equal` of what an update is made of, as far as both sides recorded it; and a word for
    what they did not, as what may be the cause."""
    parts: tuple[tuple[Ground, str], ...] = (
        ("final", "its gradient"),
        ("before", "its value before the forward"),
        ("settings", _SETTINGS),
    )
    known = [words for ground, words in parts if ground in origin.rests_on]
    unknown = [words for ground, words in parts if ground not in origin.rests_on]
    equal = f", although {enumerated(known, 3)} {verb(known, 'is', 'are')} equal" if known else ""
    if not unknown:
        return equal, ""
    were = "were" if unknown[0] == _SETTINGS else verb(unknown, "was", "were")
    return f"{equal}; {enumerated(unknown, 3)} {were} not recorded on both sides", "these, "
