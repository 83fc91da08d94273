"""DDP in its first form: the reduced gradients of a backward pass that synchronises."""

from __future__ import annotations

from torch import nn

from gradtrace_recorder.recording import Recording
from gradtrace_recorder.sources.state import record_gradients


class Reductions:
    """Remembers which DDP models will have reduced when the backward pass returns.

    DDP decides at forward: with grad mode on and `require_backward_grad_sync` (off under `no_sync`) it
    prepares its reducer, which finishes in a callback of the same engine call.
    Source: torch/nn/parallel/distributed.py, `_pre_forward`.
    """

    def __init__(self) -> None:
        self._waiting: set[int] = set()

    def forward_begins(self, module: nn.Module) -> None:
        """A wrapper is called in grad mode. Remembers the parameters' identities, and no tensor."""
        from torch.nn.parallel import DistributedDataParallel

        if isinstance(module, DistributedDataParallel) and module.require_backward_grad_sync:
            self._waiting.update(id(p) for p in module.parameters() if p.requires_grad)

    def backward_done(self, recording: Recording, backward_index: int, microbatch: int) -> None:
        """An accumulating top-level pass has returned: its DDP models have reduced."""
        if not self._waiting:
            return
        for root, _ in recording.names.roots():
            chosen = [
                (name, tensor)
                for name, tensor in recording.names.tensors_of(root)
                if id(tensor) in self._waiting
            ]
            record_gradients(recording, "reduced", backward_index, microbatch, chosen)
        self._waiting.clear()
