"""Fields of rows as the journal has them: numbers that may be null, lists of names in one text."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from gradtrace_schemas.journal import NULL_INT32, NULL_INT64

# A text of the journal has at most 64 KiB.
_MOST_TEXT = 48 << 10


def names_field(names: Sequence[str | None]) -> str:
    """A list of names as JSON; of very many, the first and how many more."""
    text, kept = json.dumps(list(names)), len(names)
    while len(text) > _MOST_TEXT:
        kept //= 2
        text = json.dumps([*names[:kept], f"... and {len(names) - kept} more"])
    return text


def kinds_of(came_in: Sequence[tuple[torch.dtype, torch.Size] | None]) -> list[str | None]:
    """`float32[4, 6]` for each gradient."""
    return [
        None if one is None else f"{str(one[0]).removeprefix('torch.')}{list(one[1])}"
        for one in came_in
    ]


def int32_field(value: int | None) -> int:
    """A number of 32 bits, or null."""
    return NULL_INT32 if value is None else value


def int64_field(value: int | None) -> int:
    """A number of 64 bits, or null."""
    return NULL_INT64 if value is None else value
