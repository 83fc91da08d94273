"""Process groups: which ranks they join, and what they are for where that can be told."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist

from gradtrace_recorder.recording.recording import Recording

_ROLES = {
    "dp": "dp", "ddp": "dp", "data": "dp", "data_parallel": "dp", "replicate": "dp",
    "tp": "tp", "tensor": "tp", "tensor_parallel": "tp",
    "pp": "pp", "pipe": "pp", "pipeline": "pp", "pipeline_parallel": "pp",
}  # fmt: skip


class Groups:
    """Writes a row for each process group that this rank belongs to, once."""

    def __init__(self) -> None:
        self._written: set[str] = set()

    def write(self, recording: Recording) -> None:
        """Rows of the groups that have none yet. Called when a root is called, on the job's thread."""
        if not dist.is_available() or not dist.is_initialized():
            return
        groups = dist.distributed_c10d._world.pg_names
        if len(groups) == len(self._written):
            return
        for group, name in list(groups.items()):
            texts = None if name in self._written else _texts(group, name, _role(group))
            if texts is not None:
                recording.rows.group(*texts, None, None, None, None)
            self._written.add(name)


def write_reducing_module(
    recording: Recording,
    group: Any,
    root: int | None,
    module_fqn: str | None,
    hook_name: str | None,
    unobserved: str | None,
) -> None:
    """The row of a module whose gradients are reduced over a group: so the group is one of data parallelism."""
    texts = _texts(group, group.group_name, "dp")
    if texts is not None:
        recording.rows.group(*texts, root, module_fqn, hook_name, unobserved)


def collective_seq(group: Any) -> int | None:
    """c10d's number of the group's latest collective, None for a backend that counts none."""
    try:
        return int(group._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):
        return None


def _texts(group: Any, name: str, role: str | None) -> tuple[str, str, str, str | None] | None:
    """Name, ranks, backend and role; None where this rank is none of it, or the job has destroyed it meanwhile."""
    try:
        if dist.get_rank(group) < 0:
            return None
        return (
            name,
            json.dumps(dist.get_process_group_ranks(group)),
            str(dist.get_backend(group)),
            role,
        )
    except (
        KeyError,
        RuntimeError,
        ValueError,
    ):  # all three are what torch says of a group that is gone (2.13)
        return None


def _role(group: Any) -> str | None:
    """From the name of a device mesh's dimension, which torch writes into a group's description."""
    description = str(getattr(group, "group_desc", ""))
    return _ROLES.get(description.removeprefix("mesh_"))
