"""What the ranks of a process group agree on through the group's own store: whoever comes first says it.

One `compare_set` on one key, at a rank's first event: no wait for a key, no collective, nobody is waited for. It runs
on a thread of its own, for seconds at most, since a store can be held by another thread of the job, and its server may
be gone with the machine that it ran on. Our keys begin with `gradtrace/`; c10d keeps its own beside them, so that the
number of keys in a default store says nothing to a job. They are left there: nobody knows who has yet to read them.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

_PREFIX = "gradtrace/start"
_PATIENCE_SECONDS = 5.0


def group_store() -> Any | None:
    """The store of the default process group; None where there is none, or it cannot be had.

    Source: torch/distributed/distributed_c10d.py, `_get_default_store` (2.6 to 2.13).
    """
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized() or c10d.get_world_size() < 2:
        return None
    try:
        store = c10d._get_default_store()
    except Exception:
        return None
    return store if hasattr(store, "compare_set") else None


def agreed(store: Any, key: str, proposed: str, seconds: float = _PATIENCE_SECONDS) -> str | None:
    """What the first rank proposed under this key; None where the store gives no answer within so many seconds."""
    answers: list[str] = []

    def ask() -> None:
        try:
            answer = store.compare_set(f"{_PREFIX}/{key}", "", proposed)
            answers.append(answer.decode() if isinstance(answer, bytes) else str(answer))
        except Exception:
            pass  # its server died, or this kind of store cannot

    thread = threading.Thread(target=ask, name="gradtrace-store", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None  # no thread can be had
    thread.join(seconds)
    return answers[0] if answers else None
