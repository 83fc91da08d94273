"""Every schedule of torch's pipelines, one after the other on two ranks; what each leaves is saved, to be compared.

Each schedule trains for two steps. `--only` chooses by name.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

MICROBATCHES = 4
STEPS = 2
# Which stages are on which rank, in order.
SINGLE = ([0], [1])
LOOPED = ([0, 2], [1, 3])
V_SHAPED = ([0, 3], [1, 2])
SCHEDULES: dict[str, tuple[Any, tuple[list[int], list[int]]]] = {
    "GPipe": (pipelining.ScheduleGPipe, SINGLE),
    "1F1B": (pipelining.Schedule1F1B, SINGLE),
    "Interleaved1F1B": (pipelining.ScheduleInterleaved1F1B, LOOPED),
    "LoopedBFS": (pipelining.ScheduleLoopedBFS, LOOPED),
    "InterleavedZeroBubble": (pipelining.ScheduleInterleavedZeroBubble, LOOPED),
    "ZBVZeroBubble": (pipelining.ScheduleZBVZeroBubble, V_SHAPED),
    "DualPipeV": (pipelining.ScheduleDualPipeV, V_SHAPED),
}


def part(index: int) -> nn.Module:
    """A stage's module; several parameters between its input and its output."""
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean squared error."""
    return (output - target).square().mean()


def trained(name: str, rank: int) -> dict[str, Any]:
    """Losses of all steps, last gradients and parameters of a rank's stages."""
    schedule_class, placed = SCHEDULES[name]
    count = sum(map(len, placed))
    parts = {index: part(index) for index in placed[rank]}
    stages = [
        pipelining.PipelineStage(parts[index], index, count, torch.device("cpu"))
        for index in placed[rank]
    ]
    is_single = len(stages) == 1
    schedule = schedule_class(
        stages[0] if is_single else stages, n_microbatches=MICROBATCHES, loss_fn=loss_of
    )
    parameters = [p for module in parts.values() for p in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    kept: list[torch.Tensor] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.manual_seed(100 + step)
        batch, target = torch.randn(2 * MICROBATCHES, 6), torch.randn(2 * MICROBATCHES, 6)
        given = (batch,) if 0 in placed[rank] else ()
        if count - 1 in placed[rank]:
            losses: list[torch.Tensor] = []
            schedule.step(*given, target=target, losses=losses)
            kept += [loss.detach() for loss in losses]
        else:
            schedule.step(*given)
        optimizer.step()
    return {
        "losses": kept,
        "gradients": [p.grad for p in parameters],
        "parameters": [p.detach() for p in parameters],
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
