"""Every schedule of torch's pipelines, one after the other on two or more ranks; what each leaves is saved.

Each schedule trains for two steps. `--only` chooses by name.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

STEPS = 2


# Which stages are on a rank of so many, in order.
def single(rank: int, ranks: int) -> list[int]:
    """One on each."""
    return [rank]


def looped(rank: int, ranks: int) -> list[int]:
    """Two on each, in a loop."""
    return [rank, ranks + rank]


def v_shaped(rank: int, ranks: int) -> list[int]:
    """Two on each, there and back."""
    return [rank, 2 * ranks - 1 - rank]


SCHEDULES: dict[str, tuple[Any, Callable[[int, int], list[int]]]] = {
    "GPipe": (pipelining.ScheduleGPipe, single),
    "1F1B": (pipelining.Schedule1F1B, single),
    "Interleaved1F1B": (pipelining.ScheduleInterleaved1F1B, looped),
    "LoopedBFS": (pipelining.ScheduleLoopedBFS, looped),
    "InterleavedZeroBubble": (pipelining.ScheduleInterleavedZeroBubble, looped),
    "ZBVZeroBubble": (pipelining.ScheduleZBVZeroBubble, v_shaped),
    "DualPipeV": (pipelining.ScheduleDualPipeV, v_shaped),
    # Not schedules, but what stages may hold.
    "DDP": (pipelining.Schedule1F1B, single),
    "FSDP": (pipelining.ScheduleInterleavedZeroBubble, looped),
    "own weight half": (pipelining.ScheduleZBVZeroBubble, v_shaped),
    "unused outputs": (pipelining.ScheduleInterleavedZeroBubble, looped),
    "twice a step": (pipelining.ScheduleInterleavedZeroBubble, looped),
}


class Deferred(torch.autograd.Function):
    """A linear layer that leaves the gradient of its weight for later."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, waiting: list[Any]
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.waiting = waiting
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.waiting.append((x, gradients[0]))
        return gradients[0] @ weight.T, None, None


class DeferredLinear(nn.Module):
    """`weight_half` makes what computes the gradients that the backward passes since have left."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.waiting: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A matrix product."""
        return Deferred.apply(x, self.weight, self.waiting)  # type: ignore[no-untyped-call, no-any-return]

    def weight_half(self) -> Callable[[], None]:
        """What a stage calls `dw_builder`."""
        waiting = self.waiting[
            -1:
        ]  # what is before it comes of torch's dry run, on memory that nobody wrote
        self.waiting.clear()

        def run() -> None:
            for x, gradient in waiting:
                added = x.detach().T @ gradient
                held = self.weight.grad
                self.weight.grad = added if held is None else held + added

        return run


class Several(nn.Module):
    """Passes on two tensors, of which the next reads one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, *unread: torch.Tensor) -> Any:
        """The result, and another tensor."""
        result = self.inner(x)
        return result, x * 2


def part(index: int) -> nn.Module:
    """A stage's module; several parameters between its input and its output."""
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6))


def held(name: str, index: int, count: int) -> nn.Module:
    """A stage's module as this way of the job has it."""
    module = part(index)
    if name == "DDP":
        group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        return nn.parallel.DistributedDataParallel(module, process_group=group)
    if name == "FSDP":
        return fully_shard(module, mesh=DeviceMesh("cpu", [dist.get_rank()]))
    if name == "own weight half":
        return DeferredLinear()
    if name == "unused outputs" and index < count - 1:
        return Several(module)
    if name == "unused outputs":
        module.forward = lambda x, *unread, run=module.forward: run(x)  # type: ignore[method-assign]
    return module


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean squared error."""
    return (output - target).square().mean()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def trained(name: str, rank: int) -> dict[str, Any]:
    """Losses of all steps, last gradients and parameters of a rank's stages."""
    schedule_class, placed = SCHEDULES[name]
    ranks = dist.get_world_size()
    indices = placed(rank, ranks)
    count, microbatches = ranks * len(indices), 2 * ranks
    parts = {index: held(name, index, count) for index in indices}
    stages = [
        pipelining.PipelineStage(
            module,
            index,
            count,
            torch.device("cpu"),
            dw_builder=getattr(module, "weight_half", None),
        )
        for index, module in parts.items()
    ]
    is_single = len(stages) == 1
    schedule = schedule_class(
        stages[0] if is_single else stages, n_microbatches=microbatches, loss_fn=loss_of
    )
    parameters = [p for module in parts.values() for p in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    kept: list[torch.Tensor] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.manual_seed(100 + step)
        batch, target = torch.randn(2 * microbatches, 6), torch.randn(2 * microbatches, 6)
        given = (batch,) if 0 in indices else ()
        for _ in range(2 if name == "twice a step" else 1):
            if count - 1 in indices:
                losses: list[torch.Tensor] = []
                schedule.step(*given, target=target, losses=losses)
                kept += [loss.detach() for loss in losses]
            else:
                schedule.step(*given)
        optimizer.step()
    return {
        "losses": kept,
        "gradients": [None if p.grad is None else local(p.grad) for p in parameters],
        "parameters": [local(p.detach()) for p in parameters],
    }


def main() -> None:
    """Run the schedules in the order above."""
    options = argparse.ArgumentParser()
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--only", nargs="+", choices=list(SCHEDULES), default=list(SCHEDULES))
    chosen = options.parse_args()
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    left = {name: trained(name, rank) for name in chosen.only}
    torch.save(left, chosen.out / f"rank{rank}.pt")
    dist.destroy_process_group()
    time.sleep(0.1)  # torch 2.13 with gloo aborts now and then at exit without it


if __name__ == "__main__":
    main()
