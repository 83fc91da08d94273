"""Gradients that a Node hands on unchanged: their summary is that of what came in."""

from __future__ import annotations

import torch

from gradtrace_recorder.summaries.summariser import Summariser
from gradtrace_recorder.summaries.values import Packed

Gradients = tuple[torch.Tensor | None, ...]


def handed_on(
    summariser: Summariser,
    gradient: torch.Tensor,
    grad_outputs: Gradients,
    incoming: list[Packed | None],
) -> Packed | None:
    """The summary of a gradient that leaves: that of one that came in, where both are the same memory.

    Both are alive in this hook call. A view's backward gives another shape of the same contiguous elements,
    whose logical order, and so whose summary, is the same.
    """
    if type(gradient) is torch.Tensor and gradient.layout == torch.strided:
        for came, packed in zip(grad_outputs, incoming, strict=True):
            if (
                packed is not None
                and came is not None
                and came is not gradient
                and type(came) is torch.Tensor
                and came.layout == torch.strided
                and came.numel() == gradient.numel()
                and came.dtype == gradient.dtype
                and not came.is_inference()
                and not gradient.is_inference()
                and came._version == gradient._version
                and came.is_conj() == gradient.is_conj()
                and came.is_neg() == gradient.is_neg()
                and gradient.is_contiguous()
                and came.is_contiguous()
                and memory_address(came) == memory_address(gradient)
            ):
                summariser.remember(gradient, packed)
                return packed
    return summariser.of_gradient(gradient)


def memory_address(tensor: torch.Tensor) -> int:
    """Where the first element lies; -id for a tensor without memory of its own, so that none is equal."""
    try:
        return tensor.data_ptr() or -id(tensor)
    except RuntimeError:
        return -id(tensor)
