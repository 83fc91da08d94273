"""The same rows by torch operations on the device: for dtypes that no kernel reads, and where there is no Triton.

About thirty small launches a block of 262,144 elements, and no wait: every number stays on the device, and the row
is copied behind them. No temporary is larger than a block of 64-bit numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from gradtrace_recorder.summaries.device.rows import CHECK, WORDS, factors
from gradtrace_recorder.summaries.device.tables import Sent
from gradtrace_schemas.summary import (
    CHUNK,
    MIX_FACTORS,
    MULTIPLIER_SEED,
    TURN_SEED,
    lanes,
    signed,
    signs,
    weights,
)
from gradtrace_schemas.table import SKETCH_LANES

_BLOCK_CHUNKS = 64
# A larger tensor would be thousands of launches: it is left out, and said so.
MOST_BLOCKS = 256

_WORD = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


class TooLarge(RuntimeError):
    """The tensor has more blocks than are worth so many launches."""


class TorchRows:
    """Leaves rows in `rows`, memory of the host that `device` can write."""

    def __init__(self, rows: torch.Tensor, device: torch.device) -> None:
        self._rows = rows
        self._slots = rows.shape[0]
        self._sent = sent = Sent(device)
        self._weights = sent.table(weights())
        every = np.arange(CHUNK)
        order = np.empty(CHUNK, np.int64)
        order[every // SKETCH_LANES * SKETCH_LANES + lanes()] = every
        self._order = sent.table(order)
        self._signs = sent.table(signs()[order])
        self._factors = sent.table(factors())
        self._lanes = sent.table(np.arange(SKETCH_LANES))

    def launch(self, tensor: torch.Tensor, ticket: int) -> None:
        """The summary of a detached strided tensor of any real or complex dtype, into the row of that ticket.

        Raises TooLarge.
        """
        self._sent.wait()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        if tensor.is_neg():
            tensor = tensor.resolve_neg()
        if tensor.dtype == torch.bool:
            tensor = tensor.view(torch.uint8)
        if tensor.numel() > MOST_BLOCKS * _BLOCK_CHUNKS * CHUNK:
            raise TooLarge(f"{tensor.numel()} elements are too many for torch's operations")
        whole, floats = self._block(*next(blocks := _blocks(tensor)))
        for block in blocks:
            more, more_floats = self._block(*block)
            largest = torch.maximum(floats[1], more_floats[1])
            whole, floats = whole + more, floats + more_floats
            floats[1] = largest
        device = tensor.device
        words = torch.cat((
            torch.full((1,), ticket, dtype=torch.int64, device=device),
            whole,
            floats[:3].view(torch.int64),
            torch.zeros(1, dtype=torch.int64, device=device),
            floats[3:].view(torch.int64),
        ))  # fmt: skip
        row = torch.zeros(WORDS, dtype=torch.int64, device=device)
        row[:CHECK] = words
        row[CHECK] = (words * self._factors).sum()
        self._rows[ticket % self._slots].copy_(row, non_blocking=True)

    def _block(self, flat: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(fingerprint, NaNs, infinities), (square, abs_max, sum, lanes) of a piece that begins with chunk `first`."""
        count = flat.shape[0]
        chunks = -(-count // CHUNK)
        if count % CHUNK:
            padded = torch.zeros(chunks * CHUNK, dtype=flat.dtype, device=flat.device)
            padded[:count] = flat
            flat = padded
        width = flat.dtype.itemsize
        words = flat.view(_WORD[width]).to(torch.int64).view(-1, CHUNK)
        each = words.shape[0] // chunks
        numbers = torch.arange(first * each, (first + chunks) * each, device=flat.device)
        own = (words * self._weights).sum(1)
        fingerprint = (own * (_mixed(numbers, MULTIPLIER_SEED) | 1)).sum()
        if flat.is_floating_point():
            values = flat if width == 8 else flat.float()
            is_nan = values != values
            is_inf = values.abs() == math.inf
            values = torch.where(is_nan | is_inf, 0.0, values.double())
            nans, infs = is_nan.sum(), is_inf.sum()
        else:
            values = flat.double()
            nans = infs = torch.zeros((), dtype=torch.int64, device=flat.device)
        numbers = torch.arange(first, first + chunks, device=flat.device)
        drawn = torch.where(numbers == 0, 0, _mixed(numbers, TURN_SEED))
        flips = 1.0 - 2.0 * ((drawn >> 4) & 1).double()
        ordered = (values.view(chunks, CHUNK)[:, self._order] * self._signs).view(
            chunks, -1, SKETCH_LANES
        )
        turned = ordered.sum(1).gather(1, self._lanes ^ (drawn & 15)[:, None])
        sketch = (turned * flips[:, None]).sum(0)
        floats = torch.stack(((values * values).sum(), values.abs().amax(), values.sum()))
        return torch.stack((fingerprint, nans, infs)), torch.cat((floats, sketch))


def _mixed(values: torch.Tensor, seed: int) -> torch.Tensor:
    """splitmix64's finaliser over `values + seed` in signed integers, whose right shifts are arithmetic."""
    first, second = (signed(factor) for factor in MIX_FACTORS)
    z = values + signed(seed)
    z = (z ^ ((z >> 30) & (2**34 - 1))) * first
    z = (z ^ ((z >> 27) & (2**37 - 1))) * second
    return z ^ ((z >> 31) & (2**33 - 1))


def _blocks(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    """Flat pieces of whole chunks in logical order (the last may end within one), each with its first chunk."""
    size = _BLOCK_CHUNKS * CHUNK
    count = tensor.numel()
    if tensor.is_contiguous() or count <= size:
        flat = tensor.reshape(-1)
        if flat.stride(0) != 1:
            flat = flat.clone(memory_format=torch.contiguous_format)
        for start in range(0, count, size):
            yield flat[start : start + size], start // CHUNK
        return
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    memory = tensor.as_strided((reach,), (1,))
    for start in range(0, count, size):
        index = torch.arange(start, min(start + size, count), device=tensor.device)
        offset = torch.zeros_like(index)
        for n, s in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
            offset += index % n * s
            index = index // n
        yield memory[offset], start // CHUNK
