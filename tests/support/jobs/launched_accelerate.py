"""A small training under Accelerate; leaves each rank's bits. `launched_accelerate.py OUT [notebook PORT]`."""

import sys
import time

import torch
from accelerate import Accelerator
from launched import leave


def train(out):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    net = torch.nn.Linear(6, 2)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    generator = torch.Generator().manual_seed(accelerator.process_index)
    for _ in range(3):
        optimizer.zero_grad()
        accelerator.backward(model(torch.randn(4, 6, generator=generator)).square().sum())
        optimizer.step()
    leave(out, accelerator.process_index, net)
    accelerator.end_training()
    time.sleep(0.1)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        from accelerate import notebook_launcher

        notebook_launcher(train, (sys.argv[1],), num_processes=2, use_port=sys.argv[3])
    else:
        train(sys.argv[1])
