"""A call into the autograd engine that has not returned, as the sources know it of each other."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradtrace_recorder.torch_internals.dynamo import never_compiled


class Pass:
    """What one source sees, and others add to.

    `index` counts the engine's calls within a step; a pass that is not `top_level` runs inside another. Sources that
    are told of its beginning may ask to be told of gradients: `gradient_ready` is called with each parameter when its
    gradient was accumulated, and the time in ns, on an autograd thread. Told of its end, one says in `ddp_sync` how the
    DDP models that it went through were called: see `backward_passes.ddp_sync`.
    """

    __slots__ = ("accumulates", "ddp_sync", "gradient_ready", "index", "microbatch", "top_level")

    def __init__(self, index: int, microbatch: int, accumulates: bool, top_level: bool) -> None:
        self.index = index
        self.microbatch = microbatch
        self.accumulates = accumulates
        self.top_level = top_level
        self.gradient_ready: Callable[[torch.Tensor, int], None] | None = None
        self.ddp_sync: str | None = None

    @property
    def may_reduce(self) -> bool:
        """Whether it is of the kind after which gradients are reduced over ranks."""
        return self.accumulates and self.top_level


never_compiled(Pass)
