"""Steps in sentences where both sides number them otherwise: the baseline's number, and the candidate's beside it."""

from __future__ import annotations

from collections.abc import Iterable

from gradtrace_analyzer.diff.scope.cover import Cover
from gradtrace_analyzer.words.nouns import upper_first
from gradtrace_analyzer.words.numbers import spans


class Steps:
    """Says steps in the sentences of one text, in the order in which they are read.

    The candidate's own number follows each first mention: `step 11 (the candidate's 7)`. Of steps that only the
    candidate can have, its own number alone is said. `offset` is by how much the candidate's were numbered higher.
    """

    def __init__(self, offset: int = 0) -> None:
        self._offset = offset
        self._told: set[str] = set()

    def one(self, step: int) -> str:
        """`step 11 (the candidate's 7)`, or `step 11` where that was said before."""
        return self.many([step])

    def many(self, steps: Iterable[int]) -> str:
        """`steps 4-9 (the candidate's 0-5)`; of one step as `one`."""
        numbers = sorted(set(steps))
        noun = "step" if len(numbers) == 1 else "steps"
        said, own = f"{noun} {spans(numbers)}", spans(n - self._offset for n in numbers)
        if not self._offset or not numbers or said in self._told:
            return said
        if numbers[0] < 0:
            return f"the candidate's {noun} {own}"
        if numbers[0] < self._offset:  # of a step that the candidate cannot have
            return said
        self._told.add(said)
        return f"{said} (the candidate's {own})"

    def first(self, step: int) -> str:
        """The same at the beginning of a sentence: `Step 11 (the candidate's 7)`."""
        return upper_first(self.one(step))


def numbering_sentence(cover: Cover) -> str | None:
    """How the candidate's steps were numbered, where they were numbered otherwise than by itself."""
    if cover.alignment is None:
        return None
    offset, framework = cover.alignment.offset, cover.alignment.framework
    by = "as asked" if framework is None else f"as {framework} counts"
    if not offset:
        return f"Steps of the same number pair, {by}."
    mine, others = (0, offset) if offset > 0 else (-offset, 0)
    return f"Steps have the baseline's numbers: the candidate's step {mine} is held against its {others}, {by}."
