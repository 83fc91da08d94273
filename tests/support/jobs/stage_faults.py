"""Pipelines of four stages, each with one fault or none, trained one after the other and recorded each for itself.

Every run named in `--runs` is `NAME=SCHEDULE[:FAULT:STAGE:MICROBATCH]`; its recording is NAME in `--out`. It trains two
steps; the fault is in the second. `--timeout` is how long a rank waits for what it receives.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import stage as stage_module

import gradtrace_recorder

STAGES, MICROBATCHES, STEPS, FAULT_STEP, SIZE = 4, 4, 2, 1, 6

SCHEDULES: dict[str, Any] = {
    "GPipe": pipelining.ScheduleGPipe,
    "1F1B": pipelining.Schedule1F1B,
    "Interleaved1F1B": pipelining.ScheduleInterleaved1F1B,
    "LoopedBFS": pipelining.ScheduleLoopedBFS,
    "InterleavedZeroBubble": pipelining.ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": pipelining.ScheduleZBVZeroBubble,
    "DualPipeV": pipelining.ScheduleDualPipeV,
}
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


@dataclass(frozen=True)
class Fault:
    """What goes wrong, where, and whether it is its time."""

    kind: str
    stage: int
    microbatch: int

    def hits(self, stage: Stage, microbatch: int, *kinds: str) -> bool:
        """Whether one of these is to happen here and now."""
        here = (stage.stage_index, microbatch, stage.step)
        return self.kind in kinds and here == (self.stage, self.microbatch, FAULT_STEP)


class Part(nn.Module):
    """A stage's module, which uses the weight `tied` twice and a gain whose root is taken."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.first = nn.Linear(SIZE, SIZE)
        self.tied = nn.Linear(SIZE, SIZE)
        self.norm = nn.LayerNorm(SIZE)
        self.gain = nn.Parameter(torch.rand(SIZE) + 0.5)
        self.is_detached = self.is_wrong = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two linear layers, the second twice."""
        x = x * 1.0
        if x.requires_grad and self.is_detached:
            x.register_hook(torch.zeros_like)
        hidden = self.tied(self.tied(self.first(x).tanh()).tanh())
        if self.is_wrong:
            hidden = hidden * 1.001
        output: torch.Tensor = self.norm(hidden) * self.gain.abs().sqrt()
        return output


class Stage(pipelining.PipelineStage):
    """A stage that may be faulty."""

    def __init__(self, index: int, fault: Fault) -> None:
        super().__init__(Part(index), index, STAGES, torch.device("cpu"))
        self.fault = fault
        self.step = -1
        self.sent: list[Any] = []

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """May read something else than it received, or compute something else."""
        part: Any = self.submod
        if not self.is_first:
            buffer = self.args_recv_info[fwd_chunk_id][0].buffer
            if self.fault.hits(self, fwd_chunk_id, "activation-corrupted"):
                buffer.data[0, 0] += 0.01
            if self.fault.hits(self, fwd_chunk_id, "activation-stale"):
                buffer.data.copy_(self.kept)
            if self.step < FAULT_STEP and fwd_chunk_id == self.fault.microbatch:
                self.kept = buffer.detach().clone()
        part.is_detached = self.fault.hits(self, fwd_chunk_id, "input-detached")
        part.is_wrong = self.fault.hits(self, fwd_chunk_id, "forward-scaled")
        if self.fault.hits(self, fwd_chunk_id, "nan-in-weight-half"):
            part.gain.data[0] = 0.0
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """May read something else than it received."""
        if self.fault.hits(self, bwd_chunk_id, "received-gradient-scaled"):
            self.grad_recv_info[bwd_chunk_id][0].buffer.mul_(2.0)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """May give the weight half less than there is."""
        if backward_type == "weight":
            for group in bwd_kwargs["param_groups"]:
                is_tied = len(group["intermediates"]) > 1
                if is_tied and self.fault.hits(self, self.weights_of, "tied-weight-lost"):
                    # That of the second use: torch has them in no order.
                    used = [node._sequence_nr() for node in group["intermediates"]]
                    second = used.index(max(used))
                    group["intermediates"].pop(second)
                    group["grads"].pop(second)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    weights_of = -1

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """May do nothing, or do it twice, or lose what is there."""
        if self.fault.hits(self, bwd_chunk_id, "weight-half-skipped"):
            self.backward_state.pop(bwd_chunk_id)
            self.dw_runner.pop(bwd_chunk_id)
            return
        self.weights_of = bwd_chunk_id
        if self.fault.hits(self, bwd_chunk_id, "weight-half-twice"):
            self._run_weights_keeping_the_graph(bwd_chunk_id)
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        if self.fault.hits(self, bwd_chunk_id, "gradient-zeroed"):
            self.submod.zero_grad(set_to_none=False)

    def _run_weights_keeping_the_graph(self, chunk: int) -> None:
        inputs, groups, *rest = self.backward_state[chunk]
        again = [dict(group) for group in groups or ()]
        original = stage_module.stage_backward_weight
        stage_module.stage_backward_weight = functools.partial(original, retain_graph=True)
        runner = self.dw_runner[chunk]
        super().backward_weight_one_chunk(chunk)
        stage_module.stage_backward_weight = original
        self.dw_runner[chunk] = runner
        self.backward_state[chunk] = (inputs, again, *rest)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """May send nothing."""
        made = super().get_fwd_send_ops(fwd_chunk_id)
        return [] if self.fault.hits(self, fwd_chunk_id, "activation-lost") else made

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """May send something else."""
        if self.is_first or not self.has_backward:
            return super().get_bwd_send_ops(bwd_chunk_id)
        (given, *rest) = self.bwd_cache[bwd_chunk_id]
        if self.fault.hits(self, bwd_chunk_id, "sent-gradient-scaled"):
            given = given * 0.5
        if self.fault.hits(self, bwd_chunk_id, "wrong-microbatch"):
            given = self.sent[-1]
        self.bwd_cache[bwd_chunk_id] = (given, *rest)
        self.sent.append(given)
        made = super().get_bwd_send_ops(bwd_chunk_id)
        return [] if self.fault.hits(self, bwd_chunk_id, "gradient-lost") else made

    def scale_grads(self, grad_scale_factor: int) -> None:
        """May be forgotten."""
        if not self.fault.hits(self, self.fault.microbatch, "not-scaled"):
            super().scale_grads(grad_scale_factor)


def train(schedule_name: str, fault: Fault) -> None:
    """Two steps."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    second = 2 * ranks - 1 - rank if schedule_name in V_SHAPED else ranks + rank
    indices = [rank] if ranks == STAGES else [rank, second]
    stages = [Stage(index, fault) for index in indices]
    losses = 0

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal losses
        loss = (output - target).square().mean()
        if stages[-1].fault.hits(stages[-1], losses % MICROBATCHES, "loss-scaled-twice"):
            loss = loss / MICROBATCHES
        losses += 1
        return loss

    # One on each rank is of another class than several.
    schedule = SCHEDULES[schedule_name](
        stages[0] if len(stages) == 1 and schedule_name in ("GPipe", "1F1B") else stages,
        n_microbatches=MICROBATCHES,
        loss_fn=loss_of,
    )
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(STEPS):
        for stage in stages:
            stage.step = step
        optimizer.zero_grad()
        torch.manual_seed(100 + step)
        batch = torch.randn(2 * MICROBATCHES, SIZE)
        target = torch.randn(2 * MICROBATCHES, SIZE)
        given = (batch,) if 0 in indices else ()
        more = {"target": target} if STAGES - 1 in indices else {}
        schedule.step(*given, **more)
        losses = 0
        optimizer.step()


def main() -> None:
    """Each run in turn."""
    options = argparse.ArgumentParser()
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--runs", nargs="+", required=True)
    options.add_argument("--timeout", type=float, default=60)
    chosen = options.parse_args()
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=chosen.timeout))
    for run in chosen.runs:
        name, _, what = run.partition("=")
        schedule, *fault = what.split(":")
        kind, stage, microbatch = fault or ("none", "-1", "-1")
        # As a job of its own would be: with nothing of the one before it.
        gradtrace_recorder.start(str(chosen.out / name), strict=True)
        train(schedule, Fault(kind, int(stage), int(microbatch)))
        gradtrace_recorder.stop()
    dist.destroy_process_group()
    time.sleep(0.1)  # torch 2.13 with gloo aborts now and then at exit without it


if __name__ == "__main__":
    main()
