"""A job that saves every fifth step and goes on from there: resuming.py FOLDER STEPS [dies=N] [forgets].

Alone, or as ranks under DDP. It `dies` in the forward of step N, the last rank of it: alone by SIGKILL, under a
launcher that starts it again by an exception, the first time. One that `forgets` does not load its optimizer's state.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
saved, steps = Path(sys.argv[1]) / "saved.pt", int(sys.argv[2])
dies = next((int(word[5:]) for word in sys.argv if word.startswith("dies=")), -1)
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
first = 0
if saved.exists():
    state = torch.load(saved)
    net.load_state_dict(state["net"])
    if "forgets" not in sys.argv:
        optimizer.load_state_dict(state["optimizer"])
    first = state["step"]
model = net
if size > 1:
    # Not the launcher's store: gloo now and then meets the addresses of the attempt before in it.
    store = f"file://{saved.resolve().with_name(f'store-{restarts}')}"
    dist.init_process_group("gloo", store, rank=rank, world_size=size)
    model = DistributedDataParallel(net)
for step in range(first, steps):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator)
    loss = (model(x) - y).square().mean()
    if step == dies and rank == size - 1 and not restarts:
        if size > 1:
            raise RuntimeError("no luck")
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 4 and rank == 0:
        part = saved.with_suffix(".writing")
        torch.save(
            {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, part
        )
        part.rename(saved)
if size > 1:
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.1)  # see support.launching.launcher.end_process_group
