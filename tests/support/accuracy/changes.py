"""Legal changes of a training job: the same training, rounded otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ops = torch.ops.aten
_PRODUCTS = {_ops.mm.default, _ops.bmm.default, _ops.addmm.default}


class Products(TorchDispatchMode):
    """Computes matrix products in another way, below autograd: the Nodes are the same."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._product = product
        self._dtypes = {torch.float32} | ({torch.bfloat16} if product is other_order else set())

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _PRODUCTS and args[-1].dtype in self._dtypes and not kwargs:
            product = self._product(args[-2], args[-1])
            return product + args[0] if function is _ops.addmm.default else product
        return function(*args, **(kwargs or {}))


def other_order(a: Tensor, b: Tensor) -> Tensor:
    """Two halves of the sum, each by itself, the second first."""
    half = a.shape[-1] // 2
    return a[..., half:] @ b[..., half:, :] + a[..., :half] @ b[..., :half, :]


def other_device(a: Tensor, b: Tensor) -> Tensor:
    """Sums that are exact but for one rounding: as far from a CPU's kernel as another device's can well be."""
    return (a.double() @ b.double()).float()


def tf32(a: Tensor, b: Tensor) -> Tensor:
    """Factors rounded to the 10 bits of tf32, summed in float32."""
    return _to_ten_bits(a) @ _to_ten_bits(b)


def fp8(a: Tensor, b: Tensor) -> Tensor:
    """Factors scaled to the range of float8 e4m3 and rounded to it, summed in float32."""
    return _to_float8(a) @ _to_float8(b)


def _to_ten_bits(x: Tensor) -> Tensor:
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def _to_float8(x: Tensor) -> Tensor:
    scale = 448.0 / x.abs().amax().clamp_min(1e-30)
    return (x * scale).to(torch.float8_e4m3fn).float() / scale


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "another order of summation": other_order,
    "bf16, another order of summation": other_order,
    "another device (simulated)": other_device,
    "tf32 (simulated)": tf32,
    "fp8 (simulated)": fp8,
}
