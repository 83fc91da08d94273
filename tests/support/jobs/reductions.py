"""Every way in which DDP reduces, one after the other in one job; what each leaves is saved, to be compared.

Each way trains a small model of several buckets for a few steps. `--only` chooses ways by name.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    register_ddp_comm_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

STEPS = 4
SMALL_BUCKETS = {"bucket_cap_mb": 0.0004}
Way = Callable[[int, int], Any]
WAYS: dict[str, Way] = {}


def way(function: Way) -> Way:
    """Registers a way under its name."""
    WAYS[function.__name__] = function
    return function


def deep(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Three layers of different sizes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 9), nn.Tanh(), nn.Linear(9, 3))
    return net.to(dtype)


def data(rank: int, count: int, width: int = 6) -> Iterator[Tensor]:
    """Batches that differ by rank."""
    draw = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        yield torch.randn(5, width, generator=draw)


def trained(
    net: DistributedDataParallel | nn.Module,
    rank: int,
    *,
    steps: int = STEPS,
    set_to_none: bool = True,
    accumulate: int = 1,
    dtype: torch.dtype = torch.float32,
    before_step: Callable[[int], None] | None = None,
) -> list[Tensor]:
    """The gradients after each step and the parameters at the end."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batches = data(rank, steps * accumulate)
    kept = []
    for step in range(steps):
        if before_step is not None:
            before_step(step)
        optimizer.zero_grad(set_to_none=set_to_none)
        for part in range(accumulate):
            last = part == accumulate - 1
            silent = contextlib.nullcontext() if last else net.no_sync()  # type: ignore[union-attr, operator]
            with silent:
                net(next(batches).to(dtype)).square().mean().backward()
        kept += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        optimizer.step()
    return [*kept, *(p.detach().clone() for p in net.parameters())]


