"""A run as it was opened: its ranks, its parts and journals, and of several attempts what is read of each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from gradtrace_analyzer.runs.attempts import OTHER_PARAMETERS, AttemptStory
from gradtrace_analyzer.runs.parts import DamagedPart, Part
from gradtrace_analyzer.words.numbers import StepWords, step_phrase
from gradtrace_schemas import SCHEMA_VERSION
from gradtrace_schemas.journal_reader import Contents


@dataclass(frozen=True)
class RankInfo:
    """What a rank says of itself: its json, with the columns of the table `ranks` as keys."""

    rank: int
    facts: Mapping[str, Any]

    @property
    def is_complete(self) -> bool:
        """Whether the rank closed its recording itself."""
        return self.facts.get("complete") is True

    @property
    def host(self) -> str | None:
        """The name of its machine; None where the rank died before it said so."""
        host = self.facts.get("host")
        return host if isinstance(host, str) else None

    @property
    def flight_steps(self) -> int | None:
        """How many of its last steps its flight recording keeps; None where all were to be kept."""
        settings = self.facts.get("settings")
        if not isinstance(settings, dict) or settings.get("mode") != "flight":
            return None
        steps = settings.get("flight_steps")
        return steps if isinstance(steps, int) else None


@dataclass(frozen=True)
class Run:
    """One attempt of a run, as it stood when it was opened; or, with a `history`, attempts that continue each other.

    `parts` and `leftovers` are by table, then rank; `leftovers` are the rows that only a journal holds, with a
    column `rank`. `journals` keeps each journal whole: what its threads were running is in there. `step_shift` is added
    to the number of every step where it is read.

    Of attempts that were joined, `history` has what is read of each, the oldest first; `parts`, `leftovers` and
    `journals` are then those of the newest alone, to be asked for by `stretches`, and what `ranks` say is for all of
    them. `stories` tell of each attempt that was looked at what became of it.
    """

    path: Path
    name: str
    attempt: int
    attempts: tuple[int, ...]
    run_info: Mapping[str, Any]
    world_size: int | None
    ranks: Mapping[int, RankInfo]
    parts: Mapping[str, Mapping[int, tuple[Part, ...]]]
    leftovers: Mapping[str, Mapping[int, pa.Table]]
    journals: Mapping[int, Contents]
    schema_version: int = SCHEMA_VERSION
    damaged: tuple[DamagedPart, ...] = ()
    notices: tuple[str, ...] = ()
    step_shift: int = 0
    history: tuple[Stretch, ...] = ()
    stories: tuple[AttemptStory, ...] = ()

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """What is read of which attempt, the oldest first; of one attempt alone, all of it."""
        return self.history or (Stretch(self),)

    @property
    def newest(self) -> Run:
        """The newest attempt of a history, alone."""
        return self.stretches[-1].run

    @property
    def torn_ranks(self) -> frozenset[int]:
        """Ranks of which an unfinished step is read: they, or an attempt before, did not close the recording."""
        return frozenset(
            r for of in self.stretches if of.reads_last for r in of.run.incomplete_ranks
        )

    @property
    def first_of_attempts(self) -> dict[int, int]:
        """Where attempts took over from those before them: the attempt by the first step that is read of it."""
        return {
            before.end: after.run.attempt
            for before, after in zip(self.history, self.history[1:], strict=False)
            if before.end is not None
        }

    @property
    def as_joined(self) -> str | None:
        """`attempt 0, attempt 1 from step 5 on`; None of one attempt alone."""
        return self.joined_words()

    def joined_words(self, step_words: StepWords = step_phrase) -> str | None:
        """The same, in which `step_words` say the steps."""
        if not self.history:
            return None
        apart = {story.attempt for story in self.stories if story.same_parameters is False}
        later = (
            f"attempt {n} from {step_words(step)} on{f' ({OTHER_PARAMETERS})' if n in apart else ''}"
            for step, n in self.first_of_attempts.items()
        )
        return ", ".join((f"attempt {self.history[0].run.attempt}", *later))

    def shifted(self, count: int) -> Run:
        """The same run with all its steps numbered so much higher, where they are read."""
        history = (
            replace(of, run=of.run.shifted(count), end=None if of.end is None else of.end + count)
            for of in self.history
        )
        ranks = {
            rank: RankInfo(rank, _renumbered(info.facts, count))
            for rank, info in self.ranks.items()
        }
        return replace(
            self, step_shift=self.step_shift + count, history=tuple(history), ranks=ranks
        )

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks of the job's world that left nothing, no json and no journal; none where its size is not known."""
        return tuple(r for r in range(self.world_size or 0) if r not in self.ranks)

    @property
    def flight_steps(self) -> int | None:
        """How many of its last steps a flight recording keeps; None where all were to be kept."""
        return max((n for info in self.ranks.values() if (n := info.flight_steps)), default=None)

    @property
    def incomplete_ranks(self) -> tuple[int, ...]:
        """Ranks that did not close their recording: dead, or still running."""
        return tuple(r for r, info in self.ranks.items() if not info.is_complete)


def _renumbered(facts: Mapping[str, Any], count: int) -> Mapping[str, Any]:
    """What a rank says of itself with its steps numbered so much higher."""
    found = dict(facts)
    if isinstance(last := facts.get("last_step"), int):
        found["last_step"] = last + count
    left_in = facts.get("left_in")
    if isinstance(left_in, dict) and isinstance(left_in.get("step"), int):
        found["left_in"] = {**left_in, "step": left_in["step"] + count}
    if isinstance(dropped := facts.get("dropped_steps"), dict):
        found["dropped_steps"] = {
            table: [step + count if isinstance(step, int) and step >= 0 else step for step in steps]
            for table, steps in dropped.items()
            if isinstance(steps, (list, tuple))
        }
    return found


@dataclass(frozen=True)
class Stretch:
    """The rows that a history reads of one attempt: of steps below `end`, as its run numbers them; None is all.

    `reads_last` says whether the last step that the attempt reached is among them: it may not have been finished.
    """

    run: Run
    end: int | None = None
    reads_last: bool = True


def is_same_recording(a: Run, b: Run) -> bool:
    """Whether both are the same attempts of one directory, however it was named, with the same numbers."""
    mine, others = ([(s.run.attempt, s.end, s.run.step_shift) for s in r.stretches] for r in (a, b))
    return os.path.realpath(a.path) == os.path.realpath(b.path) and mine == others
