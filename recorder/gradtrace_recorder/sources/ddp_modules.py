"""What is known of a DDP module and of a bucket under way, and why some modules cannot be observed."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from gradtrace_recorder.summaries.device.times import Moment
from gradtrace_recorder.torch_internals.relays import RELAYS, Relay
from gradtrace_schemas.journal import NULL_INT64


class KnownDdp:
    """What is known of one DDP module. `state` is that of its latest call: its reducer goes by no other."""

    def __init__(self, module: Any) -> None:
        self.module = weakref.ref(module)
        # `replicate` calls the reducer from hooks: there is no wrapper's call to see.
        self.is_called = not isinstance(module.module, nn.ParameterList)
        self.parameter_ids = {id(p) for p in module.parameters() if p.requires_grad}
        self.inner_ids = {id(m) for m in module.module.modules()} if self.is_called else set()
        self.unobserved: str | None = None
        self.state: str | None = None
        self.layouts: dict[int, tuple[int, ...]] = {}
        self.layout_index = 0
        self.is_written = False
        self.group = ""
        self.place: tuple[int | None, str | None] = (None, None)


class OpenBucket:
    """A bucket that was launched and has no row yet."""

    __slots__ = (
        "device_began", "device_ns", "done_ns", "fields", "future", "held", "is_on_cpu", "parameter_ids", "place",
        "relay",
    )  # fmt: skip

    def __init__(self, relay: Relay, parameter_ids: tuple[int, ...], *, is_on_cpu: bool) -> None:
        self.relay = relay
        self.parameter_ids = parameter_ids
        self.is_on_cpu = is_on_cpu
        self.future: Any = None
        self.done_ns: int | None = None
        self.device_began: Moment | None = None
        self.device_ns = NULL_INT64
        self.held: int | None = None
        self.place: tuple[int, int, int] = (0, 0, 0)
        self.fields: dict[str, Any] = {}


def why_unobserved(ddp: Any) -> str | None:
    """Why a DDP module gets no relay of ours, None where it has or can have one."""
    if not hasattr(ddp, "reducer"):
        return "all of its parameters are reduced late (delay_all_reduce_named_params), past the reducer"
    if RELAYS.of(ddp.reducer) is not None:
        return None
    if getattr(ddp, "_use_python_reducer", False):
        return "it is reduced by the Python reducer, under compiled autograd"
    if ddp._comm_hooks:
        return "its hook was registered before recording was switched on"
    if ddp._get_ddp_logging_data().get("comm_hook"):
        return "a built-in hook was registered before recording was switched on"
    if ddp.gradient_as_bucket_view:
        return (
            "its gradients are views of its buckets, where the reducer divides them as they arrive: a pass that "
            "does not complete, or a hook that looks, would see them undivided"
        )
    if any(getattr(m, "sparse", False) for m in ddp.module.modules()):
        return "it has sparse gradients, whose memory the reducer divides as they arrive"
    if any(p.device.type != "cpu" for p in ddp.parameters()):
        return "its gradients are on a device, where equality to the last bit is not proved"
    if not hasattr(ddp.reducer, "_run_allreduce_hook"):
        return f"torch {torch.__version__} has no way to reduce a bucket from Python"
    return None


def layout_of(about: KnownDdp, index: int, ids: tuple[int, ...]) -> int:
    """Which arrangement this bucket belongs to: a new one when its parameters change."""
    if about.layouts.get(index, ids) != ids:
        about.layouts.clear()
        about.layout_index += 1
    about.layouts[index] = ids
    return about.layout_index


def result_of(future: Any) -> torch.Tensor | None:
    """The tensor that a future holds; None where it is not done, or holds an error."""
    if future is None or not future.done():
        return None
    try:
        value = future.value()
    except Exception:
        return None
    if isinstance(value, list | tuple) and value:
        value = value[0]
    return value if isinstance(value, torch.Tensor) else None
