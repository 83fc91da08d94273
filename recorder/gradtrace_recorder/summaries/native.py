"""The tensor summary in one pass over memory, where the native library is built: the numbers of `TorchSummary`.

It knows plain tensors of floating dtypes in the process's own memory, whatever their strides. All others, and shards
that begin elsewhere than at 0, are left to torch's operations.
"""

from __future__ import annotations

from typing import Any

import torch

from gradtrace_recorder.summaries.torch_ops import Numbers, TorchSummary


class NativeSummary(TorchSummary):
    """The same, faster: equal fingerprints, counts and abs_max; the others within 1e-6 of the norm."""

    def __init__(self, library: Any, *, norms_only: bool) -> None:
        super().__init__(norms_only=norms_only)
        self._summary = library.summary
        self._summaries = library.summaries
        self._whole = not norms_only

    def numbers(self, tensor: torch.Tensor, offset: int = 0) -> Numbers:
        """(norm, abs_max, sum, nan_count, inf_count, fingerprint, 16 lanes) of a detached CPU tensor."""
        found: Numbers | None = None if offset else self._summary(tensor, self._whole)
        return super().numbers(tensor, offset) if found is None else found

    def each(self, tensors: list[torch.Tensor]) -> list[Numbers]:
        """`numbers` of each of a list: one call for all that the library knows."""
        found: list[Numbers | None] = self._summaries(tensors, self._whole)
        return [
            super(NativeSummary, self).numbers(tensor) if numbers is None else numbers
            for tensor, numbers in zip(tensors, found, strict=True)
        ]
