"""Numbers in a sentence: spans of ranks and steps, things counted, verbs that fit their number, times and sizes."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

# How a step is said in a sentence: `step 3`, or with its number on another side.
StepWords = Callable[[int], str]
StepsWords = Callable[[Iterable[int]], str]


def spans(numbers: Iterable[int]) -> str:
    """Numbers as a person writes them: `0-3,8-15`; nothing where there are none."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in found)


def ranks_phrase(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 4-7`."""
    return _numbered("rank", ranks)


def step_phrase(step: int) -> str:
    """`step 3`."""
    return f"step {step}"


def steps_phrase(steps: Iterable[int]) -> str:
    """`step 3`, or `steps 0-2`."""
    return _numbered("step", steps)


def stages_phrase(stages: Iterable[int]) -> str:
    """`stage 0`, or `stages 0-2`."""
    return _numbered("stage", stages)


def _numbered(one: str, numbers: Iterable[int]) -> str:
    text = spans(numbers)
    return f"{one} {text}" if text.isdigit() else f"{one}s {text}"


def noun(count: int, one: str) -> str:
    """What one thing is called, in the plural unless it is one: `step`, `backward passes`, `microbatches`."""
    if count == 1:
        return one
    if one.endswith("y") and one[-2:-1] not in "aeiou":
        return f"{one[:-1]}ies"
    return f"{one}es" if one.endswith(("ss", "ch")) else f"{one}s"


def counted(count: int, one: str) -> str:
    """`1 bucket`, `3,000 buckets`."""
    return f"{count:,} {noun(count, one)}"


def counts_phrase(counts: Mapping[str, int]) -> str:
    """Counts by what they are of: `3 module_calls, 1,200 node_events`."""
    return ", ".join(f"{count:,} {what}" for what, count in counts.items())


def rows_phrase(counts: Mapping[str, int]) -> str:
    """Counts of rows by table: `1 backward_pass, 3 inputs`."""
    return counts_phrase({_of_rows(table, count): count for table, count in counts.items()})


def _of_rows(table: str, count: int) -> str:
    """What so many rows of a table are called; a table's name is a plural."""
    return table if count != 1 else table.removesuffix("es" if table.endswith("sses") else "s")


def and_more(count: int) -> str:
    """` and 3 more`, to follow what is named; nothing where no more are left."""
    return f" and {count} more" if count > 0 else ""


def also_in(steps: Sequence[int], first: int) -> str:
    """What to add where later steps show the same."""
    later = [step for step in steps if step > first]
    return f" So in {counted(len(later), 'later step')}." if later else ""


def verb(things: Collection[object] | int, one: str, several: str) -> str:
    """The verb that fits the number of things, or a count of them."""
    count = things if isinstance(things, int) else len(things)
    return one if count == 1 else several


def possessive(ranks: Collection[int]) -> str:
    """`rank 1's`, `ranks 0-1's`."""
    return f"{ranks_phrase(ranks)}'s"


def ms_text(ns: float | None) -> str:
    """Nanoseconds with as many digits as a person reads: `0.25 ms`, `41.3 ms`, `12.0 s`; `-` for None."""
    if ns is None:
        return "-"
    ms = ns / 1e6
    if ms >= 10_000:
        return f"{ms / 1000:,.1f} s"
    return f"{ms:.1f} ms" if ms >= 10 else f"{ms:.2f} ms"


def seconds_text(seconds: float) -> str:
    """`0.52 s`, `41 s`, `3 min`, `2.5 h`, `3 days`."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} days"


def clock_text(unix_ns: int) -> str:
    """Local time of the day, with milliseconds: `11:02:03.456`."""
    at = datetime.datetime.fromtimestamp(unix_ns / 1e9)
    return at.strftime("%H:%M:%S.") + f"{at.microsecond // 1000:03d}"


def percent_text(share: float | None) -> str:
    """A fraction as a person writes it: `41%`, `3.2%`, `0%`; `-` for None."""
    if share is None:
        return "-"
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{share:.1%}"


def bytes_text(byte_count: int) -> str:
    """Bytes in the unit that reads best: `512 B`, `1.4 MB`."""
    scaled = float(byte_count)
    for unit in ("B", "kB", "MB", "GB"):
        if scaled < 1000:
            return f"{byte_count} B" if unit == "B" else f"{scaled:.3g} {unit}"
        scaled /= 1000
    return f"{scaled:.3g} TB"


def number(value: object) -> str:
    """A value as a person writes it: a float with six digits, all else as Python does."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def told_apart(a: float | None, b: float | None) -> tuple[str, str]:
    """Two numbers with two digits, or as many (seven at most) as it takes to tell them apart; `-` for None."""
    if a is None or b is None:
        return ("-" if a is None else f"{a:.2g}", "-" if b is None else f"{b:.2g}")
    for digits in range(2, 8):
        if a == b or f"{a:.{digits}g}" != f"{b:.{digits}g}":
            return f"{a:.{digits}g}", f"{b:.{digits}g}"
    return f"{a:.7g}", f"{b:.7g}"


def ranks_in(text: str | None) -> tuple[int, ...]:
    """The ranks of a JSON list, as tables hold those of a group; none where it is damaged."""
    try:
        ranks = json.loads(text or "")
    except (ValueError, RecursionError):
        return ()
    is_list = isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks)
    return tuple(ranks) if is_list else ()
