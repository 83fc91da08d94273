"""How the sentences of one answer are worded: which numbers its steps have, and what is called equal."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradtrace_analyzer.diff.answer import Answer
from gradtrace_analyzer.reports.diff.numbering import Steps


@dataclass(frozen=True)
class Wording:
    """Handed to all that makes sentences of one text; `steps` remembers what was said in it, so that sentences are
    made in the order in which they are read."""

    steps: Steps = field(default_factory=Steps)
    # `equal`, or `equal within rounding` where smaller differences than those told were passed over.
    equal: str = "equal"


def wording_of(answer: Answer) -> Wording:
    """That of a text which begins with an answer's explanation."""
    passes_over = answer.sums is not None or answer.first_bits is not None
    return Wording(
        Steps(answer.cover.step_offset),
        f"equal within {noise_word(answer)}" if passes_over else "equal",
    )


def noise_word(answer: Answer) -> str:
    """What smaller differences are called: `rounding`, or `noise` where it was measured."""
    return "rounding" if answer.noise is None or answer.noise.is_zero else "noise"
