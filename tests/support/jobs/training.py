"""A training job with one fault at a time, switched on by an argument: what the tests record.

Hooks that a fault needs are registered in every run, idle, so that the good and the bad run have one structure.
With --out each rank saves losses, gradients, parameters and optimizer state, to be compared bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import MODELS, batch_for
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

FAULTS = (
    "none",
    "parameter",
    "buffer",
    "input",
    "forward",
    "derivative",
    "nan",
    "gradient-zeroed",
    "gradient-hook",
    "learning-rate",
    "dropout",
    "seed",
    "functional",
    "loss",
    "label",
)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--fault-step", type=int, default=1)
    parser.add_argument("--fault-rank", type=int, default=0)
    parser.add_argument("--fault-target", default="")
    parser.add_argument("--ddp", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--scaler", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


class Fault:
    """The fault, and whether it is on now."""

    def __init__(self, arguments: argparse.Namespace, rank: int, model: nn.Module) -> None:
        self.kind: str = arguments.fault
        self.target: str = arguments.fault_target
        self.place = (arguments.fault_step, arguments.fault_rank)
        self.rank = rank
        self.step = -1
        for name, module in model.named_modules():
            if name == self.target and name:
                module.register_forward_pre_hook(self._before)
                module.register_forward_hook(self._after)
        for name, parameter in model.named_parameters():
            if name == self.target:
                parameter.register_hook(self._gradient)

    def on(self, kind: str) -> bool:
        """Whether this kind of fault acts in this step on this rank."""
        return self.kind == kind and (self.step, self.rank) == self.place

    def _before(self, module: nn.Module, args: Any) -> None:
        if self.on("dropout"):
            torch.rand(1)

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        tensor = output[0] if isinstance(output, tuple) else output
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_hook(self._left)
            if self.on("derivative") or self.on("nan"):
                print(f"NODE {tensor.grad_fn.name()}", flush=True)
        if self.on("forward"):
            return output * 1.001
        return None

    def _left(self, grad_inputs: Any, grad_outputs: Any) -> Any:
        if self.on("derivative"):
            return tuple(None if g is None else g * 1.01 for g in grad_inputs)
        if self.on("nan"):
            changed = [None if g is None else g.clone() for g in grad_inputs]
            first = next(g for g in changed if g is not None)
            first.view(-1)[0] = float("nan")
            return tuple(changed)
        return None

    def _gradient(self, gradient: Tensor) -> Tensor | None:
        return gradient * 1.01 if self.on("gradient-hook") else None


def train(arguments: argparse.Namespace, rank: int, world: int) -> dict[str, Any]:
    """Trains, and returns all that must not be changed by recording."""
    torch.manual_seed(0)
    model = MODELS[arguments.model](arguments.dropout)
    fault = Fault(arguments, rank, model)
    wrapped = DistributedDataParallel(model) if world > 1 and arguments.ddp else model
    named = list(model.named_parameters())
    half = len(named) // 2
    groups = [{"params": [p for _, p in part], "lr": 1e-2} for part in (named[:half], named[half:])]
    kind: Any = torch.optim.AdamW if arguments.optimizer == "adamw" else torch.optim.SGD
    optimizer = kind(groups)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40) if arguments.scaler else None
    draw = torch.Generator().manual_seed(100 + rank)
    torch.manual_seed(200 + rank)
    saved: dict[str, Any] = {"losses": [], "gradients": []}

    for step in range(arguments.steps):
        fault.step = step
        with torch.no_grad():
            _change(fault, model, optimizer)
        optimizer.zero_grad()
        for part in range(arguments.accumulate):
            inputs, labels = batch_for(arguments.model, draw)
            if fault.on("input") and part == 0:
                inputs.view(-1)[0] += 1
            if fault.on("label") and part == 0:
                labels[0] = (labels[0] + 1) % 10
            last = part == arguments.accumulate - 1
            no_sync = not last and isinstance(wrapped, DistributedDataParallel)
            with wrapped.no_sync() if no_sync else contextlib.nullcontext():
                loss = F.cross_entropy(wrapped(inputs), labels)
                if fault.on("loss"):
                    loss = loss * 1.001
                else:
                    loss = loss * 1.0
                (scaler.scale(loss) if scaler else loss).backward()
            saved["losses"].append(loss.detach().clone())
        if fault.on("gradient-zeroed"):
            dict(named)[fault.target].grad.zero_()
        saved["gradients"].append({n: p.grad.clone() for n, p in named if p.grad is not None})
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    saved["model"] = model.state_dict()
    saved["optimizer"] = optimizer.state_dict()
    saved["rng"] = torch.get_rng_state()
    return saved


def _change(fault: Fault, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """The faults that act before a step's forward."""
    model.gain = 1.001 if fault.on("functional") else 1.0
    if fault.on("parameter"):
        dict(model.named_parameters())[fault.target].view(-1)[0] += 1e-3
    if fault.on("buffer"):
        dict(model.named_buffers())[fault.target].view(-1)[0] += 1e-3
    if fault.kind == "learning-rate" and fault.step == fault.place[0]:
        optimizer.param_groups[1]["lr"] = 2e-2
    if fault.on("seed"):
        torch.manual_seed(4711)


def main() -> None:
    """One rank of the job, or all of it."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if world > 1 else 0
    saved = train(arguments, rank, world)
    if arguments.out:
        torch.save(saved, arguments.out / f"rank{rank}.pt")
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
        time.sleep(
            0.1
        )  # torch 2.13: a gloo thread that lets go of its last work during Python's end aborts


if __name__ == "__main__":
    main()
