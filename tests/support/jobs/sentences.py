"""Small jobs with a fault or none, recorded one after the other in one process or on two ranks.

Every job is NAME=KIND[:FAULT] and its recording is NAME in `--out`. One process: `plain`, `two_optimizers`, `scaler`,
`teacher` (a second root that runs under no_grad). Two ranks: `ddp`, `stages` (two, GPipe, two microbatches). Faults, in
step 1: `derivative`, `output`, `gradient` and `parameter` (changed between backward and the optimizer), `update` (the
optimizer's state), `rate`, `loss`.
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
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import gradtrace_recorder
from support.models.wrong_derivative import Scale

SIZE, STEPS, FAULT_STEP = 6, 3, 1


class Act(nn.Module):
    """An activation whose derivative, or output, can be made wrong."""

    factor = gain = 1.0

    def forward(self, x: torch.Tensor) -> Any:
        return Scale.apply(x.tanh() * self.gain, self.factor)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(SIZE, SIZE), Act(), nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE))


def trained(kind: str, fault: str, directory: Path) -> None:
    """Train three steps, recorded."""
    torch.manual_seed(0)
    model = layers()
    teacher = layers()
    called: Any = DistributedDataParallel(model) if kind == "ddp" else model
    schedule = None
    if kind == "stages":
        stage = PipelineStage(model, dist.get_rank(), 2, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    mine = [list(model.parameters())]
    if kind == "two_optimizers":
        mine = [mine[0][:2], mine[0][2:]]
    optimizers = [torch.optim.AdamW(some, lr=1e-2) for some in mine]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=kind == "scaler")
    draw = torch.Generator().manual_seed(1 + (dist.get_rank() if kind == "ddp" else 0))
    gradtrace_recorder.start(str(directory), strict=True)
    for step in range(STEPS):
        hits = step == FAULT_STEP
        act = model[1]
        act.factor = 1.5 if hits and fault == "derivative" else 1.0
        act.gain = 1.5 if hits and fault == "output" else 1.0
        x = torch.randn(4, SIZE, generator=draw)
        for optimizer in optimizers:
            optimizer.zero_grad()
            if hits and fault == "rate":
                optimizer.param_groups[0]["lr"] = 2e-2
        if schedule is not None:
            schedule.step(x) if dist.get_rank() == 0 else schedule.step(target=x)
        else:
            with torch.no_grad():
                target = teacher(x) if kind == "teacher" else x
            loss = nn.functional.mse_loss(called(x), target)
            scaler.scale(loss * 1.25 if hits and fault == "loss" else loss).backward()
        if hits and fault == "gradient":
            model[0].weight.grad.mul_(1.5)
        if hits and fault == "update":
            optimizers[-1].state[model[3].weight]["exp_avg"].mul_(9)
        if hits and fault == "parameter":
            model[3].weight.data.mul_(1.5)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    gradtrace_recorder.stop()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("jobs", nargs="+")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    jobs = [job.partition("=")[::2] for job in asked.jobs]
    on_ranks = any(kind.startswith(("ddp", "stages")) for _, kind in jobs)
    if on_ranks:
        dist.init_process_group("gloo")
    for name, kind in jobs:
        trained(*kind.partition(":")[::2], asked.out / name)
        if on_ranks:
            dist.barrier()
    if on_ranks:
        dist.destroy_process_group()
        time.sleep(0.1)


main()
