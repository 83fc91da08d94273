"""What explains the origins, in words: a template for each type of explanation, and where in the answer it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gradtrace_analyzer.diff.answer import Answer
from gradtrace_analyzer.diff.explanations.ends import Ends
from gradtrace_analyzer.diff.explanations.explanation import Explanation
from gradtrace_analyzer.diff.explanations.factor_causes import Count, FactorCauses
from gradtrace_analyzer.diff.explanations.later_ranks import LaterRanks
from gradtrace_analyzer.diff.explanations.replays import Replays
from gradtrace_analyzer.diff.explanations.rerun_nodes import RerunNode, RerunNodes
from gradtrace_analyzer.diff.explanations.rewritten_parameter import RewrittenParameters
from gradtrace_analyzer.diff.explanations.skipped_batches import SkippedBatches
from gradtrace_analyzer.failures.crashes import crashes_sentence
from gradtrace_analyzer.failures.phrases import died_phrase
from gradtrace_analyzer.numerics.sketches import is_same_factor
from gradtrace_analyzer.reports.diff.wording import Wording
from gradtrace_analyzer.words.nouns import module_phrase, other_side, upper_first
from gradtrace_analyzer.words.numbers import noun, ranks_phrase, verb

# In front of the first origin's sentence, right behind it, at the end of the explanation, or as a note.
Place = Literal["front", "behind", "end", "note"]


@dataclass(frozen=True)
class Template:
    """Makes the sentences of an explanation where `place_of` says that it is told."""

    place_of: Callable[[Any], Place]
    sentences: Callable[[Any, Wording], Iterator[str]]


def told(answer: Answer, place: Place, say: Wording) -> Iterator[str]:
    """The sentences of an answer's explanations that stand at a place, in the registry's order."""
    for one in answer.explanations:
        template = TEMPLATES[type(one)]
        if template is not None and template.place_of(one) == place:
            yield from template.sentences(one, say)


def _ends(found: Ends, say: Wording) -> Iterator[str]:
    for side, crashed in found.crashed.items():
        yield f"The {side} crashed: {crashes_sentence(crashed, say.steps.one)}."
    for side, died in found.died.items():
        yield from (f"The {side}'s {died_phrase(ending, say.steps.one)}." for ending in died)


def cause_words(found: FactorCauses) -> list[str]:
    """`0.5 = 1/2: the world size is 1 in the baseline and 2 in the candidate`, the likeliest first."""
    if found.loss_scale is not None:
        power = found.loss_scale
        return [f"{2**power:,} = 2^{power}: a loss scale that was not taken out again?"]
    return [f"{_fraction(found.factor)}: {_count(c, found.factor)}" for c in found.counts]


def _count(c: Count, factor: float) -> str:
    said = f"{c.what} {'are' if c.is_of_many else 'is'} {c.baseline:,.10g}"
    if c.baseline != c.candidate:
        return f"{said} in the baseline and {c.candidate:,.10g} in the candidate"
    how, times = ("divided by", "more")
    if is_same_factor(factor, c.baseline):
        how, times = ("no longer divided by", "less")
    return f"{said} on both sides; is it {how} that in the candidate, or once {times} than in the baseline?"


def _fraction(factor: float) -> str:
    """`0.5 = 1/2`, `4`, `0.6 = 3/5`."""
    for below in range(1, 65):
        above = round(factor * below)
        if above and is_same_factor(factor, above / below):
            return f"{factor:.4g}" if below == 1 else f"{factor:.4g} = {above}/{below}"
    return f"{factor:.4g}"


def _causes(found: FactorCauses, say: Wording) -> Iterator[str]:
    likeliest = cause_words(found)[0]
    asks = found.loss_scale is not None or found.counts[0].baseline == found.counts[0].candidate
    yield f"A likely reason of the factor {likeliest}{'' if asks else '.'}"


def _rerun(found: RerunNodes, say: Wording) -> Iterator[str]:
    yield _rerun_node(found.nodes[0])


def _rerun_node(found: RerunNode) -> str:
    """A Node that ran again, with a multiple of what arrived before."""
    return (
        f"Backward pass {found.backward_index}, of the {found.side} alone, runs Nodes of backward pass "
        f"{found.before} again: at {module_phrase(found.module_fqn)} ({found.node_name}, call {found.call_index}) "
        f"{found.times:.4g} times the gradient of before arrives, though at {found.equal_count} other "
        f"{noun(found.equal_count, 'Node')} the same: a path is counted more than once."
    )


def _skipped(found: SkippedBatches, say: Wording) -> Iterator[str]:
    for a in found.ahead:
        yield (
            f"{upper_first(ranks_phrase(a.ranks))} of the {a.side} {verb(a.ranks, 'reads', 'read')} from "
            f"{say.steps.one(a.step)} on what the {other_side(a.side)} reads {a.by} {noun(a.by, 'step')} later: "
            f"{verb(a.ranks, 'it', 'they')} left out {'a batch' if a.by == 1 else f'{a.by} batches'} there."
        )
    for r in found.lagging:
        count = abs(r.count)
        what = "a collective" if count == 1 else f"{count} collectives"
        more = "launched one more:" if count == 1 else "launched more:"
        yield (
            f"Rank {r.rank} of the candidate {'left out' if r.count < 0 else more} {what} before or in "
            f"{say.steps.one(r.step)}: its reductions no longer meet those of the same step on the other ranks."
        )


# By type; None of those that are told in the sentences of origins.
TEMPLATES: Mapping[type[Explanation], Template | None] = {
    LaterRanks: None,
    Replays: None,
    RewrittenParameters: None,
    Ends: Template(lambda found: "front" if found.is_cause else "note", _ends),
    FactorCauses: Template(lambda _: "behind", _causes),
    RerunNodes: Template(lambda _: "end", _rerun),
    SkippedBatches: Template(lambda _: "note", _skipped),
}
