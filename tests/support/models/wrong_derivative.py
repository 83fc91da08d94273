"""A custom autograd function whose derivative is wrong on demand."""

from __future__ import annotations

from typing import Any

import torch


class Scale(torch.autograd.Function):
    """Hands x on; its derivative is `factor`, which ought to be 1."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.factor, None
