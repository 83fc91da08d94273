"""Rank, world size, host: who is recording. Read once per process, at its first event. Imports no torch: it asks the
job's, where that is there."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass

from gradtrace_recorder.launch.launchers import Launcher, current_launcher


@dataclass(frozen=True)
class Identity:
    """Which rank this process is. `world_size` is None where nothing has said it yet; `has_group`: the group did."""

    rank: int
    world_size: int | None
    local_rank: int | None
    host: str
    pid: int
    launcher: Launcher
    has_group: bool


def current_identity() -> Identity:
    """From the initialised process group, else from what the launcher says, else rank 0 of 1."""
    said = group_place()
    launcher = current_launcher(said)
    return Identity(
        rank=launcher.rank,
        world_size=launcher.world_size,
        local_rank=launcher.local_rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        launcher=launcher,
        has_group=said is not None,
    )


def group_place() -> tuple[int, int] | None:
    """(rank, world size) in the process group; None while there is none, or this process is not in it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    return (rank, world_size) if 0 <= rank < world_size else None


def is_data_worker() -> bool:
    """Whether this process is a DataLoader worker: it may hold a RANK, and is none."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None
