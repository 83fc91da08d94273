"""An origin in words: where it is, how large, and what was equal before it. The templates are in the modules beside."""

from __future__ import annotations

from gradtrace_analyzer.diff.answer import Answer
from gradtrace_analyzer.diff.findings.unseen import Unseen
from gradtrace_analyzer.diff.origin import CodeOrigin, NonfiniteOrigin, Origin
from gradtrace_analyzer.reports.diff.origins import (  # noqa: F401 - each registers the templates of its kinds
    backward,
    forward,
    gradients,
    meetings,
    nonfinite,
    rows,
    structure,
)
from gradtrace_analyzer.reports.diff.origins.clause import clause
from gradtrace_analyzer.reports.diff.places import and_others, row_name, size_phrase
from gradtrace_analyzer.reports.diff.wording import Wording
from gradtrace_analyzer.words.numbers import ranks_phrase


def origin_sentence(origin: Origin, say: Wording) -> str:
    """The sentence of an origin before which everything was compared."""
    return f"{say.steps.first(origin.step)}, {_who(origin)}: {clause(origin, say)}"


def unseen_sentence(origin: Origin, answer: Answer, say: Wording) -> str:
    """The first recorded difference, where what lies in front of it was not recorded or not compared."""
    if isinstance(origin, CodeOrigin):
        return origin_sentence(origin, say)
    only_in = origin.difference.only_in
    differs = f"is in the {only_in} alone" if only_in else size_phrase(origin)
    were = "was" if len(answer.unseen) == 1 and answer.unseen[0].is_one else "were"
    return (
        f"{say.steps.first(origin.step)}, {ranks_phrase(origin.ranks)}: {row_name(origin)}{and_others(origin)} "
        f"{differs}. It is the first difference among what was compared; what came before may be its cause, since "
        f"{', '.join(_unseen(one, say) for one in answer.unseen)} {were} not compared."
    )


def nonfinite_sentence(found: NonfiniteOrigin, say: Wording) -> str:
    """Where the first value is that is finite on one side alone, and what it is on both."""
    return (
        f"The first value that is finite on one side alone: {say.steps.one(found.step)}, "
        f"{ranks_phrase(found.ranks)}, {clause(found, say)}"
    )


def _who(origin: Origin) -> str:
    """The origin's ranks, and where in a pipeline: `rank 1 (stage 1, microbatch 0, input half)`; code is everywhere."""
    who = ranks_phrase(origin.ranks)
    if origin.place is None or isinstance(origin, CodeOrigin):
        return who
    return f"{who} ({origin.place.said})"


def _unseen(one: Unseen, say: Wording) -> str:
    if one.step is not None:
        return say.steps.one(one.step)
    return ranks_phrase(one.ranks) if one.ranks else one.what
