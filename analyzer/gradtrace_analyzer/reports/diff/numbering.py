"""Steps in sentences where both sides number them otherwise: the baseline's number, and the candidate's beside it."""

from __future__ import annotations

import re

from gradtrace_analyzer.diff.scope.cover import Cover

# `step 3`, `Steps 3-7`, `steps 3 to 7`, and not what is a count (`5 steps`) or an option.
_STEPS = re.compile(r"\b([Ss])tep(s?) (-?\d+)((?:-| to )(-?\d+))?(?![\w=]|\.\d|-\d| to \d)")


def with_both_numbers(text: str, cover: Cover) -> str:
    """The text with the candidate's own number after each first mention of a step: `step 11 (the candidate's 7)`.

    Of steps that only the candidate can have, its own number alone is said.
    """
    offset = cover.step_offset
    if not offset:
        return text
    told: set[str] = set()

    def both(found: re.Match[str]) -> str:
        first, last = int(found[3]), int(found[5] if found[5] is not None else found[3])
        own = f"{first - offset}" if first == last else f"{first - offset}-{last - offset}"
        many = found[2]
        if first < 0:
            start = "The" if found[1] == "S" else "the"
            return f"{start} candidate's step{many} {own}"
        if first < offset or found[0].lower() in told:  # of a step that the candidate cannot have
            return found[0]
        told.add(found[0].lower())
        return f"{found[0]} (the candidate's {own})"

    return _STEPS.sub(both, text)


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
