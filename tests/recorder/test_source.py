"""What sources hear of each other's events, through the session's list and no other way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from gradtrace_recorder.sources.fsdp import FsdpSource
from gradtrace_recorder.sources.modules import ModuleSource
from support.launching.launcher import ranks
from support.recordings.in_process import recording, rows


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def train(net: nn.Module, steps: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(5, 3)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in net.parameters()]


def test_source_that_fails_at_anothers_event_ends_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = train(small(), 2)

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(FsdpSource, "pass_begins", fails)
    with recording(tmp_path, strict=False):
        recorded = train(small(), 2)
    assert all(map(torch.equal, bare, recorded))
    ((problems,),) = rows(tmp_path, "SELECT problems FROM ranks")
    assert problems.count("records no more") == 1 and "FSDP source failed" in problems
    assert rows(tmp_path, "SELECT count(*) FROM backward_passes") == [(2,)]


def test_module_source_that_failed_names_no_node_of_later_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter = ModuleSource._enter

    def fails(self: ModuleSource, live: Any, module: nn.Module, args: Any) -> None:
        if isinstance(module, nn.Tanh) and live.timeline.step == 1:
            raise RuntimeError("ours")
        enter(self, live, module, args)

    monkeypatch.setattr(ModuleSource, "_enter", fails)
    with recording(tmp_path, strict=False):
        train(small(), 4)
    named = "SELECT step, count(*) FILTER (module_fqn IS NOT NULL AND parameter_fqn IS NULL) FROM node_events"
    counts = dict(rows(tmp_path, f"{named} GROUP BY step"))
    assert counts[0] > 0 and counts[2] == 0 and counts[3] == 0


@ranks(2)
def test_reduce_scatter_of_fsdp_is_of_the_pass_that_it_ran_in(tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    if not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("fully_shard of this torch (2.6) does not run on a CPU, also bare")
    mesh = init_device_mesh("cpu", (2,))
    with recording(tmp_path / "run"):
        net = small()
        fully_shard(net, mesh=mesh)
        for _ in range(2):  # of one step
            net(torch.ones(2, 3)).sum().backward()
    dist.barrier()
    passes = "SELECT step, backward_index FROM buckets WHERE rank = 0 ORDER BY 1, 2"
    assert rows(tmp_path / "run", passes) == [(0, 0), (0, 1)]
