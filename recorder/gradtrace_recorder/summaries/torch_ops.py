"""The tensor summary by torch operations, for tensors on the CPU.

Its laws stand in `gradtrace_schemas.summary`. No temporary is as large as the tensor: it is read in blocks
of at most 64 chunks. Nothing here asks for random numbers, consumes an autograd sequence number (everything
runs on detached tensors), or is seen by the job's modes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from gradtrace_recorder.summaries.values import LARGEST_FLOAT32, NO_LANES
from gradtrace_schemas.summary import (
    CHUNK,
    multipliers,
    projection,
    turns_and_flips,
    weights,
)
from gradtrace_schemas.table import SKETCH_LANES

BLOCK = 64 * CHUNK

Numbers = tuple[float, float, float, int, int, int, tuple[float, ...]]

_WORD = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_TINY_NORM = 1e-15  # squares of smaller float32 numbers begin to underflow
_CACHED_CHUNKS = 4096


class TorchSummary:
    """Computes summaries. The tables are made once; `numbers` may be called on any thread."""

    def __init__(self, *, norms_only: bool) -> None:
        self._norms_only = norms_only
        self._weights = torch.from_numpy(weights().copy())
        self._projections = {
            torch.float64: torch.from_numpy(projection().copy()),
            torch.float32: torch.from_numpy(projection().copy()).float(),
        }
        self._multipliers = torch.from_numpy(multipliers(0, _CACHED_CHUNKS))
        turns, flips = turns_and_flips(0, _CACHED_CHUNKS)
        self._turns, self._flips = torch.from_numpy(turns), torch.from_numpy(flips)
        self._lanes = torch.arange(SKETCH_LANES, device="cpu")

    def numbers(self, tensor: torch.Tensor, offset: int = 0) -> Numbers:
        """(norm, abs_max, sum, nan_count, inf_count, fingerprint, 16 lanes) of a strided CPU tensor.

        `offset` is the index of its first element in a larger whole. The tensor must be detached.
        """
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
            offset *= 2
        if tensor.is_neg():
            tensor = tensor.resolve_neg()
        if tensor.dtype == torch.bool:
            tensor = tensor.view(torch.uint8)
        square = total = abs_max = 0.0
        nans = infs = fingerprint = 0
        sketch: list[float] | None = None
        for flat, at in _pieces(tensor, offset):
            part = self._row(flat, at) if len(flat) <= CHUNK else self._rows(flat, at)
            square += part[0]
            abs_max = max(abs_max, part[1])
            total += part[2]
            nans += part[3]
            infs += part[4]
            fingerprint += part[5]
            lanes = part[6]
            sketch = (
                lanes if sketch is None else [a + b for a, b in zip(sketch, lanes, strict=True)]
            )
        if sketch is None or self._norms_only:
            lanes16 = NO_LANES
        else:
            lanes16 = tuple(sketch)
            if max(map(abs, lanes16)) > LARGEST_FLOAT32:
                lanes16 = tuple(min(max(v, -LARGEST_FLOAT32), LARGEST_FLOAT32) for v in lanes16)
        return math.sqrt(square), abs_max, total, nans, infs, _signed(fingerprint), lanes16

    def _row(
        self, flat: torch.Tensor, at: int
    ) -> tuple[float, float, float, int, int, int, list[float]]:
        """A piece of at most one chunk: few operations, since a small tensor costs by their number."""
        chunk, place = divmod(at, CHUNK)
        values, nans, infs = _finite(flat)
        count = len(flat)
        norm, low, high = _norm_and_range(values)
        total = float(values.sum())
        if self._norms_only:
            return norm * norm, max(-low, high), total, nans, infs, 0, list(NO_LANES)
        table = self._projections[values.dtype]
        lanes = (values @ table[place : place + count]).tolist()
        fingerprint = self._word_sums(flat, at)
        if chunk:
            turn, flip = self._turn_and_flip(chunk)
            lanes = [flip * lanes[lane ^ turn] for lane in range(SKETCH_LANES)]
        return norm * norm, max(-low, high), total, nans, infs, fingerprint, lanes

    def _rows(
        self, flat: torch.Tensor, at: int
    ) -> tuple[float, float, float, int, int, int, list[float]]:
        """A piece of several whole chunks, beginning at a chunk's first place."""
        values, nans, infs = _finite(flat)
        chunks = values.view(-1, CHUNK)
        norms = torch.linalg.vector_norm(chunks, dim=1).double()
        square = float(norms @ norms)
        low, high = (float(x) for x in torch.aminmax(values))
        if not math.isfinite(square) or square < (_TINY_NORM**2) * len(chunks):
            square = float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
        total = float(chunks.sum(1).double().sum())
        if self._norms_only:
            return square, max(-low, high), total, nans, infs, 0, list(NO_LANES)
        first = at // CHUNK
        turns, flips = self._turns_and_flips(first, len(chunks))
        rows = chunks @ self._projections[values.dtype]
        turned = rows.gather(1, self._lanes ^ turns[:, None])
        lanes = (flips.to(turned.dtype) @ turned).tolist()
        return square, max(-low, high), total, nans, infs, self._word_sums(flat, at), lanes

    def _word_sums(self, flat: torch.Tensor, at: int) -> int:
        """The fingerprint's sum over the words of contiguous elements, the first at index `at`."""
        words = flat.view(_WORD[flat.dtype.itemsize]).to(torch.int64)
        first = at * (flat.dtype.itemsize // 4 or 1)
        chunk, place = divmod(first, CHUNK)
        head = min(len(words), (CHUNK - place) % CHUNK)
        total = 0
        if head:
            own = int(words[:head] @ self._weights[place : place + head])
            total += own * self._multiplier(chunk)
            chunk += 1
        whole = (len(words) - head) // CHUNK
        if whole:
            sums = words[head : head + whole * CHUNK].view(whole, CHUNK) @ self._weights
            total += int(sums @ self._some_multipliers(chunk, whole))
            chunk += whole
        rest = len(words) - head - whole * CHUNK
        if rest:
            own = int(words[len(words) - rest :] @ self._weights[:rest])
            total += own * self._multiplier(chunk)
        return total

    def _multiplier(self, chunk: int) -> int:
        return int(self._some_multipliers(chunk, 1)[0])

    def _some_multipliers(self, first: int, count: int) -> torch.Tensor:
        if first + count <= _CACHED_CHUNKS:
            return self._multipliers[first : first + count]
        return torch.from_numpy(multipliers(first, count))

    def _turns_and_flips(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        if first + count <= _CACHED_CHUNKS:
            return self._turns[first : first + count], self._flips[first : first + count]
        turns, flips = turns_and_flips(first, count)
        return torch.from_numpy(turns), torch.from_numpy(flips)

    def _turn_and_flip(self, chunk: int) -> tuple[int, float]:
        turns, flips = self._turns_and_flips(chunk, 1)
        return int(turns[0]), float(flips[0])


def _pieces(tensor: torch.Tensor, at: int) -> Iterator[tuple[torch.Tensor, int]]:
    """1-D contiguous pieces in logical order, each with the index of its first element.

    A piece lies within one chunk, or is a run of whole chunks of at most a block.
    """
    for flat in _contiguous(tensor):
        start = 0
        while start < len(flat):
            place = at % CHUNK
            left = len(flat) - start
            if place or left < CHUNK:
                count = min(left, CHUNK - place)
            else:
                count = min(left // CHUNK * CHUNK, BLOCK)
            yield flat[start : start + count], at
            start += count
            at += count


def _contiguous(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor in logical order as flat contiguous tensors; none but a contiguous one exceeds a block."""
    if tensor.is_contiguous() or tensor.numel() <= BLOCK:
        yield tensor.reshape(-1)
        return
    row = tensor.numel() // tensor.shape[0]
    if row > BLOCK:
        for inner in tensor:
            yield from _contiguous(inner)
        return
    count = max(1, BLOCK // row)
    for start in range(0, tensor.shape[0], count):
        yield tensor[start : start + count].reshape(-1)


def _finite(flat: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """(values as float32 or float64 with zeros for what is not finite, NaN count, infinity count)."""
    if flat.dtype == torch.float32 or flat.dtype == torch.float64:
        values = flat
    elif flat.is_floating_point():
        values = flat.float()
    else:
        values = flat.double()
    if math.isfinite(float(values.sum())):
        return values, 0, 0
    nans, infs = int(values.isnan().sum()), int(values.isinf().sum())
    return (torch.where(values.isfinite(), values, 0.0) if nans or infs else values), nans, infs


def _norm_and_range(values: torch.Tensor) -> tuple[float, float, float]:
    low, high = torch.aminmax(values)
    norm = float(torch.linalg.vector_norm(values))
    if not _TINY_NORM < norm < math.inf:
        norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
    return norm, float(low), float(high)


def _signed(value: int) -> int:
    value &= 0xFFFF_FFFF_FFFF_FFFF
    return value - (1 << 64) if value >> 63 else value
