"""Ranks that did not come to their end: of two runs that stopped so, a comparison must not speak as of whole ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradtrace_analyzer.failures.endings import Ending, endings, left_in, uncaught
from gradtrace_analyzer.failures.phrases import first_line, where_phrase
from gradtrace_analyzer.runs.run import RankInfo, Run
from gradtrace_analyzer.words.numbers import ranks_phrase, verb


@dataclass(frozen=True)
class Crash:
    """A rank that was stopped: `ended` says by what, to follow `rank 0`; `step` is the last that it recorded any of.

    `is_told` is False where nothing tells how it ended: it was killed, or its machine died.
    """

    rank: int
    step: int | None
    ended: str
    is_told: bool = True
    exception_type: str | None = None

    @property
    def when(self) -> str:
        """`, in step 3`, where that is known and not said yet."""
        return "" if self.step is None or "in step" in self.ended else f", in step {self.step}"


def crashes(run: Run) -> tuple[Crash, ...]:
    """The ranks of a run that an exception ended, that left a forward or an optimizer's step unfinished, or that died.

    A rank that lives, or may, is not among them.
    """
    found = [crash for info in run.ranks.values() if (crash := _of_closed(info)) is not None]
    if run.incomplete_ranks:
        ended = endings(run)
        found += [_of_cut_off(e) for e in ended.of("died", "silent", "unknown")]
    return tuple(sorted(found, key=lambda crash: crash.rank))


def crashes_sentence(found: Sequence[Crash]) -> str:
    """`rank 0 was ended by ValueError: boom, in step 3`; ranks that ended alike together, three ways at most."""
    alike: dict[str, list[int]] = {}
    for crash in found:
        alike.setdefault(f"{crash.ended}{crash.when}", []).append(crash.rank)
    said = [
        f"{ranks_phrase(ranks)} {how.replace('was ', verb(ranks, 'was ', 'were '), 1)}"
        for how, ranks in list(alike.items())[:3]
    ]
    more = len(alike) - len(said)
    return "; ".join(said) + (f"; and {more} more ended otherwise" if more > 0 else "")


def _of_closed(info: RankInfo) -> Crash | None:
    if not info.is_complete:
        return None
    last = info.facts.get("last_step")
    step = last if isinstance(last, int) else None
    error, place = uncaught(info.facts), left_in(info.facts)
    if error is not None:
        return _by_exception(info.rank, step, error)
    if place is not None:
        return Crash(info.rank, step, f"ended {where_phrase(place)}, which it never left")
    return None


def _by_exception(rank: int, step: int | None, error: tuple[str, str]) -> Crash:
    kind, text = error
    said = first_line(text).rstrip(".")
    return Crash(
        rank, step, f"was ended by {f'{kind}: {said}' if said else kind}", exception_type=kind
    )


def _of_cut_off(ending: Ending) -> Crash:
    place = ending.place
    step = None if place is None else place.step
    if ending.state == "unknown":
        return Crash(ending.rank, step, "left nothing that tells how it ended", is_told=False)
    where = "before its first event" if place is None else where_phrase(place)
    how = "died" if ending.state == "died" else "was last seen"
    return Crash(ending.rank, step, f"{how} {where}", is_told=False)
