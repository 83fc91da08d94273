"""Run a job without and with recording, and compare all that it gives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from support.recordings.in_process import recording, rows
from support.recordings.known_modules import Watch, equal_bits

Job = Callable[[Any, Any], Any]


def both(make: Callable[[], Any], job: Job, path: Path, *, watched: bool = True) -> Watch | None:
    """Run a job without and with recording: equal in every bit. Where the forward is watched, every row that has
    a number names the module that made it."""

    def run(watching: Callable[[nn.Module], Any]) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = make()
        watch = watching(model)
        result = job(model, watch)
        left = {
            name: (parameter.detach().clone(), parameter.grad)
            for name, parameter in model.named_parameters()
        }
        return watch, (result, left)

    _, bare = run(lambda model: contextlib.nullcontext())
    with recording(path):
        watch, seen = run(Watch if watched else lambda model: contextlib.nullcontext())
    assert equal_bits(bare, seen), "recording changed the job"
    assert rows(path, "SELECT problems FROM ranks") == [("[]",)]
    if not watched:
        return None
    found = rows(path, "SELECT autograd_seq, module_fqn FROM node_events WHERE autograd_seq >= 0")
    assert found
    assert {seq: fqn for seq, fqn in found} == {seq: watch.owner[seq] for seq, _ in found}
    assert rows(path, "SELECT sum(unattributed_count) FROM backward_passes") == [(0,)]
    assert isinstance(watch, Watch)
    return watch


def nodes(path: Path, name: str, columns: str = "module_fqn") -> list[Any]:
    """These columns of every run of a Node of that name, in order."""
    found = rows(
        path,
        f"SELECT {columns} FROM node_events WHERE node_name LIKE '{name}' "
        "ORDER BY step, backward_index, event_index",
    )
    return [row[0] if len(row) == 1 else row for row in found]
