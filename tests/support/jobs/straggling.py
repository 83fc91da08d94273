"""Two ranks under DDP in three buckets; in the variant `bad` rank 1 loses 60 ms inside the backward of module 1."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
LOSES = sys.argv[1] == "bad" and dist.get_rank() == 1


class Drag(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if LOSES:
            time.sleep(0.06)
        return grad


class Middle(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x):
        return Drag.apply(self.fc(x)).relu()


torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(64, 64), Middle(), nn.Linear(64, 64))
net = DistributedDataParallel(layers, bucket_cap_mb=0.01)
for _ in range(4):
    loss = net(torch.randn(16, 64)).square().mean()
    dist.barrier()
    loss.backward()
dist.destroy_process_group()
time.sleep(0.1)  # see support.launching.launcher.end_process_group
