"""Numbers in a sentence: ranks and steps as spans, things counted, verbs that fit their number."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def spans(numbers: Iterable[int]) -> str:
    """Numbers as a person writes them: `0-3,8-15`."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in found)


def ranks_phrase(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 4-7`."""
    text = spans(ranks)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


def steps_phrase(steps: Iterable[int]) -> str:
    """`step 3`, or `steps 0-2`."""
    text = spans(steps)
    return f"step {text}" if text.isdigit() else f"steps {text}"


def counted(count: int, what: str) -> str:
    """`1 bucket`, `3 buckets`."""
    return f"1 {what}" if count == 1 else f"{count:,} {plural(what)}"


def plural(what: str) -> str:
    """`buckets`, `backward passes`."""
    return f"{what}es" if what.endswith("ss") else f"{what}s"


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
