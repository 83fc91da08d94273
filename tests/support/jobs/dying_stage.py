"""A pipeline of two stages, in which rank 0 dies between what its backward has received and that backward."""

import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


class Dying(PipelineStage):
    def backward_one_chunk(self, microbatch, *args, **kwargs):
        if self.is_first and microbatch == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().backward_one_chunk(microbatch, *args, **kwargs)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
schedule = Schedule1F1B(
    Dying(nn.Linear(4, 4), rank, 2, torch.device("cpu")), 2, nn.functional.mse_loss
)
if rank == 0:
    schedule.step(torch.ones(4, 4))
else:
    schedule.step(target=torch.ones(4, 4))
