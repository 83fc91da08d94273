"""What a comparison cannot say: why there is nothing to compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gradtrace_analyzer.diff.scope.cover import Cover, all_steps, held
from gradtrace_analyzer.runs.run import Run
from gradtrace_analyzer.words.numbers import verb


def nothing_to_compare(
    runs: Mapping[str, Run],
    ranks: Sequence[int],
    steps: Mapping[str, Mapping[int, Sequence[int]]],
    cover: Cover,
    *,
    has_summaries: Callable[[], bool],
) -> str | None:
    """Why the runs cannot be compared, where they cannot.

    `steps` are those of each rank by where they were seen (`both`, `baseline`, `candidate` alone); `has_summaries`
    looks whether both sides have summaries of anything, which is asked last.
    """
    a, b = runs["baseline"], runs["candidate"]
    if not ranks:
        asked = cover.selection.listed_ranks
        which = f"{held(asked)} {verb(asked, 'was', 'were')} not" if asked else "no rank was"
        return f"{which} recorded on both sides: {held(a.ranks)} against {held(b.ranks)}"
    if not steps["both"]:
        if cover.selection.step is not None:
            return f"step {cover.selection.step} was not recorded on both sides"
        own = {side: all_steps(steps[side]) for side in runs}
        empty = [side for side, of_side in own.items() if not of_side]
        if empty:
            return (
                f"the {' and the '.join(empty)} {verb(empty, 'holds', 'hold')} no step yet: nothing was "
                "recorded before the job ended, or it has only just begun"
            )
        return (
            f"no step was recorded on both sides: {held(own['baseline'], 'step')} against "
            f"{held(own['candidate'], 'step')} (GRADTRACE_STEP_OFFSET shifts a resumed job's, "
            "--align-steps what is recorded already; GRADTRACE_STEPS chooses)"
        )
    if not cover.selection.is_all and not any(cover.rows.values()):
        return f"nothing that both recorded is of {cover.selection.phrase}"
    if not has_summaries():
        return (
            "one side recorded neither values nor norms (GRADTRACE_SUMMARY=off, or nothing that could be "
            "summarised); names and times cannot tell whether the runs agree"
        )
    return None
