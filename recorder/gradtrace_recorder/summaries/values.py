"""A summary as the journal packs it: a flat tuple, and the rules to combine several into one.

The tuple is (numel, norm, abs_max, sum, nan_count, inf_count, fingerprint, 16 lanes, dtype, state), in the
order of `gradtrace_schemas.journal.SUMMARY`; dtype is the number of a journal string.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from gradtrace_schemas.journal import NULL_STRING, SUMMARY, struct_format
from gradtrace_schemas.summary import (
    STATE_FULL,
    STATE_NONE,
    STATE_NORMS,
    STATE_SHAPE,
    multipliers,
    signed,
)
from gradtrace_schemas.table import SKETCH_LANES

Packed = tuple[float | int, ...]

FINGERPRINT, FIRST_LANE, DTYPE, STATE = 6, 7, 7 + SKETCH_LANES, 8 + SKETCH_LANES
NO_LANES = (0.0,) * SKETCH_LANES
NOTHING: Packed = (0, 0.0, 0.0, 0.0, 0, 0, 0, *NO_LANES, NULL_STRING, STATE_NONE)
_SUMMARY = struct.Struct("<" + struct_format(SUMMARY))
_NOTHING_BYTES = _SUMMARY.pack(*NOTHING)
LARGEST_FLOAT32 = 3.4028234663852886e38

# Far from the chunks' multipliers, so that a tuple of tensors is no shard of anything.
POSITIONS = [int(m) for m in multipliers(1 << 40, 64)]


def as_bytes(packed: Packed | None) -> bytes:
    """The summary as a record holds it; None is nothing."""
    return _NOTHING_BYTES if packed is None or packed is NOTHING else _SUMMARY.pack(*packed)


def unread(numel: int, dtype: int) -> Packed:
    """The summary of a tensor that cannot be read here: its size and dtype alone."""
    return (numel, 0.0, 0.0, 0.0, 0, 0, 0, *NO_LANES, dtype, STATE_SHAPE)


def combined(parts: Sequence[Packed | None]) -> Packed:
    """One summary for all tensors of a tuple, None where the tuple holds none.

    Position counts: the fingerprint is a weighted sum over positions, and the sketch of position k is turned
    by k lanes, so gradients that swap places change both. It stays linear. A part that could not be read
    makes the whole unread.
    """
    present = [(position, part) for position, part in enumerate(parts) if part is not None]
    if not present:
        return NOTHING
    if len(present) == 1 and present[0][0] == 0:
        return present[0][1]
    states = [int(part[STATE]) for _, part in present]
    numel = sum(int(part[0]) for _, part in present)
    dtype = int(present[0][1][DTYPE])
    if STATE_SHAPE in states:
        return unread(numel, dtype)
    fingerprint = 0
    lanes = [0.0] * SKETCH_LANES
    square = abs_max = total = 0.0
    nans = infs = 0
    for position, part in present:
        square += part[1] * part[1]
        abs_max = max(abs_max, part[2])
        total += part[3]
        nans += int(part[4])
        infs += int(part[5])
        fingerprint += int(part[FINGERPRINT]) * POSITIONS[position % 64]
        for lane in range(SKETCH_LANES):
            lanes[(lane + position) % SKETCH_LANES] += part[FIRST_LANE + lane]
    state = STATE_NORMS if STATE_NORMS in states else STATE_FULL
    clipped = [min(max(value, -LARGEST_FLOAT32), LARGEST_FLOAT32) for value in lanes]
    return (
        numel,
        math.sqrt(square),
        abs_max,
        total,
        nans,
        infs,
        signed(fingerprint),
        *clipped,
        dtype,
        state,
    )
