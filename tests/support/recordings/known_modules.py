"""Which module made a Node, known without the recorder: every operation is watched under a stack of the modules'
own forwards, which are wrapped before it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

LEAF = 2**63  # the numbers of AccumulateGrad Nodes are above it


class Watch(TorchFunctionMode):
    """Tags each new Node with the FQN of the innermost module whose forward is running."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.owner: dict[int, str | None] = {}
        self.stack: list[str] = []
        for name, module in model.named_modules():
            module.forward = self._wrapped(module.forward, name)

    def _wrapped(self, forward: Any, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._tag(args)  # what no operation showed: the Nodes of custom Functions
            self.stack.append(name)
            try:
                return forward(*args, **kwargs)
            finally:
                self.stack.pop()

        return call

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self._tag(result)
        return result

    def _tag(self, values: Any) -> None:
        for tensor in tensors_in(values):
            waiting = [tensor.grad_fn]
            while waiting:
                node = waiting.pop()
                if node is None or node._sequence_nr() >= LEAF:
                    continue
                if node._sequence_nr() not in self.owner:
                    self.owner[node._sequence_nr()] = self.stack[-1] if self.stack else None
                    waiting += [following for following, _ in node.next_functions]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def equal_bits(a: Any, b: Any) -> bool:
    """Equal in every bit: tensors by their bytes, everything else by ==."""
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
            return False
        if a.is_sparse:
            a, b = a.coalesce(), b.coalesce()
            return equal_bits([a.indices(), a.values()], [b.indices(), b.values()])
        return bool(_bytes(a) == _bytes(b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal_bits(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(equal_bits(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()
