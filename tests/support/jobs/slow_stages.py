"""Four stages on four ranks, which train with a schedule that splits every backward, once for each variant.

Variants: `even` (nothing is slow), `weight` (what only stage 1's weight half runs), `forward` (a module of stage 2),
`receive` (activations reach stage 2 late). Each is recorded into a directory of its name, but for step 4. In `killed`,
which is the last, the rank of stage 2 is killed in the weight half of microbatch 3 of step 1.
"""

import os
import signal
import sys
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d, pipelining
from torch.nn import functional

import gradtrace_recorder

MICROBATCHES, WIDTH, SLOW = 8, 32, 0.02
variant, weight_halves = "", []


class Scaled(torch.autograd.Function):
    """A weight as it is, for a backward that takes its time: nothing but the weight half runs it."""

    @staticmethod
    def forward(ctx, weight):
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient):
        if variant == "weight" and dist.get_rank() == 1:
            time.sleep(SLOW)
        if variant == "killed" and dist.get_rank() == 2:
            weight_halves.append(None)
            if len(weight_halves) == MICROBATCHES + 4:
                os.kill(os.getpid(), signal.SIGKILL)
        return gradient


class Layer(nn.Linear):
    def forward(self, x):
        if variant == "forward" and dist.get_rank() == 2:
            time.sleep(SLOW)
        return functional.linear(x, Scaled.apply(self.weight), self.bias)


class Late:
    """A receive that takes longer than its data."""

    def __init__(self, work):
        self.work = work

    def wait(self):
        done = self.work.wait()
        time.sleep(SLOW)
        return done


def irecv(*args, run=dist.irecv, **kwargs):
    """What torch receives with, on a bad link from stage 1 to stage 2."""
    work = run(*args, **kwargs)
    is_slow = variant == "receive" and dist.get_rank() == 2 and kwargs.get("group_src") == 1
    return Late(work) if is_slow else work


def train(steps):
    """That many steps of a new model."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Layer(WIDTH, WIDTH))
    stage = pipelining.PipelineStage(part, rank, ranks, torch.device("cpu"))
    schedule = pipelining.ScheduleInterleavedZeroBubble(
        [stage], n_microbatches=MICROBATCHES, loss_fn=functional.mse_loss
    )
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    batch, target = torch.randn(2, 4 * MICROBATCHES, WIDTH)
    given = {"target": target} if rank == ranks - 1 else {}
    for _ in range(steps):
        optimizer.zero_grad()
        schedule.step(*(() if rank else (batch,)), **given)
        optimizer.step()


warnings.simplefilter("ignore")
torch.set_num_threads(1)
dist.irecv = distributed_c10d.irecv = irecv
dist.init_process_group("gloo")
out, count, *variants = sys.argv[1:]
for variant in variants:
    gradtrace_recorder.start(f"{out}/{variant}", strict=True, steps="0:4,5:")
    train(int(count))
    gradtrace_recorder.stop()
dist.destroy_process_group()
time.sleep(0.1)  # see support.launching.launcher.end_process_group
