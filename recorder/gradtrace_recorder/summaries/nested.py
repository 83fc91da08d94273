"""The tensors in what a call was given, or gives: nested in containers of any kind."""

from __future__ import annotations

import collections.abc
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from gradtrace_recorder.guard import is_of_a_signal_handler

# Of a nested argument so many items are looked at: a list of a million numbers holds no tensors to record.
_MOST_ITEMS = 4096


def named_tensors(values: Any, name: str = "") -> list[tuple[str, torch.Tensor]]:
    """The tensors in nested tuples, lists, mappings and dataclasses, with dotted names, in order."""
    if isinstance(values, torch.Tensor):
        return [(name, values)]
    found: list[tuple[str, torch.Tensor]] = []
    waiting: list[tuple[str, Any]] = [(name, values)]
    seen: set[int] = set()
    looked_at = 0
    while waiting and looked_at < _MOST_ITEMS:
        looked_at += 1
        name, value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found.append((name, value))
        elif (
            not isinstance(value, str | bytes | int | float | type(None)) and id(value) not in seen
        ):
            items = _items(value)
            if items:
                seen.add(id(value))
                named = [(f"{name}.{key}" if name else str(key), item) for key, item in items]
                waiting += reversed(named)
    return found


def _items(values: Any) -> list[tuple[Any, Any]]:
    """What a container holds, by name. What its own class answers with an exception holds nothing for us."""
    try:
        return _named_items(values)
    except Exception as error:
        if is_of_a_signal_handler(error):
            raise
        return []


def _named_items(values: Any) -> list[tuple[Any, Any]]:
    if isinstance(values, tuple | list):
        names: Sequence[Any] = getattr(values, "_fields", range(len(values)))
        return list(itertools.islice(zip(names, values, strict=False), _MOST_ITEMS))
    if isinstance(values, dict):
        return list(itertools.islice(dict.items(values), _MOST_ITEMS))
    if isinstance(values, collections.abc.Mapping):
        return list(itertools.islice(values.items(), _MOST_ITEMS))
    fields = getattr(type(values), "__dataclass_fields__", None)
    if not fields:
        return []
    held = getattr(values, "__dict__", None)
    if held is None:  # a class with `__slots__`
        return [(key, getattr(values, key, None)) for key in fields]
    return [(key, held.get(key)) for key in fields]  # past properties, which may do anything
