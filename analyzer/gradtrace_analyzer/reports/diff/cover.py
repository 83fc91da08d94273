"""What was compared and what was not, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gradtrace_analyzer.diff.scope.cover import Cover
from gradtrace_analyzer.failures.crashes import crashes_sentence
from gradtrace_analyzer.reports.diff.numbering import Steps
from gradtrace_analyzer.words.nouns import SIDES
from gradtrace_analyzer.words.numbers import (
    counts_phrase,
    ranks_phrase,
    rows_phrase,
    stages_phrase,
)


def extent(cover: Cover, numbered: Steps) -> str:
    """`ranks 0-1, steps 0-5`; rank by rank where their steps differ."""
    by_steps: dict[tuple[int, ...], list[int]] = {}
    for rank in cover.ranks:
        by_steps.setdefault(cover.steps.get(rank, ()), []).append(rank)
    who = stages_phrase if cover.by_stage else ranks_phrase
    return "; ".join(
        f"{who(ranks)}, {numbered.many(steps)}" for steps, ranks in by_steps.items() if steps
    )


def compared(cover: Cover, steps: Steps) -> str:
    """Ranks and steps that were compared, and the numbers of rows by table; `nothing` where there are none."""
    rows = rows_phrase({table: count for table, count in cover.rows.items() if count})
    return f"{extent(cover, steps)}; {rows}" if cover.steps and rows else "nothing"


# What a person asks first of a table's rows, where nothing differs by more than rounding.
_VALUES = (
    ("output", "module_calls"),
    ("loss", "backward_passes"),
    ("gradient", "node_events"),
    ("gradient", "gradients"),
)


def nothing_more(cover: Cover) -> str:
    """`no output, loss or gradient`, of these only what was compared; `nothing` where none was."""
    found = dict.fromkeys(
        what
        for what, table in _VALUES
        if cover.rows.get(table) and table not in cover.without_values
    )
    *most, last = found or ("",)
    if not last:
        return "nothing"
    return f"no {', '.join(most)}{' or ' * bool(most)}{last}"


def crashes_told(cover: Cover, steps: Steps) -> str:
    """That ranks of a side, or of both, were stopped before their end, and by what; nothing where none was."""
    if not cover.crashed:
        return ""
    if cover.crashed_alike:
        how = "crashed" if cover.raised else "were cut off"
        return f"Both {how}: {crashes_sentence(cover.crashes[cover.crashed[0]], steps.one)}."
    return " ".join(
        f"The {side} {'crashed' if side in cover.raised else 'was cut off'}: "
        f"{crashes_sentence(cover.crashes[side], steps.one)}."
        for side in cover.crashed
    )


def lacking(cover: Cover, steps: Steps) -> str:
    """What was not compared, as a sentence to follow others; nothing where there is no such thing."""
    said = list(_lacking_steps(cover, steps))
    if cover.without_values:
        said.append(
            f"values of {', '.join(cover.without_values)}, which were not recorded on both sides"
        )
    if not cover.selection.is_all:
        said.append(f"anything but what was asked for ({cover.selection.told(steps.one)})")
    return f"Not compared: {'; '.join(said)}." if said else ""


def _lacking_steps(cover: Cover, numbered: Steps) -> Iterator[str]:
    for side, by_rank in cover.missing_steps.items():
        by_steps: dict[tuple[int, ...], list[int]] = {}
        for rank, steps in by_rank.items():
            by_steps.setdefault(steps, []).append(rank)
        who = stages_phrase if cover.by_stage else ranks_phrase
        for steps, ranks in by_steps.items():
            yield f"the {side} lacks {numbered.many(steps)} of {who(ranks)}"


def caveats(
    cover: Cover, new_steps: Callable[[], Steps], *, are_summed: bool = False
) -> Iterator[str]:
    """What restricts the answer, a sentence each. Ranks that are summed over are not missed. `new_steps` says
    the steps of one sentence."""
    if not cover.selection.is_all:
        yield f"Compared only, as asked: {cover.selection.told(new_steps().one)}."
    for steps_lacking in _lacking_steps(cover, new_steps()):
        yield f"Not compared: {steps_lacking}."
    if cover.without_values:
        tables = ", ".join(cover.without_values)
        yield f"Not compared: values of {tables}, which were not recorded on both sides; their rows were, by name."
    for side, steps in cover.flights.items():
        yield f"The {side} is a flight recording: it holds {new_steps().many(steps)} only."
    for side in SIDES:
        missing = cover.missing_ranks[side]
        if missing and not are_summed:
            yield f"Not compared: the {side} lacks {ranks_phrase(missing)}."
        for table, rank in cover.unread[side]:
            yield f"Not compared: the {side} has lost rows of {table} of rank {rank}."
        if cover.incomplete_ranks[side]:
            ranks = ranks_phrase(cover.incomplete_ranks[side])
            yield (
                f"The {side}'s {ranks} did not end the recording (killed, or still running): "
                "what its last step lacks is no difference."
            )
        for what, counts in (
            ("rows dropped", cover.dropped[side]),
            ("tensors without a summary", cover.unsummarised[side]),
        ):
            if counts:
                yield f"The {side} has {what}: {counts_phrase(counts)}."
        for problem in cover.problems[side]:
            yield f"The {side}'s recorder gave up in part: {problem}."
        if cover.filters[side]:
            chosen = "; ".join(
                f"{k} {', '.join(map(str, v))}" for k, v in cover.filters[side].items()
            )
            yield f"The {side} recorded only {chosen}."
