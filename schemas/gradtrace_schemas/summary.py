"""What a tensor summary is, and the constants that every implementation of it must use.

A tensor is read in logical order (row-major over its sizes, whatever its strides). Complex tensors are
read as their real view, so that every number below is over real and imaginary parts.

*Fingerprint.* The bits are cut into signed words of at most 32 bits: an element of 1, 2 or 4 bytes is one
word, one of 8 bytes is two (low first). Words lie in chunks of 4,096. With word u at place j of chunk c:

    fingerprint = sum over c of  multiplier(c) * sum over j of  weight(j) * u[c, j]     modulo 2^64

Weights are distinct, odd and below 2^31, multipliers are odd. So a changed word always changes the sum
(|difference| < 2^32, times an odd number below 2^31, is not 0 modulo 2^64), swapping two unequal words of
a chunk always does, any other permutation does but for a chance of about 2^-32 or less. Sums of shards, each
given its offset, add up to the whole's.

*Sketch.* 16 lanes. Element i of chunk c = i div 4096 at place j = i mod 4096 goes to lane
(lane(j) xor turn(c)) with the sign sign(j) * flip(c), where lane(j) = (j xor h(j div 16)) & 15. It is linear.

The numpy code here is the reference: short and slow. The recorder's implementations are tested against it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradtrace_schemas.table import SKETCH_LANES

CHUNK = 4096

# How much of a summary is there: nothing at all, everything, without fingerprint and sketch,
# or only numel and dtype (a tensor that cannot be read here, such as a fake one).
STATE_NONE, STATE_FULL, STATE_NORMS, STATE_SHAPE = 0, 1, 2, 3
# A device has yet to leave it: `fingerprint` holds its ticket. Who finds it so reads numel and dtype alone.
STATE_PENDING = 4

_WEIGHT_SEED = 0xA0761D6478BD642F
MULTIPLIER_SEED = 0xD1B54A32D192ED03
_SKETCH_SEED = 0x8CB92BA72F3D8DD7
TURN_SEED = 0xABC98388FB8FAC03

# splitmix64's factors.
MIX_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

Words = npt.NDArray[np.uint64]


def mixed(values: npt.NDArray[Any], seed: int) -> Words:
    """splitmix64's finaliser over `values + seed`, elementwise, modulo 2^64."""
    z = values.astype(np.uint64) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_FACTORS[0])
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_FACTORS[1])
    return z ^ (z >> np.uint64(31))


def mixed_integer(value: int, seed: int) -> int:
    """The same for one integer, as an unsigned one."""
    return int(mixed(np.array([value & (2**64 - 1)], np.uint64), seed)[0])


@functools.lru_cache(maxsize=1)
def weights() -> npt.NDArray[np.int64]:
    """weight(j) for j below CHUNK."""
    drawn = mixed(np.arange(CHUNK), _WEIGHT_SEED)
    odd = ((drawn >> np.uint64(33)) | np.uint64(1)).astype(np.int64)
    assert len(np.unique(odd)) == CHUNK
    return odd


def multipliers(first: int, count: int) -> npt.NDArray[np.int64]:
    """multiplier(c) for `count` chunks from `first`, as signed integers."""
    drawn = mixed(np.arange(first, first + count), MULTIPLIER_SEED)
    return (drawn | np.uint64(1)).astype(np.int64)


@functools.lru_cache(maxsize=1)
def lanes() -> npt.NDArray[np.int64]:
    """lane(j) for j below CHUNK."""
    places = np.arange(CHUNK, dtype=np.int64)
    turns = (mixed(places // SKETCH_LANES, _SKETCH_SEED) & np.uint64(15)).astype(np.int64)
    return (places ^ turns) & 15


@functools.lru_cache(maxsize=1)
def signs() -> npt.NDArray[np.float64]:
    """sign(j) for j below CHUNK, each +1 or -1."""
    bits = mixed(np.arange(CHUNK), _SKETCH_SEED ^ TURN_SEED) & np.uint64(1)
    return 1.0 - 2.0 * bits.astype(np.float64)


@functools.lru_cache(maxsize=1)
def projection() -> npt.NDArray[np.float64]:
    """The CHUNK x 16 matrix of lane(j) and sign(j): a chunk times it is the chunk's sketch."""
    matrix = np.zeros((CHUNK, SKETCH_LANES))
    matrix[np.arange(CHUNK), lanes()] = signs()
    return matrix


def turns_and_flips(
    first: int, count: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """turn(c) and flip(c) for `count` chunks from `first`. Chunk 0 is neither turned nor flipped: most
    tensors are no larger."""
    chunks = np.arange(first, first + count)
    drawn = np.where(chunks == 0, np.uint64(0), mixed(chunks, TURN_SEED))
    turns = (drawn & np.uint64(15)).astype(np.int64)
    return turns, 1.0 - 2.0 * ((drawn >> np.uint64(4)) & np.uint64(1)).astype(np.float64)


def signed(value: int) -> int:
    """An integer modulo 2^64 as the signed one that Parquet holds."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


@dataclass(frozen=True)
class Summary:
    """A tensor summary as numbers. `fingerprint` is signed; `sketch` has 16 values."""

    numel: int
    norm: float
    abs_max: float
    sum: float
    nan_count: int
    inf_count: int
    fingerprint: int
    sketch: tuple[float, ...]


def reference_summary(values: npt.NDArray[Any], offset: int = 0) -> Summary:
    """The summary of a numpy array, element `offset` of a larger whole being its first.

    For tests and for readers: it makes temporaries as large as the array.
    """
    flat = np.ascontiguousarray(values).reshape(-1)
    if np.iscomplexobj(flat):
        flat = flat.view(flat.real.dtype)
        offset *= 2
    width = flat.dtype.itemsize
    words = flat.view(np.int32 if width >= 4 else np.dtype(f"i{width}")).astype(np.int64)
    first = offset * max(1, width // 4)
    place = np.arange(first, first + len(words), dtype=np.int64)
    chunk_count = (int(place[-1]) // CHUNK + 1) if len(place) else 0
    with np.errstate(over="ignore"):
        weighted = (
            words * weights()[place % CHUNK] * multipliers(0, max(1, chunk_count))[place // CHUNK]
        )
        fingerprint = signed(int(weighted.sum(dtype=np.int64)))
    with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN here
        numbers = flat.astype(np.float64)
    finite = np.isfinite(numbers)
    kept = np.where(finite, numbers, 0.0)
    element = np.arange(offset, offset + len(kept), dtype=np.int64)
    turns, flips = turns_and_flips(0, int(element[-1]) // CHUNK + 1 if len(element) else 1)
    lane = lanes()[element % CHUNK] ^ turns[element // CHUNK]
    contribution = kept * signs()[element % CHUNK] * flips[element // CHUNK]
    return Summary(
        numel=values.size,
        norm=float(np.sqrt((kept * kept).sum())),
        abs_max=float(np.abs(kept).max()) if len(kept) else 0.0,
        sum=float(kept.sum()),
        nan_count=int(np.isnan(numbers).sum()),
        inf_count=int(np.isinf(numbers).sum()),
        fingerprint=fingerprint,
        sketch=tuple(np.bincount(lane, contribution, SKETCH_LANES).tolist()),
    )
