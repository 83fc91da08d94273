"""The row in which a device leaves a summary: 32 words of 64 bits in memory that the host reads.

A row proves itself. Its first word is the ticket that was asked for, and `CHECK` is a sum over all words before it,
each times an odd factor of its own: while either differs the row is not there yet, is half written, or was written
over. So the host needs no event, no copy and no call of the device's library to know that a summary has arrived; it
reads memory. A thread that calls a device's library can wait for it without end, and spoils a CUDA graph that
another thread is capturing.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from gradtrace_recorder.summaries.values import LARGEST_FLOAT32, Packed
from gradtrace_schemas.journal import SUMMARY
from gradtrace_schemas.summary import STATE_FULL, mixed
from gradtrace_schemas.table import SKETCH_LANES

WORDS = 32
TICKET, FINGERPRINT, NANS, INFS, SQUARE, ABS_MAX, SUM, TORN, FIRST_LANE = range(9)
CHECK = FIRST_LANE + SKETCH_LANES
_FACTOR_SEED = 0x5851F42D4C957F2D

Rows = npt.NDArray[np.int64]


@functools.lru_cache(maxsize=1)
def factors() -> Rows:
    """The odd factor of each word before CHECK."""
    drawn = mixed(np.arange(CHECK), _FACTOR_SEED) | np.uint64(1)
    return drawn.astype(np.int64)


def checks(rows: Rows) -> Rows:
    """What CHECK of each row must be."""
    with np.errstate(over="ignore"):
        found: Rows = (rows[:, :CHECK] * factors()).sum(axis=1, dtype=np.int64)
    return found


def arrived(rows: Rows, tickets: Rows) -> npt.NDArray[np.bool_]:
    """Which of these rows hold the summary of that ticket, whole. `rows` is a copy: what is asked stays so."""
    is_there: npt.NDArray[np.bool_] = (rows[:, TICKET] == tickets) & (
        rows[:, CHECK] == checks(rows)
    )
    return is_there


def as_summaries(rows: Rows, state: int) -> npt.NDArray[Any]:
    """Rows as the journal's records hold them, numel and dtype left at 0.

    `state` is STATE_FULL, or STATE_NORMS to leave fingerprint and sketch out.
    """
    made = np.zeros(len(rows), SUMMARY)
    floats = rows.view(np.float64)
    made["norm"] = np.sqrt(floats[:, SQUARE])
    made["abs_max"] = floats[:, ABS_MAX]
    made["sum"] = floats[:, SUM]
    made["nan_count"] = rows[:, NANS]
    made["inf_count"] = rows[:, INFS]
    made["state"] = state
    if state == STATE_FULL:
        made["fingerprint"] = rows[:, FINGERPRINT]
        lanes = floats[:, FIRST_LANE:CHECK]
        made["sketch"] = np.clip(lanes, -LARGEST_FLOAT32, LARGEST_FLOAT32)
    return made


def row_of(ticket: int, packed: Packed) -> Rows:
    """A row with a summary that the host knows, as if a device had left it there."""
    row = np.zeros(WORDS, np.int64)
    floats = row.view(np.float64)
    _, norm, floats[ABS_MAX], floats[SUM], row[NANS], row[INFS], row[FINGERPRINT] = packed[:7]
    floats[SQUARE] = norm * norm
    floats[FIRST_LANE:CHECK] = packed[7 : 7 + SKETCH_LANES]
    row[TICKET] = ticket
    row[CHECK] = checks(row[None])[0]
    return row