def plainly(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """Registers a way without a hook: options of `trained` and of DDP."""
    training = {k: options.pop(k) for k in ("set_to_none", "accumulate") if k in options}

    def run(rank: int, world: int) -> Any:
        net = DistributedDataParallel(deep(dtype), **SMALL_BUCKETS, **options)
        return trained(net, rank, dtype=dtype, **training)

    WAYS[name] = run


for _dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
    for _view in (False, True):
        _name = f"{str(_dtype).removeprefix('torch.')}{'_view' if _view else ''}"
        plainly(_name, _dtype, gradient_as_bucket_view=_view)
plainly("kept_gradients", set_to_none=False)
plainly("kept_gradients_view", set_to_none=False, gradient_as_bucket_view=True)
plainly("kept_gradients_view_half", torch.float16, set_to_none=False, gradient_as_bucket_view=True)
plainly("accumulated", accumulate=3)
plainly("accumulated_view", accumulate=3, gradient_as_bucket_view=True)
plainly("static", static_graph=True)
plainly("static_view", static_graph=True, gradient_as_bucket_view=True)


class Branching(nn.Module):
    """One of two branches is used, by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 7)
        self.left, self.right = nn.Linear(7, 3), nn.Linear(7, 3)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        """The left branch every second time."""
        self.count += 1
        hidden = self.trunk(x).tanh()
        result: Tensor = (self.left if self.count % 2 else self.right)(hidden)
        return result


def _unused(name: str, **options: Any) -> None:
    training = {k: options.pop(k) for k in ("set_to_none", "accumulate") if k in options}

    def run(rank: int, world: int) -> Any:
        torch.manual_seed(0)
        net = DistributedDataParallel(
            Branching(), find_unused_parameters=True, **SMALL_BUCKETS, **options
        )
        return trained(net, rank, **training)

    WAYS[name] = run


_unused("unused")
_unused("unused_view", gradient_as_bucket_view=True)
_unused("unused_kept_view", gradient_as_bucket_view=True, set_to_none=False)


@way
def mixed_precision(rank: int, world: int) -> Any:
    policy = _MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
    )
    # Torch 2.13 needs a device's events for it: on a CPU what it says is all there is to compare.
    return trained(DistributedDataParallel(deep(), mixed_precision=policy), rank)


@way
def sparse(rank: int, world: int) -> Any:
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.EmbeddingBag(20, 4, sparse=True, mode="sum"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(rank)
    kept = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        net(torch.randint(20, (6, 3), generator=draw)).square().mean().backward()
        kept += [p.grad.to_dense().clone() for p in net.parameters()]
        optimizer.step()
    return [*kept, *(p.detach().clone() for p in net.parameters())]


@way
def sparse_shares_its_gradient(rank: int, world: int) -> Any:
    """A sparse gradient whose values are the very tensor that goes on to a dense layer."""
    torch.manual_seed(0)

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 6, sparse=True)
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            rows = self.table((x[:, 0].abs() * 5).long() % 20)
            result: Tensor = self.first(x) + rows + self.second(x)
            return result

    net = DistributedDataParallel(Sum(), **SMALL_BUCKETS)
    for batch in data(rank, 2):
        net.zero_grad()
        net(batch).square().mean().backward()
    return [p.grad.to_dense().clone() for p in net.parameters()]


@way
def incomplete_view(rank: int, world: int) -> Any:
    """A parameter without a gradient: no bucket is launched, and what lies in the views is seen."""
    torch.manual_seed(0)
    net = DistributedDataParallel(Branching(), gradient_as_bucket_view=True)
    net(torch.ones(2, 6) * (rank + 1)).sum().backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


@way
def hooks_that_look(rank: int, world: int) -> Any:
    """What the job's own hooks see in .grad while the pass runs."""
    seen = []
    for view in (False, True):
        net = DistributedDataParallel(deep(), gradient_as_bucket_view=view)
        parameters = list(net.parameters())

        def look(_: Tensor, of: list[nn.Parameter] = parameters) -> None:
            seen.extend(p.grad.clone() for p in of if p.grad is not None)

        for parameter in parameters:
            parameter.register_hook(look)
        for batch in data(rank, 3):
            net(batch).square().mean().backward()
    return seen


@way
def create_graph(rank: int, world: int) -> Any:
    net = DistributedDataParallel(deep(), **SMALL_BUCKETS)
    kept = []
    for batch in data(rank, 2):
        net.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            net(batch).square().mean().backward(create_graph=True)
        kept += [p.grad.detach().clone() for p in net.parameters()]
    return kept


@way
def several_models(rank: int, world: int) -> Any:
    first = DistributedDataParallel(deep(), **SMALL_BUCKETS)
    second = DistributedDataParallel(deep(), gradient_as_bucket_view=True)
    for batch in data(rank, 2):
        (first(batch).square().mean() + second(batch).sum()).backward()
    return [p.grad.clone() for net in (first, second) for p in net.parameters()]


@way
def same_bucket_twice(rank: int, world: int) -> Any:
    """Two synchronised passes without zeroing between them."""
    net = DistributedDataParallel(deep(), gradient_as_bucket_view=True, **SMALL_BUCKETS)
    for batch in data(rank, 3):
        net(batch).square().mean().backward()
    return [p.grad.clone() for p in net.parameters()]


def _joined(name: str, by_initial: bool) -> None:
    def run(rank: int, world: int) -> Any:
        net = DistributedDataParallel(deep(), **SMALL_BUCKETS)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with net.join(divide_by_initial_world_size=by_initial):
            for batch in data(rank, 2 + rank):
                optimizer.zero_grad()
                net(batch).square().mean().backward()
                optimizer.step()
        return [p.detach().clone() for p in net.parameters()]

    WAYS[name] = run


_joined("join", True)
_joined("join_live_count", False)


@way
def delayed(rank: int, world: int) -> Any:
    net = deep()
    late = [(n, p) for n, p in net.named_parameters() if n.startswith("4.")]
    wrapped = DistributedDataParallel(
        net,
        delay_all_reduce_named_params=late,
        param_to_hook_all_reduce=dict(net.named_parameters())["0.weight"],
    )
    kept = []
    for batch in data(rank, 2):
        wrapped(batch).square().mean().backward()
        dist.barrier()
        kept += [p.grad.clone() for p in net.parameters()]
    return kept


def _hooked(
    name: str, register: Callable[[Any], None], late: bool = False, one_bucket: bool = False
) -> None:
    def run(rank: int, world: int) -> Any:
        torch.manual_seed(0)
        net = DistributedDataParallel(deep(), **({} if one_bucket else SMALL_BUCKETS))
        if late:  # when a pass has been made already
            net(torch.ones(2, 6)).sum().backward()
        register(net)
        return trained(net, rank)

    WAYS[name] = run


for _kind in DDPCommHookType:
    if _kind is not DDPCommHookType.BF16_COMPRESS:  # which DDP refuses without CUDA
        _hooked(
            f"hook_{_kind.name.lower()}",
            lambda net, kind=_kind: register_ddp_comm_hook(kind, net, net.process_group),  # type: ignore[misc]
        )
for _builtin in ("ALLREDUCE", "FP16_COMPRESS"):
    for _late in (False, True):
        _hooked(
            f"builtin_{_builtin.lower()}{'_late' if _late else ''}",
            lambda net, b=_builtin: net._register_builtin_comm_hook(  # type: ignore[misc]
                getattr(dist.BuiltinCommHookType, b)
            ),
            _late,
        )
_hooked(
    "hook_fp16_compress_wrapper",
    lambda net: net.register_comm_hook(
        None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    ),
)
_hooked(
    "hook_power_sgd_started",
    lambda net: net.register_comm_hook(
        powerSGD_hook.PowerSGDState(
            net.process_group, start_powerSGD_iter=2, min_compression_rate=0.5
        ),
        powerSGD_hook.powerSGD_hook,
    ),
    one_bucket=True,  # its callbacks wait for collectives, and gloo has two threads
)
_hooked(
    "hook_post_local_sgd",
    lambda net: net.register_comm_hook(
        post_localSGD_hook.PostLocalSGDState(
            net.process_group, dist.new_subgroups(1)[0], start_localSGD_iter=2
        ),
        post_localSGD_hook.post_localSGD_hook,
    ),
)


def mean_by_future(state, bucket):  # type: ignore[no-untyped-def]  # DDP would refuse annotations that are texts
    """A hook that waits by itself and returns a plain future."""
    buffer = bucket.buffer()
    dist.all_reduce(buffer)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer / dist.get_world_size())
    return future


