"""What a comparison cannot say: why there is nothing to compare, and what lies before an origin and was not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradtrace_analyzer.diff.align import Alignment
from gradtrace_analyzer.diff.answer import Origin
from gradtrace_analyzer.diff.links import LINKS, LOCAL_LINKS
from gradtrace_analyzer.diff.scope.cover import Cover, all_steps, held, setting
from gradtrace_analyzer.runs.run import Run, ranks_phrase


def nothing_to_compare(
    runs: Mapping[str, Run],
    ranks: Sequence[int],
    steps: Mapping[str, Mapping[int, Sequence[int]]],
    alignment: Alignment,
    cover: Cover,
) -> str | None:
    """Why the runs cannot be compared, where they cannot; `steps` as `Alignment.steps` gives them."""
    a, b = runs["baseline"], runs["candidate"]
    if not ranks:
        asked = cover.chosen.listed_ranks
        which = f"{held(asked)} was not" if asked else "no rank was"
        return f"{which} recorded on both sides: {held(a.ranks)} against {held(b.ranks)}"
    if not steps["both"]:
        if cover.chosen.step is not None:
            return f"step {cover.chosen.step} was not recorded on both sides"
        own = {side: all_steps(steps[side]) for side in runs}
        empty = [side for side, of_side in own.items() if not of_side]
        if empty:
            return (
                f"the {' and the '.join(empty)} {'holds' if len(empty) == 1 else 'hold'} no step yet: nothing was "
                "recorded before the job ended, or it has only just begun"
            )
        return (
            f"no step was recorded on both sides: {held(own['baseline'], 'step')} against "
            f"{held(own['candidate'], 'step')} (GRADTRACE_STEP_OFFSET shifts a resumed job's; GRADTRACE_STEPS chooses)"
        )
    if not cover.chosen.is_all and not any(cover.rows.values()):
        return f"nothing that both recorded is of {cover.chosen.said}"
    if not alignment.summarised():
        return (
            "one side recorded neither values nor norms (GRADTRACE_SUMMARY=off, or nothing that could be "
            "summarised); names and times cannot tell whether the runs agree"
        )
    return None


# The tables that hold each link, as far as they can be left out by a setting.
_HELD_IN = (
    ("parameters", "parameters", "parameters"),
    ("inputs", "inputs", "inputs"),
    ("forward", "module_calls", "module outputs"),
    ("backward", "node_events", "gradients at the Nodes"),
    ("local_gradient", "gradients", "local gradients"),
)


def unseen_before(
    runs: Mapping[str, Run], cover: Cover, origin: Origin, common: Sequence[int]
) -> list[str]:
    """What lies before an origin and was not compared: no sentence may call it equal."""
    before = LINKS.index(origin.link) if origin.link != "structure" else len(LINKS)
    found = [
        what
        for link, table, what in _HELD_IN
        if LINKS.index(link) < before
        and not (cover.rows.get(table) and cover.chosen.wants_link(link))
    ]
    chosen = [setting(run, "modules") for run in runs.values()]
    if any(chosen) or cover.chosen.modules:
        found.append("modules outside the filter")
    if origin.link not in LOCAL_LINKS:
        seen = set(cover.ranks)
        unseen = {r for run in runs.values() for r in range(run.world_size or 0)} - seen
        if unseen:
            found.append(ranks_phrase(unseen))
    earlier = [step for step in common if step < origin.step]
    if origin.link == "parameters" and origin.step > 0 and origin.step - 1 not in earlier:
        found.append(f"step {origin.step - 1}")
    return found
