"""What kind of tensor it is, and whether its values can be read: wrappers, subclasses, shards, freed storages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from gradtrace_recorder.guard import is_of_a_signal_handler
from gradtrace_recorder.torch_internals.modes import unseen
from gradtrace_recorder.torch_internals.privates import found

is_lazy = found("torch.nn.parameter.is_lazy", lambda tensor: False)
is_functorch_wrapped = found(
    "torch._C._functorch.is_functorch_wrapped_tensor", lambda tensor: False
)
is_legacy_batched = found("torch._C._functorch.is_legacy_batchedtensor", lambda tensor: False)
_tracing_state = found("torch._C._get_tracing_state", lambda: None)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def why_unreadable(tensor: torch.Tensor, reads: Callable[[torch.device], bool]) -> str | None:
    """Why a tensor's values cannot be read now, or None where they can. `reads` says of a device other than the CPU
    whether its tensors are."""
    if is_functorch_wrapped(tensor) or is_legacy_batched(tensor):
        return "functorch wrapper"
    if is_lazy(tensor):
        return "not yet initialised"
    if tensor.is_quantized:
        return "quantized"
    if tensor.device.type != "cpu" and not reads(tensor.device):
        # Reading its values would synchronise.
        return f"on {tensor.device.type}"
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if isinstance(tensor, getattr(fake, "FakeTensor", ())):  # another thread may be importing it
        return "fake tensor"
    if _tracing_state() is not None:
        return "tracing"
    if is_plain(tensor) and _is_freed(tensor):
        return "freed storage"
    return None


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is torch's own dense tensor, or a parameter."""
    return type(tensor) in _PLAIN and tensor.layout == torch.strided and not tensor.is_nested


def _is_freed(tensor: torch.Tensor) -> bool:
    """Whether its storage is smaller than what it spans: resized to nothing, as sharding does to parameters.

    The storage itself is not asked for: the object that Python has for it then lives as long as it does, is one that
    uses it, and the engine adds up gradients in place in a storage that nobody else uses. Source:
    torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace` (2.13).
    """
    if not tensor.numel():
        return False
    try:
        with unseen():  # a view that does not fit into its storage is refused
            tensor.detach().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    except RuntimeError as error:
        is_refused = str(error).startswith(
            "setStorage"
        )  # else it may be no answer: frames ran out, an alarm
        if not is_refused and (isinstance(error, RecursionError) or is_of_a_signal_handler(error)):
            raise
        return True
    return False


def local_shard(tensor: torch.Tensor) -> torch.Tensor | None:
    """What of a DTensor lies here, where that is a plain tensor; None for any other tensor."""
    if not hasattr(tensor, "to_local"):
        return None
    local: Any = getattr(tensor, "_local_tensor", None)
    return local if type(local) in _PLAIN and local.layout == torch.strided else None


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """What is defined of a tensor that is no plain strided one: its parts, or None."""
    if hasattr(tensor, "to_local") and hasattr(tensor, "_local_tensor"):
        local = local_shard(tensor)
        return None if local is None else [local]
    if tensor.layout == torch.sparse_coo:
        return [tensor._values(), tensor._indices()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.values(), tensor.crow_indices(), tensor.col_indices()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.values(), tensor.ccol_indices(), tensor.row_indices()]
    if tensor.is_nested:
        return [tensor.values()]
    if tensor.layout == torch.strided and not _overrides_dispatch(tensor):
        return [tensor.as_subclass(torch.Tensor)]
    return None


def _overrides_dispatch(tensor: torch.Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
