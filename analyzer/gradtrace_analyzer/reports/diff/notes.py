"""Sentences beside an answer: what a person should know before they believe it. One template for each kind of note."""

from __future__ import annotations

from functools import singledispatch

from gradtrace_analyzer.diff.note import (
    DividedOut,
    FirstOfAttempt,
    GeneratorsApart,
    JoinedAttempts,
    Note,
)
from gradtrace_analyzer.reports.diff.wording import Wording
from gradtrace_analyzer.words.numbers import ranks_phrase


@singledispatch
def note_sentence(note: Note | str, say: Wording) -> str:
    """A note in words; one that is words already, as it is. Raises TypeError for a kind without a template."""
    raise TypeError(f"no template tells of {type(note).__name__}")


@note_sentence.register
def _words(note: str, say: Wording) -> str:
    return note


@note_sentence.register
def _joined(note: JoinedAttempts, say: Wording) -> str:
    attempts = note.run.joined_words(say.steps.one)
    return f"The {note.side} is several attempts of one job, read as one: {attempts}."


@note_sentence.register
def _first_of_attempt(note: FirstOfAttempt, say: Wording) -> str:
    return (
        f"{say.steps.first(note.step)} is the first of the {note.side}'s attempt {note.attempt}: what it did "
        "not restore (an optimizer's state, random generators, the place in the data) shows from there on."
    )


@note_sentence.register
def _divided_out(note: DividedOut, say: Wording) -> str:
    first, *others = note.scales
    since = f"from {say.steps.one(first.first_step)} on"
    then = "".join(f", {o.factor:g} times from {say.steps.one(o.first_step)} on" for o in others)
    return (
        f"The candidate's loss and gradients are {first.factor:g} times the baseline's until they are "
        f"unscaled, {since}{then} (a loss scale): they were compared, and are shown, divided by it."
    )


@note_sentence.register
def _generators_apart(note: GeneratorsApart, say: Wording) -> str:
    return (
        f"The random generators stand elsewhere at the beginning of {say.steps.many(note.steps)} "
        f"({ranks_phrase(note.ranks)}); nothing that was compared shows it."
    )
