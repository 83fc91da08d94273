"""A data-parallel job in which one thing goes wrong at a chosen step and rank; --fault none is the same job, whole.

What a fault needs (a hook, a second microbatch, a cache of weights) is there from the first step on, so that without
its step the job is a good one: `--fault-step 99`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

SMALL_BUCKETS = {"bucket_cap_mb": 0.0004}
Hook = Callable[["Fault", Any], Any]


class Fault:
    """The fault, where it acts, and what its hook keeps."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.kind: str = arguments.fault
        self.at: int = arguments.fault_step
        self.rank: int = arguments.fault_rank
        self.step = -1
        self.me, self.size = dist.get_rank(), dist.get_world_size()
        self.kept: dict[int, Tensor] = {}
        self.pair = dist.new_group([0, 1])
        pids = [os.getpid()]
        dist.broadcast_object_list(pids)
        self.first_pid = pids[0]

    def is_now(self, kind: str) -> bool:
        """Whether this kind acts in this step, on whatever rank."""
        return self.kind == kind and self.step == self.at

    def is_mine(self, kind: str) -> bool:
        """Whether this kind acts in this step on this rank."""
        return self.is_now(kind) and self.me == self.rank


def summed(buffer: Tensor, group: Any = None) -> Any:
    """The future of the sum over the ranks."""
    work = dist.all_reduce(buffer, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def changed(future: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return future.then(lambda done: change(done.value()))


# The hooks. DDP refuses annotations that are texts, so they have none.


def dividing_hook(fault, bucket):  # type: ignore[no-untyped-def]
    if fault.is_now("sum") or fault.kind == "other-hook":
        return summed(bucket.buffer())
    if fault.is_now("divided-twice"):
        return summed(bucket.buffer().div_(fault.size**2))
    return summed(bucket.buffer().div_(fault.size))


def weighing_hook(fault, bucket):  # type: ignore[no-untyped-def]
    """Changes what a rank contributes."""
    buffer = bucket.buffer().div_(fault.size)
    if bucket.index() == 1:
        for kind, factor in (("scaled", 3.0), ("missing", 0.0), ("twice", 2.0)):
            if fault.is_mine(kind):
                buffer.mul_(factor)
        if fault.is_mine("nan-in-hook"):
            buffer[2] = float("nan")
    return summed(buffer)


def returning_hook(fault, bucket):  # type: ignore[no-untyped-def]
    """Changes what a rank gets."""
    own = bucket.buffer().clone()
    future = summed(bucket.buffer().div_(fault.size))
    if fault.is_mine("element"):

        def one_more(reduced: Tensor) -> Tensor:
            reduced[3] += 0.01
            return reduced

        return changed(future, one_more)
    if fault.is_mine("last-bit"):

        def next_number(reduced: Tensor) -> Tensor:
            reduced[3] = torch.nextafter(reduced[3], torch.tensor(9.0))
            return reduced

        return changed(future, next_number)
    if fault.is_mine("unreduced"):
        return changed(future, lambda _: own)
    if fault.is_mine("undivided"):
        return changed(future, lambda reduced: reduced * fault.size)
    return future


def stale_hook(fault, bucket):  # type: ignore[no-untyped-def]
    """Hands out what it kept from the step before."""

    def keep(reduced: Tensor) -> Tensor:
        before = fault.kept.get(bucket_index)
        fault.kept[bucket_index] = reduced.clone()
        return before if fault.is_now("stale-bucket") and before is not None else reduced

    bucket_index = bucket.index()
    return changed(summed(bucket.buffer().div_(fault.size)), keep)


def subgroup_hook(fault, bucket):  # type: ignore[no-untyped-def]
    """Reduces over ranks 0 and 1 alone, where it should over all."""
    if not fault.is_now("wrong-group"):
        return summed(bucket.buffer().div_(fault.size))
    if fault.me < 2:
        return summed(bucket.buffer().div_(2), fault.pair)
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def silent_hook(fault, bucket):  # type: ignore[no-untyped-def]
    """Leaves out a collective: from then on the ranks' collectives are one apart."""
    if fault.is_mine("left-out"):
        fault.kept[-1] = torch.zeros_like(bucket.buffer())
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer().div_(fault.size))
        return future
    return summed(bucket.buffer().div_(fault.size))


HOOKS: dict[str, Hook] = {
    **dict.fromkeys(("sum", "divided-twice"), dividing_hook),
    **dict.fromkeys(("scaled", "missing", "twice", "nan-in-hook"), weighing_hook),
    **dict.fromkeys(("element", "last-bit", "unreduced", "undivided"), returning_hook),
    "stale-bucket": stale_hook,
    "wrong-group": subgroup_hook,
    "left-out": silent_hook,
}


class Cached(torch.autograd.Function):
    """A copy of a weight stands for it, as with weights that are quantized once per step."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor) -> Tensor:
        return copy.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class CachingLinear(nn.Linear):
    """Uses a copy of its weight that somebody has to refresh."""

    copy: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, Cached.apply(self.weight, self.copy))


class Net(nn.Module):
    """Three layers, the middle one with a branch of its own."""

    def __init__(self, layer: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.body = layer(6, 11)
        self.middle = layer(11, 9)
        self.side = layer(11, 9)
        self.head = layer(9, 3)
        self.uses_side = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).tanh()
        middle = self.middle(hidden)
        if self.uses_side:
            middle = middle + self.side(hidden)
        out: Tensor = self.head(middle.tanh())
        return out


def poison(fault: Fault, output: Tensor) -> None:
    """Makes the gradient of the Node that gave this output NaN in one place."""

    def left(grad_inputs: Any, grad_outputs: Any) -> Any:
        clones = [None if g is None else g.clone() for g in grad_inputs]
        next(g for g in clones if g is not None).view(-1)[0] = float("nan")
        return tuple(clones)

    if fault.is_mine("nan-in-node") and output.grad_fn is not None:
        print(f"NODE {output.grad_fn.name()}", flush=True)
        output.grad_fn.register_hook(left)


def register(fault: Fault, wrapped: DistributedDataParallel) -> None:
    """The hook that the fault needs, if any."""
    if fault.kind in HOOKS:
        wrapped.register_comm_hook(fault, HOOKS[fault.kind])
    elif fault.kind == "other-hook" and fault.me == fault.rank and fault.at == 0:
        wrapped.register_comm_hook(fault, dividing_hook)
    elif fault.kind == "other-hook":
        wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    elif fault.kind == "overflow":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)


def train(arguments: argparse.Namespace, fault: Fault) -> None:
    torch.manual_seed(0)
    caches = fault.kind == "stale-forward"
    model = Net(lambda *size: CachingLinear(*size, bias=False) if caches else nn.Linear(*size))
    model.middle.register_forward_hook(lambda module, args, output: poison(fault, output))
    one_bucket = fault.kind in ("left-out", "pass-left-out")
    options = {} if one_bucket else SMALL_BUCKETS
    wrapped = DistributedDataParallel(model, broadcast_buffers=False, **options)
    register(fault, wrapped)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(100 if fault.kind == "same-data" else 100 + fault.me)
    fixed = torch.randn(5, 6, generator=draw)
    if fault.kind == "same-data" and fault.at > 9:
        draw.manual_seed(100 + fault.me)
    parts = 2 if fault.kind in ("no-sync", "bypassed") else 1

    for fault.step in range(arguments.steps):
        if fault.is_mine("exit"):
            os._exit(0)
        if fault.is_mine("hang"):
            time.sleep(2)  # the other waits in its first bucket by now, and somebody loses patience
            os.kill(fault.first_pid, signal.SIGKILL)
            os._exit(0)
        with torch.no_grad():
            if fault.is_mine("parameter"):
                model.middle.weight.view(-1)[0] += 1e-3
            for layer in (model.body, model.middle, model.side, model.head) if caches else ():
                if not fault.is_mine("stale-forward"):
                    layer.copy = layer.weight.detach().clone()
        model.uses_side = not fault.is_now("unused")
        optimizer.zero_grad()
        for part in range(parts):
            batch = fixed if caches else torch.randn(5, 6, generator=draw)
            silent_part = 1 if fault.is_now("no-sync") else 0
            is_silent = fault.kind == "no-sync" and part == silent_part
            called = model if fault.is_now("bypassed") and part == 1 else wrapped
            with wrapped.no_sync() if is_silent else contextlib.nullcontext():
                out = called(batch)
                loss = out.square().mean() * (1e6 if fault.is_now("overflow") else 1.0)
                if not fault.is_mine("pass-left-out"):
                    loss.backward()
        if fault.is_mine("gradient"):
            model.middle.weight.grad.view(-1)[0] += 0.01
        optimizer.step()
    if -1 in fault.kept:
        summed(fault.kept[-1]).wait()  # what it left out, so that the others can end


def main() -> None:
    """One rank of the job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", default="none")
    parser.add_argument("--fault-step", type=int, default=2)
    parser.add_argument("--fault-rank", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hasty = arguments.fault in ("pass-left-out", "exit")
    seconds = 3 if hasty else 20
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))
    try:
        train(arguments, Fault(arguments))
        dist.barrier()
    except RuntimeError as error:
        if not hasty:
            raise
        print("GAVE UP", str(error).splitlines()[0], flush=True)
        os._exit(0)
    if hasty and arguments.fault_step < 9:
        os._exit(0)
    dist.destroy_process_group()
    time.sleep(0.1)  # torch 2.13: a gloo thread that lets go of its last work at exit aborts


if __name__ == "__main__":
    main()
