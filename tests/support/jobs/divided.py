"""Trains on two ranks, once for each case on the command line: mode, family, place, kind, first faulty step, steps,
seed and directory, between bars.

Modes: `ddp`, `fsdp` (FSDP2), `pipeline` (two stages of the GPT, GPipe, four microbatches). The global batch is that
of one process.
"""

import copy
import sys
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import gradtrace_recorder
from support.accuracy.families import BATCH, FAMILIES
from support.accuracy.faults import make_faulty
from support.accuracy.training import updates_of


class Stage(nn.Module):
    """A slice of the GPT, whose modules keep the names that they have in the whole."""

    def __init__(self, whole, index):
        super().__init__()
        first = index == 0
        self.is_first = first
        if first:
            self.embed, self.position = whole.embed, whole.position
        mine = range(2) if first else range(2, 3)
        self.blocks = nn.ModuleDict({str(n): whole.blocks[n] for n in mine})
        if not first:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x):
        if self.is_first:
            x = self.embed(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks.values():
            x = block(x)
        return x if self.is_first else self.head(self.norm(x))


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in sys.argv[1:]:
        mode, family, place, kind, first, steps, seed, directory = case.split("|")
        torch.manual_seed(int(seed))
        model = FAMILIES[family].build()
        faulty = make_faulty(model, place, kind or None, int(first))
        trained(mode, FAMILIES[family], model, faulty, int(steps), int(seed), directory)
        dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.1)


def trained(mode, family, model, place, steps, seed, directory):
    rank, world = dist.get_rank(), dist.get_world_size()
    schedule = None
    called = model
    if mode == "ddp":
        called = DistributedDataParallel(model)
    elif mode == "fsdp":
        for block in getattr(model, "blocks", ()):
            fully_shard(block)
        fully_shard(model)
    else:
        model = Stage(copy.copy(model), rank)
        stage = PipelineStage(model, rank, world, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 4, loss_fn=family.loss)
    updates = updates_of(model, family.optimizer)
    draw = torch.Generator().manual_seed(seed + 7)
    gradtrace_recorder.start(directory, strict=True)
    for step in range(steps):
        place.step = step
        x, target = family.batch(draw)
        updates.zero_grad()
        if schedule is not None:
            schedule.step(x) if rank == 0 else schedule.step(target=target)
        else:
            rows = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
            family.loss(called(x[rows]), target[rows]).backward()
        updates.step()
    gradtrace_recorder.stop()


main()
