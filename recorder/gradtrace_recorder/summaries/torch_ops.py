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


class _Part:
    """The summary of a piece; `square` is its norm squared, `fingerprint` any integer modulo 2^64."""

    __slots__ = ("abs_max", "fingerprint", "infs", "lanes", "nans", "square", "total")

    def __init__(
        self,
        square: float,
        abs_max: float,
        total: float,
        nans: int,
        infs: int,
        fingerprint: int,
        lanes: list[float] | None,
    ) -> None:
        self.square = square
        self.abs_max = abs_max
        self.total = total
        self.nans = nans
        self.infs = infs
        self.fingerprint = fingerprint
        self.lanes = lanes

    def numbers(self) -> Numbers:
        """As the journal wants them: the sketch must fit float32."""
        lanes = NO_LANES if self.lanes is None else tuple(self.lanes)
        if max(lanes) > LARGEST_FLOAT32 or min(lanes) < -LARGEST_FLOAT32:
            lanes = tuple(min(max(v, -LARGEST_FLOAT32), LARGEST_FLOAT32) for v in lanes)
        return (
            math.sqrt(self.square),
            self.abs_max,
            self.total,
            self.nans,
            self.infs,
            _signed(self.fingerprint),
            lanes,
        )


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
        self._first_multiplier = self._multiplier(0)
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
        count = tensor.numel()
        chunk, place = divmod(offset, CHUNK)
        if count == 0:
            return 0.0, 0.0, 0.0, 0, 0, 0, NO_LANES
        if place + count <= CHUNK:
            parts = [self._row(_flat(tensor), chunk, place)]
        else:
            parts = [
                self._row(flat, *divmod(at, CHUNK))
                if flat.shape[0] < CHUNK
                else self._rows(flat, at // CHUNK)
                for flat, at in _pieces(tensor, offset)
            ]
        return parts[0].numbers() if len(parts) == 1 else _sum_of(parts).numbers()

    def each(self, tensors: list[torch.Tensor]) -> list[Numbers]:
        """`numbers` of each of a list; the norms of those that are one chunk at most come from one call."""
        flats = {
            at: _finite(_flat(tensor))
            for at, tensor in enumerate(tensors)
            if tensor.is_floating_point() and not tensor.is_neg() and 0 < tensor.numel() <= CHUNK
        }
        norms = torch._foreach_norm([values for values, *_ in flats.values()]) if flats else ()
        found = dict(zip(flats, norms, strict=True))
        return [
            self._row(_flat(tensor), 0, 0, (*flats[at], float(found[at]))).numbers()
            if at in flats
            else self.numbers(tensor)
            for at, tensor in enumerate(tensors)
        ]

    def _row(
        self,
        flat: torch.Tensor,
        chunk: int,
        place: int,
        known: tuple[torch.Tensor, float, int, int, float] | None = None,
    ) -> _Part:
        """A piece within one chunk: few operations, since a small tensor costs by their number.

        `known` is what `_finite` gives, and the norm of that.
        """
        if known is None:
            values, total, nans, infs = _finite(flat)
            norm = float(torch.linalg.vector_norm(values))
        else:
            values, total, nans, infs, norm = known
        low, high = torch.aminmax(values)
        abs_max = max(-float(low), float(high))
        if not _TINY_NORM < norm < math.inf:
            norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
        if self._norms_only:
            return _Part(norm * norm, abs_max, total, nans, infs, 0, None)
        count = flat.shape[0]
        table = self._projections[values.dtype]
        lanes = (values @ table[place : place + count]).tolist()
        if chunk:
            turn, flip = self._turn_and_flip(chunk)
            lanes = [flip * lanes[lane ^ turn] for lane in range(SKETCH_LANES)]
        width = flat.dtype.itemsize
        if width > 4:
            fingerprint = self._word_sums(flat, chunk * CHUNK + place)
        else:
            words = flat.view(_WORD[width]).to(torch.int64)
            own = int(words @ self._weights[place : place + count])
            fingerprint = own * (self._multiplier(chunk) if chunk else self._first_multiplier)
        return _Part(norm * norm, abs_max, total, nans, infs, fingerprint, lanes)

    def _rows(self, flat: torch.Tensor, first: int) -> _Part:
        """A piece of whole chunks, the first of them number `first`."""
        values, total, nans, infs = _finite(flat)
        chunks = values.view(-1, CHUNK)
        count = chunks.shape[0]
        norms = torch.linalg.vector_norm(chunks, dim=1).double()
        square = float(norms @ norms)
        low, high = torch.aminmax(values)
        abs_max = max(-float(low), float(high))
        if not (_TINY_NORM**2) * count < square < math.inf:
            square = float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
        if self._norms_only:
            return _Part(square, abs_max, total, nans, infs, 0, None)
        turns, flips = self._turns_and_flips(first, count)
        rows = chunks @ self._projections[values.dtype]
        turned = rows.gather(1, self._lanes ^ turns[:, None])
        lanes = (flips.to(turned.dtype) @ turned).tolist()
        fingerprint = self._word_sums(flat, first * CHUNK)
        return _Part(square, abs_max, total, nans, infs, fingerprint, lanes)

    def _word_sums(self, flat: torch.Tensor, at: int) -> int:
        """The fingerprint's sum over the words of contiguous elements, the first at index `at`."""
        words = flat.view(_WORD[flat.dtype.itemsize]).to(torch.int64)
        count = words.shape[0]
        first = at * (flat.dtype.itemsize // 4 or 1)
        chunk, place = divmod(first, CHUNK)
        head = min(count, (CHUNK - place) % CHUNK)
        total = 0
        if head:
            own = int(words[:head] @ self._weights[place : place + head])
            total += own * self._multiplier(chunk)
            chunk += 1
        whole = (count - head) // CHUNK
        if whole:
            sums = words[head : head + whole * CHUNK].view(whole, CHUNK) @ self._weights
            total += int(sums @ self._some_multipliers(chunk, whole))
            chunk += whole
        rest = count - head - whole * CHUNK
        if rest:
            own = int(words[count - rest :] @ self._weights[:rest])
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
        while start < flat.shape[0]:
            place = at % CHUNK
            left = flat.shape[0] - start
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
        yield _flat(tensor)
        return
    row = tensor.numel() // tensor.shape[0]
    if row > BLOCK:
        for inner in tensor:
            yield from _contiguous(inner)
        return
    count = max(1, BLOCK // row)
    for start in range(0, tensor.shape[0], count):
        yield _flat(tensor[start : start + count])


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """One dimension, stride 1: a single element, or an expanded one, may have another."""
    flat = tensor.reshape(-1)
    return flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)


def _finite(flat: torch.Tensor) -> tuple[torch.Tensor, float, int, int]:
    """(values as float32 or float64 with zeros for what is not finite, their sum, NaN and infinity counts)."""
    if flat.dtype == torch.float32 or flat.dtype == torch.float64:
        values = flat
    elif flat.is_floating_point():
        values = flat.float()
    else:
        values = flat.double()
    total = float(values.sum())
    if math.isfinite(total):
        return values, total, 0, 0
    nans, infs = int(values.isnan().sum()), int(values.isinf().sum())
    if nans or infs:
        values = torch.where(values.isfinite(), values, 0.0)
    return values, float(values.sum(dtype=torch.float64)), nans, infs


def _sum_of(parts: list[_Part]) -> _Part:
    """The summary of a tensor from those of its pieces: all numbers but the largest add up."""
    lanes = None
    if parts[0].lanes is not None:
        lanes = [sum(lane) for lane in zip(*(p.lanes for p in parts if p.lanes), strict=True)]
    return _Part(
        sum(p.square for p in parts),
        max(p.abs_max for p in parts),
        sum(p.total for p in parts),
        sum(p.nans for p in parts),
        sum(p.infs for p in parts),
        sum(p.fingerprint for p in parts),
        lanes,
    )


def _signed(value: int) -> int:
    value &= 0xFFFF_FFFF_FFFF_FFFF
    return value - (1 << 64) if value >> 63 else value
