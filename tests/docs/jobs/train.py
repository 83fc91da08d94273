"""The job of the documentation's commands: a small model, alone or data-parallel, a few steps on the CPU."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn

STEPS = 8


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, factor):
        x = x + self.attn(x).tanh()
        return x + Scaled.apply(self.mlp(x), factor).relu()


class Model(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.name = blocks
        self.add_module(blocks, nn.ModuleList([Block(), Block()]))
        self.head = nn.Linear(16, 4)

    def forward(self, x, factor):
        for number, block in enumerate(getattr(self, self.name)):
            x = block(x, factor if number == 1 else 1.0)
        return self.head(x)


def main(factor=1.0, blocks="blocks"):
    """`factor` is that of the gradient that leaves blocks.1.mlp on the last rank, in step 3."""
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(0)
    model = Model(blocks)
    if ranks > 1:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    data = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        x = torch.randn(8, 16, generator=data)
        wrong = step == 3 and rank == ranks - 1
        loss = model(x, factor if wrong else 1.0).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if ranks > 1:
        dist.destroy_process_group()
        time.sleep(0.1)  # torch 2.13 with gloo aborts now and then at exit without it


if __name__ == "__main__":
    main()
