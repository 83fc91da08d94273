"""Holds a JSON answer against the declaration of its keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gradtrace_analyzer.reports.json_types import (
    ANYTHING,
    BOOLEAN,
    INTEGER,
    NUMBER,
    TEXT,
    ListOf,
    MapOf,
    Object,
    OrNull,
    Type,
)

# How a number that JSON has no word for is written.
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_PYTHON: dict[str, tuple[type, ...]] = {TEXT: (str,), INTEGER: (int,), NUMBER: (int, float)}


def mismatches(value: Any, declared: Type, place: str = "") -> Iterator[str]:
    """What in the value is not as declared: keys that are missing or not declared, values of another type."""
    if isinstance(declared, OrNull):
        if value is not None:
            yield from mismatches(value, declared.of, place)
    elif isinstance(declared, ListOf):
        if not isinstance(value, list):
            yield f"{place} is no list: {value!r}"
            return
        for one in value:
            yield from mismatches(one, declared.of, f"{place}[]")
    elif isinstance(declared, MapOf):
        if not isinstance(value, dict):
            yield f"{place} is no object: {value!r}"
            return
        for name, one in value.items():
            if one is not None:
                yield from mismatches(one, declared.of, f"{place}.{name}")
    elif isinstance(declared, Object):
        if not isinstance(value, dict):
            yield f"{place} is no object: {value!r}"
            return
        keys = {key.name: key for key in declared.keys}
        yield from (f"{place}.{name} is not declared" for name in value.keys() - keys.keys())
        for name, key in keys.items():
            if name not in value:
                if not key.when:
                    yield f"{place}.{name} is missing"
            else:
                yield from mismatches(value[name], key.type, f"{place}.{name}")
    elif declared == BOOLEAN:
        if not isinstance(value, bool):
            yield f"{place} is no boolean: {value!r}"
    elif declared == NUMBER and value in _NOT_FINITE:
        return
    elif declared != ANYTHING and (
        isinstance(value, bool) or not isinstance(value, _PYTHON[declared])
    ):
        yield f"{place} is no {declared}: {value!r}"


def declared_places(declared: Type, place: str = "") -> Iterator[str]:
    """The place of every key that is declared, as `seen_places` names it."""
    if isinstance(declared, OrNull):
        yield from declared_places(declared.of, place)
    elif isinstance(declared, ListOf):
        yield from declared_places(declared.of, f"{place}[]")
    elif isinstance(declared, MapOf):
        yield from declared_places(declared.of, f"{place}.*")
    elif isinstance(declared, Object):
        place = declared.name or place
        for key in declared.keys:
            yield f"{place}.{key.name}"
            yield from declared_places(key.type, f"{place}.{key.name}")


def seen_places(value: Any, declared: Type, place: str = "") -> Iterator[str]:
    """The places of declared keys that the value has."""
    if isinstance(declared, OrNull):
        yield from seen_places(value, declared.of, place)
    elif isinstance(declared, ListOf) and isinstance(value, list):
        for one in value:
            yield from seen_places(one, declared.of, f"{place}[]")
    elif isinstance(declared, MapOf) and isinstance(value, dict):
        for one in value.values():
            yield from seen_places(one, declared.of, f"{place}.*")
    elif isinstance(declared, Object) and isinstance(value, dict):
        place = declared.name or place
        for key in declared.keys:
            if key.name in value:
                yield f"{place}.{key.name}"
                yield from seen_places(value[key.name], key.type, f"{place}.{key.name}")
