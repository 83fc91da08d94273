"""Trains a few steps, and on one rank comes to grief at one place of one step, or stays there.

    dying.py HOW WHERE STEP RANK

HOW: kill, term, exit, leave (sys.exit), segv, raise, hang, recv (a receive that nobody sends). WHERE: node (in a
Node's backward), forward (in a module's forward), code (between backward and the optimizer's step).
"""

import ctypes
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

HOW, WHERE, STEP, RANK = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
rank = int(os.environ.get("RANK", 0))
is_replicated = int(os.environ.get("WORLD_SIZE", 1)) > 1 and "ALONE" not in os.environ
torch.set_num_threads(1)
step = 0


def grief(where):
    if (where, step, rank) != (WHERE, STEP, RANK) or int(
        os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    ):
        return
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if HOW == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    if HOW == "exit":
        os._exit(7)
    if HOW == "leave":
        sys.exit(3)
    if HOW == "segv":
        ctypes.string_at(0)
    if HOW == "raise":
        raise ValueError("no luck")
    if HOW == "recv":
        dist.recv(torch.zeros(3), src=1 - rank)
    time.sleep(600)


class Wound(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        grief("node")
        return g


class Hurt(torch.nn.Module):
    def forward(self, x):
        grief("forward")
        return Wound.apply(x)


torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 4), Hurt(), torch.nn.Linear(4, 2))
if is_replicated:
    dist.init_process_group("gloo")
    net = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(STEP + 1000 if HOW == "never" else STEP + 2):
    optimizer.zero_grad()
    net(torch.randn(3, 4)).sum().backward()
    grief("code")
    optimizer.step()
    if step == 1 and rank == 0:
        print("running", flush=True)
if is_replicated:
    dist.destroy_process_group()
    time.sleep(0.1)
