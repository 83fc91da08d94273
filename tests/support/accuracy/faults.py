"""Faults of a backward pass, of every kind: what a Node hands on instead of the gradient that it ought to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

KINDS = (
    "sign flipped",
    "times 1.01",
    "times 1.2",
    "times 2",
    "one ulp",
    "one element by 1%",
    "two elements swapped",
    "batch rolled",
    "one row zeroed",
    "one NaN",
    "all NaN",
    "a summand lost",
    "a stale value",
)


class Place:
    """A module's backward pass, which is faulty at `step` (and at every later one) in the way of `kind`."""

    def __init__(self, kind: str | None, step: int) -> None:
        self.kind, self.first_step = kind, step
        self.step = 0
        self.stale: dict[int, Tensor] = {}

    def total(self, kept: Tensor, lost: Tensor) -> Tensor:
        """What leaves the Node, of two summands that came in."""
        total = kept + lost
        before = self.stale.get(self.step - 1)
        self.stale[self.step] = total.clone()
        if self.kind is None or self.step < self.first_step:
            return total
        if self.kind == "a summand lost":
            return kept
        if self.kind == "a stale value":
            return before if before is not None and before.shape == total.shape else total * 0
        return _faulty(total, self.kind)


def _faulty(gradient: Tensor, kind: str) -> Tensor:
    factors = {"sign flipped": -1.0, "times 1.01": 1.01, "times 1.2": 1.2, "times 2": 2.0}
    if kind in factors:
        return gradient * factors[kind]
    if kind == "all NaN":
        return torch.full_like(gradient, float("nan"))
    changed = gradient.clone(memory_format=torch.contiguous_format)
    flat = changed.view(-1)
    largest = int(flat.abs().argmax())
    if kind == "one ulp":
        flat[largest] = torch.nextafter(flat[largest], flat.new_tensor(float("inf")))
    elif kind == "one element by 1%":
        flat[largest] *= 1.01
    elif kind == "two elements swapped":
        other = int(flat.argmin()) if flat[largest] > 0 else int(flat.argmax())
        flat[[largest, other]] = flat[[other, largest]]
    elif kind == "batch rolled":
        changed = changed.roll(1, 0)
    elif kind == "one row zeroed":
        changed[len(changed) // 2] = 0
    elif kind == "one NaN":
        flat[largest] = float("nan")
    else:
        raise ValueError(kind)
    return changed


class Faulty(torch.autograd.Function):
    """Hands x on twice; its backward pass adds what comes back, unless it is faulty."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        ctx.place = place
        return x.view_as(x), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.place.total(*grads), None


def make_faulty(model: nn.Module, fqn: str, kind: str | None, step: int) -> Place:
    """Put a place behind the module's forward, inside its call. Without a kind, the same place without fault."""
    module = model.get_submodule(fqn)
    place, inner = Place(kind, step), module.forward

    def forward(*arguments: Any, **keywords: Any) -> Any:
        kept, lost = Faulty.apply(inner(*arguments, **keywords), place)  # type: ignore[no-untyped-call]
        return kept + (lost - lost.detach())  # the value is the same: nothing is added

    module.forward = forward
    return place
