"""In what the keys of a JSON answer are declared: their types, and how a declaration is read.

A key is declared by one text, its type and its meaning; `?` behind the type says that it is null where it does not
apply, brackets that it is a list. What holds keys itself is declared by its type and its meaning apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TEXT, INTEGER, NUMBER, BOOLEAN, ANYTHING = "text", "integer", "number", "boolean", "anything"


@dataclass(frozen=True)
class ListOf:
    """A list, all of whose items are of one type."""

    of: Type


@dataclass(frozen=True)
class MapOf:
    """An object whose keys are data: `by` says what they are. A value may be null where nothing is known."""

    by: str
    of: Type


@dataclass(frozen=True)
class OrNull:
    """A type whose value is null where it does not apply."""

    of: Type


@dataclass(frozen=True)
class Object:
    """An object with these keys. `name` is what the reference page calls it, where several keys hold one."""

    keys: tuple[Key, ...]
    name: str = ""


@dataclass(frozen=True)
class Key:
    """One key. Where `when` is given, the key is there only then; else always, though it may be null."""

    name: str
    type: Type
    meaning: str
    when: str = ""


Type = str | ListOf | MapOf | OrNull | Object
# A key by one text, `type: meaning`, or by its type and meaning apart, with when it is there.
Keys = Mapping[str, str | tuple[Type, str] | tuple[Type, str, str]]


def keys_of(declared: Keys, name: str = "") -> Object:
    """The object that has these keys."""
    return Object(tuple(_key(key, said) for key, said in declared.items()), name)


def _key(name: str, said: str | tuple[Type, str] | tuple[Type, str, str]) -> Key:
    if not isinstance(said, str):
        return Key(name, *said)
    word, _, meaning = said.partition(": ")
    scalar = word.strip("[]?")
    assert scalar in (TEXT, INTEGER, NUMBER, BOOLEAN, ANYTHING), word
    held: Type = ListOf(scalar) if word.startswith("[") else scalar
    return Key(name, OrNull(held) if word.endswith("?") else held, meaning)


def sides(of: Type) -> MapOf:
    """What each side of a comparison has."""
    return MapOf("side", of)
