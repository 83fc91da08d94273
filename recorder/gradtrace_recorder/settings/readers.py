"""How the text of a setting is read. Each reader is given what the setting is called where it was given, and the text.

A reader raises SettingsError, whose sentence begins with that name. Standard library only.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass

from gradtrace_recorder.settings.chosen_numbers import NotNumbers, Numbers, numbers_of

_BY_REQUEST = "python:"


class SettingsError(ValueError):
    """A setting that cannot be read; the text says which, what about it, and what would help."""


@dataclass(frozen=True)
class Replay:
    """Which Nodes are run a second time: globs on their name, or on the module's FQN or one around it.

    `python_globs` choose Functions that the job or an extension defines too: they may have side effects.
    """

    text: str
    globs: tuple[str, ...]
    python_globs: tuple[str, ...]
    steps: Numbers

    def chooses(self, fqn: str | None, node_name: str) -> bool:
        """Whether a Node of that module and name is asked for."""
        return matches(self.globs + self.python_globs, fqn, node_name)

    def chooses_by_request(self, fqn: str | None, node_name: str) -> bool:
        """Whether it is asked for even if it is a Function of the job's."""
        return matches(self.python_globs, fqn, node_name)


def matches(globs: tuple[str, ...], fqn: str | None, node_name: str | None = None) -> bool:
    """Whether a glob matches the module, one around it, or the Node's name."""
    parts = [] if fqn is None else fqn.split(".")
    names = [".".join(parts[: n + 1]) for n in range(len(parts))]
    if node_name is not None:
        names.append(node_name)
    return any(fnmatch.fnmatchcase(name, glob) for name in names for glob in globs)


def any_text(label: str, text: str) -> str:
    """The text as it is."""
    return text


def one_of(*allowed: str) -> Callable[[str, str], str]:
    """A reader that takes these texts alone."""

    def read(label: str, text: str) -> str:
        if text not in allowed:
            raise SettingsError(f"{label} is {text!r}; it can be {', '.join(allowed)}")
        return text

    return read


def flag(label: str, text: str) -> bool:
    """`1` or `0`, and what Python makes of `start(strict=True)`."""
    return one_of("0", "1", "False", "True")(label, text) in ("1", "True")


def globs(label: str, text: str) -> tuple[str, ...]:
    """What stands between commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(label: str, text: str) -> Numbers:
    """Steps or ranks."""
    try:
        return numbers_of(text)
    except NotNumbers as error:
        raise SettingsError(f"{label} is {text!r}, {error}") from None


def whole_number(label: str, text: str) -> int:
    """A number from 0."""
    text = text.strip()
    if not (text.isascii() and text.isdigit()):
        raise SettingsError(f"{label} is {text!r}, which is no whole number from 0")
    return int(text)


def count_of_steps(label: str, text: str) -> int:
    """A number from 1."""
    steps = whole_number(label, text)
    if steps == 0:
        raise SettingsError(f"{label} is {text!r}; a recording of no step holds nothing")
    return steps


def replay(label: str, text: str) -> Replay:
    """`blocks.*.attn,python:MyFunctionBackward@0:10`: globs, then steps."""
    chosen, at, steps = text.partition("@")
    named = [part.strip() for part in chosen.split(",") if part.strip()]
    plain = tuple(glob for glob in named if not glob.startswith(_BY_REQUEST))
    own = tuple(g.removeprefix(_BY_REQUEST) for g in named if g.startswith(_BY_REQUEST))
    if not named or "" in own:
        raise SettingsError(
            f"{label} is {text!r}, which names no Node; write *@0:2, blocks.*.attn or python:MyFunctionBackward"
        )
    if at and not steps.strip():
        raise SettingsError(f"{label} is {text!r}, which names no step behind the @; write *@0:2")
    return Replay(text, plain, own, numbers(label, steps) if at else Numbers())
