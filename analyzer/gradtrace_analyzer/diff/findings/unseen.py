"""What lies before an origin and was not compared: no sentence may call it equal."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gradtrace_analyzer.diff.links import LINKS, LOCAL_LINKS
from gradtrace_analyzer.diff.origin import CodeOrigin, Origin
from gradtrace_analyzer.diff.scope.cover import Cover, setting
from gradtrace_analyzer.runs.run import Run

# The tables that hold each link, as far as they can be left out by a setting.
_HELD_IN = (
    ("parameters", "parameters", "parameters"),
    ("inputs", "inputs", "inputs"),
    ("forward", "module_calls", "module outputs"),
    ("backward", "node_events", "gradients at the Nodes"),
    ("local_gradient", "gradients", "local gradients"),
)


@dataclass(frozen=True)
class Unseen:
    """Something that was not compared: some ranks, a step, or else what is named, in the plural."""

    what: str = ""
    ranks: tuple[int, ...] = ()
    step: int | None = None

    @property
    def is_one(self) -> bool:
        """Whether it is one rank or one step."""
        return self.step is not None or len(self.ranks) == 1


def unseen_before(
    runs: Mapping[str, Run],
    cover: Cover,
    origin: Origin,
    common: Sequence[int],
    recorded: Collection[str],
) -> list[Unseen]:
    """What lies before an origin and was not compared: no sentence may call it equal. `recorded` are the links of
    which both sides hold values in its step."""
    before = LINKS.index(origin.link)
    if origin.link == "structure" and not isinstance(origin, CodeOrigin):
        # Of what one side alone has rows of its own link tell too, and none that come later.
        before = LINKS.index(origin.difference.link) + 1
    found = [
        Unseen(what)
        for link, table, what in _HELD_IN
        if LINKS.index(link) < before
        and not (cover.rows.get(table) and cover.selection.wants_link(link) and link in recorded)
    ]
    chosen = [setting(run, "modules") for run in runs.values()]
    if any(chosen) or cover.selection.modules:
        found.append(Unseen("modules outside the filter"))
    if origin.link not in LOCAL_LINKS:
        seen = set(cover.ranks)
        unseen = {r for run in runs.values() for r in range(run.world_size or 0)} - seen
        if unseen:
            found.append(Unseen(ranks=tuple(sorted(unseen))))
    earlier = [step for step in common if step < origin.step]
    if origin.link == "parameters" and origin.step > 0 and origin.step - 1 not in earlier:
        found.append(Unseen(step=origin.step - 1))
    return found
