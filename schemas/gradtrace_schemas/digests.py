"""A step's digests: one hash per link, over the order and the fingerprints of its rows.

A plain XOR or sum of fingerprints cancels where two rows swap or repeat; so each row's place in its step goes
into its hash. Two steps whose digests and row counts agree hold the same fingerprints in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradtrace_schemas.journal import NULL_INT64
from gradtrace_schemas.steps import DIGEST_LINKS
from gradtrace_schemas.summary import STATE_FULL, STATE_NONE, mixed, signed

_SEED = 0x2545F4914F6CDD1D
# The table whose rows the digest of a link in `steps` is of.
TABLE_OF = {
    "parameters": "parameters",
    "inputs": "inputs",
    "forward": "module_calls",
    "backward": "node_events",
    "gradients": "gradients",
    "optimizer": "parameters",
    "buckets": "buckets",
}

DIGESTED_TABLES = tuple(sorted({TABLE_OF[link] for link in DIGEST_LINKS}))


class Digests:
    """Takes a rank's records in order, in as many portions as they come, and fills its `steps` records."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, str], int] = {}
        self._counts: dict[tuple[int, str], int] = {}
        self._unknown: set[tuple[int, str]] = set()

    def take(self, by_table: dict[str, npt.NDArray[Any]], strings: Sequence[str]) -> None:
        """Add these records; write the digests into the records of `steps` among them."""
        for link in DIGEST_LINKS:
            rows = by_table[TABLE_OF[link]]
            if link in ("parameters", "optimizer") and len(rows):
                point = "before" if link == "parameters" else "after"
                number = strings.index(point) if point in strings else -1
                rows = rows[rows["point"] == number]
            if len(rows):
                self._add(link, rows)
        for place, step in enumerate(by_table["steps"]["step"].tolist()):
            for link in DIGEST_LINKS:
                key = (step, link)
                known = key in self._sums and key not in self._unknown
                total = signed(self._sums.pop(key, 0)) if known else NULL_INT64
                by_table["steps"][f"digest_{link}"][place] = total
                self._counts.pop(key, None)

    def _add(self, link: str, rows: npt.NDArray[Any]) -> None:
        summaries = [name for name in rows.dtype.names or () if name.endswith("summary")]
        hashed = np.zeros(len(rows), np.uint64)
        partial = np.zeros(len(rows), bool)
        for place, name in enumerate(summaries):
            state = rows[name]["state"]
            bits = np.where(state == STATE_FULL, rows[name]["fingerprint"], 0).view(np.uint64)
            hashed = mixed(bits ^ hashed, _SEED + place)
            partial |= (state != STATE_FULL) & (state != STATE_NONE)
        for step in np.unique(rows["step"]).tolist():
            chosen = rows["step"] == step
            key = (step, link)
            before = self._counts.get(key, 0)
            count = int(chosen.sum())
            places = np.arange(before, before + count, dtype=np.uint64)
            total = mixed(hashed[chosen] ^ mixed(places, ~_SEED & (2**64 - 1)), 0).sum(
                dtype=np.uint64
            )
            self._sums[key] = (self._sums.get(key, 0) + int(total)) & (2**64 - 1)
            self._counts[key] = before + count
            if partial[chosen].any():
                self._unknown.add(key)
