"""Sentences beside an answer: what a person should know of the runs before they believe it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradtrace_analyzer.diff.code.legal_changes import SetAside
from gradtrace_analyzer.diff.code.structure import Structure
from gradtrace_analyzer.diff.judged_rows import JudgedRows
from gradtrace_analyzer.diff.note import FirstOfAttempt, GeneratorsApart, JoinedAttempts, Note
from gradtrace_analyzer.diff.origin import Origin
from gradtrace_analyzer.diff.scope.cover import Cover
from gradtrace_analyzer.diff.scope.step_alignment import alignment_hint
from gradtrace_analyzer.runs.run import Run, is_same_recording
from gradtrace_analyzer.words.numbers import counted


def compared_with_itself(runs: Mapping[str, Run]) -> list[str]:
    """That it was, where both sides are one recording."""
    if not is_same_recording(runs["baseline"], runs["candidate"]):
        return []
    return ["Both sides are the same recording: it was compared with itself."]


def joined_attempts(runs: Mapping[str, Run], origins: Sequence[Origin]) -> list[Note]:
    """Where a later attempt of a side took over, and that an origin lies just there."""
    found: list[Note] = []
    for side, run in runs.items():
        if not run.history:
            continue
        taken = run.first_of_attempts
        found.append(JoinedAttempts(side, run))
        if origins and origins[0].step in taken:
            found.append(FirstOfAttempt(side, origins[0].step, taken[origins[0].step]))
    return found


def other_steps(runs: Mapping[str, Run], cover: Cover, origins: Sequence[Origin]) -> list[str]:
    """That other steps of the two runs begin with equal parameters, where the first that pair do not."""
    firsts = {steps[0] for steps in cover.steps.values() if steps}
    if not origins or origins[0].link != "parameters" or origins[0].step not in firsts:
        return []
    hint = alignment_hint(runs)
    return [] if hint is None else [hint]


def counted_only(structure: Structure, aside: Sequence[SetAside], count: int) -> list[str]:
    """That what one side alone has is not told of all steps, where it is told, or was set `aside`."""
    if not count or not (structure.one_sided or any(a.only_in != "both" for a in aside)):
        return []
    which = counted(count, "more step")
    return [
        f"What one side alone has was looked for in the steps that were opened; of {which} what differs was counted."
    ]


def partly_followed(judged: JudgedRows, origins: Sequence[Origin]) -> list[str]:
    """That a step holds more differences than were followed, so that what an origin hands on is counted too low."""
    count = judged.left_out(origins[0].step) if origins else 0
    if not count:
        return []
    return [
        f"{count:,} more rows differ in that step than were followed; what is inherited is counted without them."
    ]


def abandoned(judged: JudgedRows, origins: Sequence[Origin]) -> list[str]:
    """That one side gave up a forward where the other went on, for what it alone has."""
    for origin in origins:
        if origin.link != "structure":
            continue
        counts = judged.abandoned_forwards(origin.step, origin.difference.rank)
        if counts is not None and counts[0] != counts[1]:
            before, after = (counted(n, "forward") if n else "no forward" for n in counts)
            return [
                f"In that step, rank {origin.difference.rank} made {before} in the baseline that no backward pass "
                f"followed, and {after} in the candidate."
            ]
    return []


def rng_notes(judged: JudgedRows, steps: Sequence[int]) -> list[Note]:
    """That generators differ, and in which steps, where no difference shows it."""
    apart = {step: ranks for step in steps if (ranks := judged.rng_differs(step))}
    if not apart:
        return []
    everyone = {rank for ranks in apart.values() for rank in ranks}
    return [GeneratorsApart(tuple(apart), tuple(sorted(everyone)))]
