"""What tensors were summarised as, over all tables of all runs: each summary once.

Most of a recording is numbers that look random: norms, fingerprints, sketches. But the gradient that one Node gives is
the one that the next takes, and a candidate has those of its baseline until it is faulty. So every distinct value is
kept once, in a pool; a row refers to it. What is new is kept as its difference from the same row of the baseline, of
which a legal change leaves the leading bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from support.frozen.columns import Reader, Writer

Array = npt.NDArray[Any]

_NEW, _AS_BEFORE, _BACK = 0, 1, 2


@dataclass
class Pool:
    """Distinct rows of words, `width` each, in the order in which they came.

    A reference is 0 for the next new row, 1 for what the run before has in the same place, else 2 and how far back.
    """

    width: int
    rows: list[Array] = field(default_factory=list)
    _known: dict[bytes, int] = field(default_factory=dict)
    _stored: list[Array] = field(default_factory=list)
    _references: list[Array] = field(default_factory=list)
    _flags: list[bool] = field(default_factory=list)

    def add(self, values: Array, before: Array) -> Array:
        """Numbers of these rows, uint32 of shape (n, width); `before` are those of the run before, or fewer."""
        numbers = np.zeros(len(values), np.int64)
        references = np.zeros(len(values), "<u4")
        new: list[int] = []
        for at, key in enumerate(values.view(f"V{4 * self.width}").reshape(-1).tolist()):
            number = self._known.get(key)
            if number is None:
                number = self._known[key] = len(self._known)
                new.append(at)
            elif at < len(before) and before[at] == number:
                references[at] = _AS_BEFORE
            else:
                references[at] = _BACK + len(self._known) - number
            numbers[at] = number
        fresh = values[new]
        others = self._rows_at(before, np.array(new, np.int64))
        apart = fresh ^ others
        is_apart = _cost(apart) < _cost(fresh)
        self.rows.extend(fresh)
        self._stored.append(apart if is_apart else fresh)
        self._references.append(references)
        self._flags.append(is_apart)
        return numbers

    def _rows_at(self, before: Array, places: Array) -> Array:
        found = np.zeros((len(places), self.width), "<u4")
        inside = places < len(before)
        if inside.any():
            found[inside] = np.stack([self.rows[n] for n in before[places[inside]]])
        return found

    def put(self, out: Writer, name: str) -> None:
        """Keep it."""
        stored = np.concatenate(self._stored) if self._stored else np.zeros((0, self.width), "<u4")
        for word in range(self.width):
            out.put_array(f"{name}.word{word}", stored[:, word])
        out.put_array(f"{name}.references", np.concatenate([np.zeros(0, "<u4"), *self._references]))
        out.put(f"{name}.apart", bytes(self._flags))


class PoolReader:
    """Gives back what was added to a Pool, call for call."""

    def __init__(self, blocks: Reader, name: str, width: int) -> None:
        words = [blocks.get_array(f"{name}.word{word}", "<u4") for word in range(width)]
        self._rows = np.ascontiguousarray(np.stack(words, axis=1))
        self._references = blocks.get_array(f"{name}.references", "<u4").astype(np.int64)
        self._apart = blocks.get(f"{name}.apart")
        self._calls = self._at = self._count = 0

    def take(self, count: int, before: Array) -> tuple[Array, Array]:
        """The next `count` rows and their numbers."""
        references = self._references[self._at : self._at + count]
        is_new = references == _NEW
        known = self._count + np.cumsum(is_new)
        numbers = np.where(is_new, known - 1, known + _BACK - references)
        as_before = np.flatnonzero(references == _AS_BEFORE)
        numbers[as_before] = before[as_before]
        places = np.flatnonzero(is_new)
        if self._apart[self._calls]:
            inside = places < len(before)
            mine = np.arange(self._count, self._count + len(places))[inside]
            self._rows[mine] ^= self._rows[
                before[places[inside]]
            ]  # whose rows are of an earlier call
        self._at += count
        self._count += len(places)
        self._calls += 1
        return self._rows[numbers], numbers


def _cost(words: Array) -> int:
    """How many bits stand below the leading zeros."""
    if not words.size:
        return 0
    return int(np.ceil(np.log2(words.astype(np.float64) + 1)).sum())
