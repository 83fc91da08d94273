"""Where a rank is or was last seen, and that it died there, in words."""

from __future__ import annotations

from gradtrace_analyzer.failures.endings import Ending
from gradtrace_analyzer.runs.last_seen import RankPlace
from gradtrace_analyzer.words.nouns import module_phrase
from gradtrace_analyzer.words.numbers import StepWords, step_phrase


def died_phrase(ending: Ending, step_words: StepWords = step_phrase) -> str:
    """`rank 1 died in step 3, in SigmoidBackward0 of blocks.2`; `step_words` say the step."""
    verb_ = "died" if ending.state == "died" else "was last seen"
    where = "before its first event"
    if ending.place is not None:
        where = where_phrase(ending.place, step_words)
    return f"rank {ending.rank} {verb_} {where}"


def first_line(text: str) -> str:
    """The first line of an exception's text, cut at 200 characters."""
    first = text.strip().splitlines()[0] if text.strip() else ""
    return first if len(first) <= 200 else f"{first[:200].rstrip()} ..."


def where_phrase(place: RankPlace, step_words: StepWords = step_phrase) -> str:
    """`in step 3, in SigmoidBackward0 of blocks.2`; `step_words` say the step."""
    step = "" if place.step is None else f"in {step_words(place.step)}, "
    if place.doing == "node":
        of = place.parameter_fqn or module_phrase(place.module_fqn)
        again = (
            ""
            if place.module_inside is None
            else f", running the forward of {module_phrase(place.module_inside)} again"
        )
        return f"{step}in {place.node_name} of {of}{again}"
    if place.doing == "module":
        return f"{step}in the forward of {module_phrase(place.module_fqn)}"
    if place.doing == "backward":
        engine = "in no Node (it waits for reductions, or runs a callback)"
        return f"{step}in backward pass {place.backward_index}, {engine}"
    if place.doing == "optimizer":
        return f"{step}in a step of {place.optimizer}"
    after = {
        "after_module": f"the forward of {module_phrase(place.module_fqn)}",
        "after_backward": f"backward pass {place.backward_index}",
        "after_optimizer": f"a step of {place.optimizer}",
    }[place.doing]
    return f"{step}after {after}, in code outside any module, backward pass or optimizer"
