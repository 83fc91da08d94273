"""What a rank's json says, with what it can not mean left out: the rest of the analyzer need not ask for types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from gradtrace_schemas.groups import RANKS

_BITS = {pa.int32(): 31, pa.int64(): 63}


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _counts(value: Any) -> bool:
    return isinstance(value, dict) and all(_whole(63)(count) for count in value.values())


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _spans(value: Any) -> bool:
    """First and last step, by name."""
    return isinstance(value, dict) and all(
        isinstance(span, list) and len(span) == 2 and all(n is None or _whole(63)(n) for n in span)
        for span in value.values()
    )


def _settings(value: Any) -> bool:
    lists = ("steps", "ranks", "modules")
    return isinstance(value, dict) and all(
        isinstance(value.get(name, []), list | str) for name in lists
    )


def _flight(value: Any) -> bool:
    triggers = value.get("triggers", []) if isinstance(value, dict) else None
    return (
        isinstance(triggers, list)
        and all(isinstance(one, dict) and all(map(_is_step, _steps(one))) for one in triggers)
        and _whole(63)(value.get("shortened") or 0)
    )


def _steps(trigger: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(trigger.get(name) for name in ("first_step", "last_step"))


def _observer(value: Any) -> bool:
    return isinstance(value, dict) and _counts(value.get("python_passes") or {})


def _whole(bits: int) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << bits

    return fits


_is_step = _whole(31)

_LOOKS_RIGHT: dict[str, Callable[[Any], bool]] = {
    **{c.name: _whole(_BITS[c.type]) for c in RANKS.columns if c.type in _BITS},
    **{c.name: (lambda value: isinstance(value, bool)) for c in RANKS.columns if c.type == pa.bool_()},
    **{name: (lambda value: isinstance(value, str)) for name in ("host", "device", "git_commit")},
    **{name: _counts for name in ("recorded", "dropped", "unsummarised", "replay_skipped", "overwritten")},
    **{name: _is_object for name in ("versions", "environment", "left_in", "left_behind")},
    "dropped_steps": _spans,
    "settings": _settings,
    "problems": _texts,
    "command": _texts,
    "uncaught": _texts,
    "world_size": _whole(24),  # more would take all memory to count
    "schema_version": _whole(31),
    "flight": _flight,
    "observer": _observer,
}  # fmt: skip


def understood(said: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(what is known by name and has a value of its kind, or has another name; the names whose value has not)."""
    odd = [
        name
        for name, value in said.items()
        if value is not None and name in _LOOKS_RIGHT and not _LOOKS_RIGHT[name](value)
    ]
    return {name: value for name, value in said.items() if name not in odd}, odd
