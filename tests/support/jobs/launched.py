"""Trains a small model on each rank, and leaves its bits: what started the ranks is the test's.

    launched.py OUT GROUP [METHOD]

GROUP is `env`, `none`, or an address for `init_process_group`, such as tcp://127.0.0.1:1234; with METHOD this process
starts the two ranks itself, by torch.multiprocessing. BEFORE=1: a forward comes before the group. BEGIN=<path>: the
first event waits for that file.
"""

import hashlib
import os
import sys
import time

import torch
import torch.distributed as dist

RANKS = 2


def wait_for(name):
    path = os.environ.get(name)
    until = time.monotonic() + 60
    while path and not os.path.exists(path) and time.monotonic() < until:
        time.sleep(0.02)


def train(rank, size, group):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    if os.environ.get("BEFORE"):
        with torch.no_grad():
            net(torch.ones(2, 6))
    if group != "none":
        method = f"{group}://" if group == "env" else group
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size)
    wait_for("BEGIN")
    model = net if group == "none" else torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=generator)).square().sum().backward()
        optimizer.step()
    leave(sys.argv[1], rank, net)
    if group != "none":
        dist.destroy_process_group()
        time.sleep(0.1)


def leave(out, rank, net):
    os.makedirs(out, exist_ok=True)
    bits = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    with open(os.path.join(out, f"rank-{rank}"), "w") as file:
        file.write(hashlib.sha256(bits).hexdigest())


def first(environment, *names):
    return int(next(environment[name] for name in names if name in environment))


if __name__ == "__main__":
    group = sys.argv[2]
    if len(sys.argv) > 3:
        import torch.multiprocessing as mp

        mp.start_processes(train, (RANKS, group), nprocs=RANKS, start_method=sys.argv[3])
    else:
        rank = first(
            os.environ, "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "MY_RANK"
        )
        train(rank, RANKS, group)
