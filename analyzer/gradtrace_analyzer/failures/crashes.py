"""Ranks that did not come to their end: of two runs that stopped so, a comparison must not speak as of whole ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradtrace_analyzer.failures.endings import Ending, endings, left_in, uncaught
from gradtrace_analyzer.failures.phrases import first_line, where_phrase
from gradtrace_analyzer.runs.last_seen import RankPlace
from gradtrace_analyzer.runs.run import RankInfo, Run
from gradtrace_analyzer.words.numbers import StepWords, ranks_phrase, step_phrase


@dataclass(frozen=True)
class Crash:
    """A rank that was stopped: `how`, to follow `rank 0`; `step` is the last that it recorded any of.

    `place` is where it was then, `is_left_open` that the forward or optimizer's step there never returned.
    `is_told` is False where nothing tells how it ended: it was killed, or its machine died.
    """

    rank: int
    step: int | None
    how: str
    is_told: bool = True
    exception_type: str | None = None
    place: RankPlace | None = None
    is_left_open: bool = False

    @property
    def ended(self) -> str:
        """How and where, to follow `rank 0`: `died in step 3, in the forward of blocks.2`."""
        return self._ended(step_phrase)

    def _ended(self, step_words: StepWords) -> str:
        where = "" if self.place is None else f" {where_phrase(self.place, step_words)}"
        return f"{self.how}{where}{', which it never left' if self.is_left_open else ''}"

    def told(self, step_words: StepWords, count: int = 1) -> str:
        """`was ended by ValueError: boom, in step 3`, or `were` of several; `step_words` say the step."""
        said = self._ended(step_words)
        if count > 1 and said.startswith("was "):
            said = f"were {said.removeprefix('was ')}"
        tells_step = self.place is not None and self.place.step is not None
        when = "" if self.step is None or tells_step else f", in {step_words(self.step)}"
        return f"{said}{when}"


def crashes(run: Run) -> tuple[Crash, ...]:
    """The ranks of a run that an exception ended, that left a forward or an optimizer's step unfinished, or that died.

    A rank that lives, or may, is not among them.
    """
    found = [crash for info in run.ranks.values() if (crash := _of_closed(info)) is not None]
    if run.incomplete_ranks:
        ended = endings(run)
        found += [_of_cut_off(e) for e in ended.of("died", "silent", "unknown")]
    return tuple(sorted(found, key=lambda crash: crash.rank))


def crashes_sentence(found: Sequence[Crash], step_words: StepWords = step_phrase) -> str:
    """`rank 0 was ended by ValueError: boom, in step 3`; ranks that ended alike together, three ways at most.
    `step_words` say the steps."""
    alike: dict[str, list[Crash]] = {}
    for crash in found:
        alike.setdefault(crash.told(step_phrase), []).append(crash)
    said = [
        f"{ranks_phrase(c.rank for c in together)} {together[0].told(step_words, len(together))}"
        for together in list(alike.values())[:3]
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
        return Crash(info.rank, step, "ended", place=place, is_left_open=True)
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
    how = "died" if ending.state == "died" else "was last seen"
    if place is None:
        how = f"{how} before its first event"
    return Crash(ending.rank, step, how, is_told=False, place=place)
