"""Functions of the job's, defined in Python, for tests."""

from __future__ import annotations

from typing import Any

import torch


class Raises(torch.autograd.Function):
    """Hands on what it gets, and fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ValueError("on purpose")


def applied(function: Any, *arguments: Any) -> Any:
    """What the Function gives: its `apply` has no types."""
    return function.apply(*arguments)
