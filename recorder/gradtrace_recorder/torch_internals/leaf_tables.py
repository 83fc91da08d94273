"""Our hooks on parameters, which are told of a gradient before any hook of the job's.

Torch keeps such hooks in a table of the parameter's, made with the first of them. Passes on several threads may share
parameters, so tables change under a lock of ours, and none goes away while another thread's pass may be reading it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable

import torch
from torch.utils.hooks import RemovableHandle

from gradtrace_recorder.torch_internals.dynamo import never_compiled

# Held again by the same thread where memory runs short inside: what is then collected may end another pass.
_lock = threading.RLock()


def hook_first(leaf: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Have this called when the leaf's gradient was accumulated, before all others."""
    with _lock:
        handle: RemovableHandle = leaf.register_post_accumulate_grad_hook(hook)
        table = leaf._post_accumulate_grad_hooks
        for key in list(table) if len(table) > 1 else ():
            # The engine calls them in the order in which they came into the table (2.13: `PyDict_Next`).
            other = table.pop(key, None) if key != handle.id else None
            if other is not None:
                table[key] = other
        return handle


def take_off(
    handles: Iterable[RemovableHandle],
    leaves: Iterable[torch.Tensor],
    is_alone: Callable[[], bool],
) -> None:
    """Remove these hooks of a pass, and of its leaves the tables that are empty then.

    An empty table left behind would keep hooks of the job from working after a swap of tensors. Where another thread
    runs a pass it stays: the engine holds a bare pointer to it while it waits for the GIL (2.13).
    """
    with _lock:
        for handle in handles:
            handle.remove()
        if is_alone():
            for leaf in leaves:
                if not leaf._post_accumulate_grad_hooks:
                    leaf._post_accumulate_grad_hooks = None  # type: ignore[assignment]


def _renew() -> None:
    global _lock
    _lock = threading.RLock()  # a thread that is not here may have held it


os.register_at_fork(after_in_child=_renew)
never_compiled(hook_first, take_off)