_hooked("hook_plain_future", lambda net: net.register_comm_hook(None, mean_by_future))
_hooked("hook_late", lambda net: net.register_comm_hook(None, mean_by_future), True)
_hooked(
    "hook_bf16_inside",
    lambda net: net.register_comm_hook(
        None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)
    ),
)


@way
def noop_then_by_hand(rank: int, world: int) -> Any:
    net = DistributedDataParallel(deep(), **SMALL_BUCKETS)
    register_ddp_comm_hook(DDPCommHookType.NOOP, net)
    reference = DistributedDataParallel(copy.deepcopy(net.module), **SMALL_BUCKETS)
    for batch in data(rank, 2):
        net(batch).square().mean().backward()
        reference(batch).square().mean().backward()
    for p in net.parameters():
        p.grad.div_(world)
        dist.all_reduce(p.grad)
    pairs = zip(net.parameters(), reference.parameters(), strict=True)
    close = [torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-6) for p, q in pairs]
    return [torch.tensor(close), *(p.grad.clone() for p in net.parameters())]


@way
def overlapped_optimizer(rank: int, world: int) -> Any:
    from torch.distributed.optim import _apply_optimizer_in_backward

    net = deep()
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    wrapped = DistributedDataParallel(net, **SMALL_BUCKETS)
    for batch in data(rank, 3):
        wrapped(batch).square().mean().backward()
    return [p.detach().clone() for p in net.parameters()]


@way
def fused_optimizer(rank: int, world: int) -> Any:
    net = DistributedDataParallel(deep(), **SMALL_BUCKETS)
    net._register_fused_optim(torch.optim.SGD, lr=0.1)
    for batch in data(rank, 3):
        net(batch).square().mean().backward()
    return [p.detach().clone() for p in net.parameters()]


def _refusal(act: Callable[[], Any]) -> str:
    """What is raised, without the addresses of this process and its lines of Python."""
    try:
        act()
    except Exception as error:
        return _words(error)
    return "nothing"


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).split(chr(10) + 'At:')[0]}"


@way
def refusals(rank: int, world: int) -> Any:
    """Second registrations, bad hooks, hooks that raise or return no future."""
    said = []
    net = DistributedDataParallel(deep())
    net.register_comm_hook(None, mean_by_future)
    said.append(_refusal(lambda: net.register_comm_hook(None, mean_by_future)))
    said.append(
        _refusal(lambda: net._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE))
    )
    other = DistributedDataParallel(deep())
    other(torch.ones(2, 6)).sum().backward()
    said.append(_refusal(lambda: other.register_comm_hook(None, 3)))  # type: ignore[arg-type]
    other.register_comm_hook(None, mean_by_future)
    said.append(_refusal(lambda: other.register_comm_hook(None, mean_by_future)))

    def raises(state, bucket):  # type: ignore[no-untyped-def]
        raise KeyError("from the hook")

    def gives_a_tensor(state, bucket):  # type: ignore[no-untyped-def]
        return bucket.buffer()

    def fails_later(state, bucket):  # type: ignore[no-untyped-def]
        def raising(future: Any) -> Tensor:
            raise KeyError("from the callback")

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(raising)

    for hook in (raises, gives_a_tensor, fails_later):
        bad = DistributedDataParallel(deep())
        bad.register_comm_hook(None, hook)
        said.append(_refusal(lambda b=bad: b(torch.ones(2, 6)).sum().backward()))  # type: ignore[misc]
    return said


@way
def unfinished(rank: int, world: int) -> Any:
    """A parameter without a gradient: DDP complains at the next forward."""
    torch.manual_seed(0)
    net = DistributedDataParallel(Branching())
    net(torch.ones(2, 6)).sum().backward()
    return [_refusal(lambda: net(torch.ones(2, 6)).sum().backward())]


@way
def replicated(rank: int, world: int) -> Any:
    from torch.distributed._composable.replicate import replicate

    net = replicate(deep())
    return trained(net, rank)


@way
def sharded(rank: int, world: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = deep()
    mesh = init_device_mesh("cpu", (world,))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    kept = []
    for batch in data(rank, 3):
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        kept += [p.grad.to_local().clone() for p in net.parameters()]
        optimizer.step()
    return [*kept, *(p.detach().to_local().clone() for p in net.parameters())]


def main() -> None:
    """Every way, and what it left, into --out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    rank, world = dist.get_rank(), dist.get_world_size()
    left: dict[str, Any] = {}
    for name, run in WAYS.items():
        if not arguments.only or name in arguments.only:
            print("WAY", name, flush=True)
            torch.manual_seed(0)
            try:
                left[name] = run(rank, world)
            except Exception as error:  # some torch refuses by itself: then its words are compared
                left[name] = [_words(error)]
                print("REFUSED", name, _words(error), flush=True)
            dist.barrier()
    torch.save(left, arguments.out / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.1)  # torch 2.13: a gloo thread that lets go of its last work at exit aborts


if __name__ == "__main__":
    main()
