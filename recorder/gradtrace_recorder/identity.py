"""Rank, world size, host, versions: who is recording. Read once per process, at its first event."""

from __future__ import annotations

import os
import platform
import socket
import sys
from dataclasses import dataclass

import torch

from gradtrace_schemas import SCHEMA_VERSION


@dataclass(frozen=True)
class Identity:
    """Which rank this process is."""

    rank: int
    world_size: int
    local_rank: int | None
    host: str
    pid: int


def current_identity() -> Identity:
    """From the initialised process group, else from the environment, else rank 0 of 1."""
    rank, world_size = _number("RANK"), _number("WORLD_SIZE")
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank, world_size = distributed.get_rank(), distributed.get_world_size()
    return Identity(
        rank=rank or 0,
        world_size=world_size or 1,
        local_rank=_number("LOCAL_RANK"),
        host=socket.gethostname(),
        pid=os.getpid(),
    )


def is_data_worker() -> bool:
    """Whether this process is a DataLoader worker: it may hold a RANK, and is none."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


def start_token(identity: Identity) -> str:
    """A text that the ranks of one start of a job share, and no other start has.

    torchrun gives its id and restart count. Its static rendezvous calls every job `none`, and other
    launchers give none: there the launcher's process (or, for a single process, the process itself)
    tells starts on one host apart.
    """
    environment = os.environ
    run_id = environment.get("TORCHELASTIC_RUN_ID", "")
    parts = [run_id, environment.get("TORCHELASTIC_RESTART_COUNT", "0")]
    if run_id in ("", "none"):
        parts += [environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")]
        if identity.world_size == 1:
            parts.append(_process_token(os.getpid()))
        elif environment.get("LOCAL_WORLD_SIZE", str(identity.world_size)) == str(
            identity.world_size
        ):
            parts.append(_process_token(os.getppid()))
    return "/".join(parts)


def versions() -> dict[str, str]:
    """Versions that may explain a difference."""
    return {
        "gradtrace": "0.1.0",
        "schema": str(SCHEMA_VERSION),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else None


def _process_token(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return f"{pid}@{stat.read().rsplit(')', 1)[1].split()[19]}"
    except (OSError, IndexError):
        return str(pid)
