"""Words that the laws' sentences share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from gradtrace_analyzer.runs.run import ranks_phrase, spans


def listed(names: Sequence[str | None], shown: int = 1) -> str:
    """`head.weight and 5 more`; a parameter that no root owned is null in the records."""
    said = [name or "a parameter without a name" for name in names]
    if len(names) <= shown:
        return " and ".join(said)
    return f"{', '.join(said[:shown])} and {len(names) - shown} more"


def bucket_phrase(step: int, bucket_index: int, parameter_fqns: Sequence[str | None]) -> str:
    """`Step 0, bucket 0 (head.weight and 5 more)`."""
    return f"Step {step}, bucket {bucket_index} ({listed(parameter_fqns)})"


def steps_phrase(steps: Iterable[int]) -> str:
    """`step 3`, or `steps 0-2`."""
    text = spans(steps)
    return f"step {text}" if text.isdigit() else f"steps {text}"


def counted(count: int, what: str) -> str:
    """`1 bucket`, `3 buckets`."""
    if count == 1:
        return f"1 {what}"
    return f"{count:,} {what}es" if what.endswith("ss") else f"{count:,} {what}s"


def also_in(steps: Sequence[int], first: int) -> str:
    """What to add where later steps show the same."""
    later = [step for step in steps if step > first]
    return f" So in {counted(len(later), 'later step')}." if later else ""


def verb(things: Collection[object], one: str, several: str) -> str:
    """The verb that fits the number of things."""
    return one if len(things) == 1 else several


def possessive(ranks: Collection[int]) -> str:
    """`rank 1's`, `ranks 0-1's`."""
    return f"{ranks_phrase(ranks)}'s"


def module_phrase(module_fqn: str | None) -> str:
    """A module's name in a sentence."""
    if module_fqn is None:
        return "code outside any module"
    return module_fqn or "the root module"


def upper_first(text: str) -> str:
    """The text with a capital in front, names after it left as they are."""
    return text[:1].upper() + text[1:]
