"""Finds the laws, and puts them in the order in which one thing leads to another within a step."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

from gradtrace_analyzer.check import laws
from gradtrace_analyzer.check.law import Law


class BadLaws(Exception):
    """The declarations of the laws do not fit together: a mistake of whoever wrote one, not of whoever asks."""


@cache
def all_laws() -> tuple[Law, ...]:
    """Every law that a module of `check.laws` declares, in the order of a step's chain. Raises BadLaws."""
    return in_chain(_declared())


@cache
def causes_of(law: Law) -> tuple[Law, ...]:
    """The laws whose violation explains that one is broken in the same step, the nearest cause first."""
    by_name = {one.name: one for one in all_laws()}
    named = [by_name[name] for name in law.explained_by]
    return tuple(dict.fromkeys([*named, *(one for one in all_laws() if law.name in one.explains)]))


def _declared() -> Iterator[Law]:
    for found in pkgutil.iter_modules(laws.__path__):
        module = importlib.import_module(f"{laws.__name__}.{found.name}")
        for value in vars(module).values():
            # A law that a module has imported is declared elsewhere.
            if isinstance(value, Law) and value.judge.__module__ == module.__name__:
                yield value


def in_chain(declared: Iterable[Law]) -> tuple[Law, ...]:
    """The laws so that each stands behind those that it names in `after`, as closely as can be.

    Of several that may come next it is the one that the fewest others wait for, then the first by name: a law behind
    which nothing stands does not wait for the rest of the chain. Raises BadLaws where two have one name, where one
    names a law that is not there, where they wait for each other in a circle, and where a cause has no words.
    """
    by_name: dict[str, Law] = {}
    for law in declared:
        other = by_name.setdefault(law.name, law)
        if other is not law:
            modules = f"{other.judge.__module__} and {law.judge.__module__}"
            raise BadLaws(f"two laws are called {law.name!r}, in {modules}")
    for law in by_name.values():
        _must_fit(law, by_name)
    waiting = {name: _behind(name, by_name) for name in by_name}
    ordered: list[Law] = []
    left = dict(by_name)
    while left:
        free = [law for law in left.values() if not left.keys() & set(law.after)]
        if not free:
            circle = ", ".join(sorted(name for name in left if name in waiting[name]))
            raise BadLaws(f"laws stand after each other in a circle: {circle}")
        ordered.append(left.pop(min(free, key=lambda law: (len(waiting[law.name]), law.name)).name))
    return tuple(ordered)


def _must_fit(law: Law, by_name: Mapping[str, Law]) -> None:
    for field in ("after", "explained_by", "explains"):
        for name in getattr(law, field):
            if name not in by_name:
                known = ", ".join(sorted(by_name))
                raise BadLaws(f"{field} of law {law.name!r} names {name!r}; there are {known}")
    causes = [by_name[name] for name in law.explained_by] + ([law] if law.explains else [])
    for cause in causes:
        if cause.as_cause is None:
            raise BadLaws(f"law {cause.name!r} explains others, and has no `as_cause`")


def _behind(name: str, by_name: Mapping[str, Law]) -> set[str]:
    """The names of all laws that come after one, directly or through others; its own, where they form a circle."""
    found: set[str] = set()
    reached = [name]
    while reached:
        at = reached.pop()
        more = {law.name for law in by_name.values() if at in law.after} - found
        found |= more
        reached += more
    return found
