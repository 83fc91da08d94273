"""Relays: what a reducer was given works as before after recording has ended, and goes with it."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradtrace_recorder.torch_internals.relays import RELAYS, hook_name
from support.launching.launcher import ranks
from support.recordings.in_process import recording, rows


def is_wrapped() -> bool:
    return hasattr(vars(dist)["_register_comm_hook"], "__wrapped__")


def backward(net: nn.Module) -> list[torch.Tensor]:
    net.zero_grad()
    net(torch.full((2, 3), float(dist.get_rank() + 1))).square().sum().backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def doubled(state, bucket):  # type: ignore[no-untyped-def]  # DDP would refuse annotations that are texts
    dist.all_reduce(bucket.buffer())
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer() * 2)
    return future


@ranks(2)
def test_a_free_relay_reduces_on_after_recording_and_takes_a_hook(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Linear(3, 3))
    reference = backward(net)
    with recording(tmp_path / "run"):
        seen = backward(net)
    after = backward(net)
    for a, b, c in zip(reference, seen, after, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert is_wrapped()  # or the job could register no hook any more
    net.register_comm_hook(None, doubled)
    assert all(torch.equal(4 * a, b) for a, b in zip(reference, backward(net), strict=True))
    assert not [
        row for row in rows(tmp_path / "run", "SELECT hook_name FROM buckets") if row[0] is not None
    ]
    dist.barrier()


@ranks(2)
def test_what_was_wrapped_is_unwrapped_when_the_reducer_is_gone(tmp_path: Path) -> None:
    net = DistributedDataParallel(nn.Linear(3, 3))
    with recording(tmp_path / "run"):
        backward(net)
    assert is_wrapped()
    dist.barrier()
    del net
    gc.collect()
    assert not is_wrapped()


@ranks(2)
def test_without_ddp_nothing_stays_wrapped(tmp_path: Path) -> None:
    with recording(tmp_path / "run"):
        assert is_wrapped()
        nn.Linear(3, 3)(torch.ones(1, 3)).sum().backward()
    assert not is_wrapped()


@ranks(2)
def test_a_hook_from_before_recording_is_left_alone_and_said(tmp_path: Path) -> None:
    net = DistributedDataParallel(nn.Linear(3, 3))
    net.register_comm_hook(None, doubled)
    builtin = DistributedDataParallel(nn.Linear(3, 3))
    builtin._register_builtin_comm_hook(torch._C._distributed_c10d.BuiltinCommHookType.ALLREDUCE)
    with recording(tmp_path / "run"):
        backward(net)
        backward(builtin)
    dist.barrier()
    found = rows(
        tmp_path / "run",
        "SELECT root, hook_name, unobserved FROM groups WHERE rank = 0 AND root >= 0",
    )
    assert [(root, name) for root, name, _ in found] == [
        (0, hook_name(doubled)),
        (1, None),
    ]
    assert all("before recording was switched on" in why for *_, why in found)
    assert rows(tmp_path / "run", "SELECT count(*) FROM buckets") == [(0,)]
    points = rows(tmp_path / "run", "SELECT count(*) FROM gradients WHERE point = 'reduced'")
    assert points == [(8,)]  # which needs no bucket


@ranks(2)
def test_steps_that_are_not_asked_for_leave_no_bucket(tmp_path: Path) -> None:
    net = DistributedDataParallel(nn.Linear(3, 3))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with recording(tmp_path / "run", steps="1"):
        for _ in range(3):
            backward(net)
            optimizer.step()
    dist.barrier()
    assert rows(tmp_path / "run", "SELECT rank, step FROM buckets ORDER BY rank") == [
        (0, 1),
        (1, 1),
    ]


@ranks(2)
def test_a_bypassed_wrapper_is_said(tmp_path: Path) -> None:
    net = DistributedDataParallel(nn.Linear(3, 3))
    with recording(tmp_path / "run"):
        backward(net)
        backward(net.module)
        with net.no_sync():
            backward(net)
    dist.barrier()
    found = rows(
        tmp_path / "run",
        "SELECT ddp_sync FROM backward_passes WHERE rank = 0 ORDER BY backward_index",
    )
    assert found == [("sync",), ("bypassed",), ("no_sync",)]


@ranks(2)
def test_a_reducer_that_was_prepared_by_hand_reduces(tmp_path: Path) -> None:
    """As a pipeline's stage does for its last microbatch."""
    net = DistributedDataParallel(nn.Linear(3, 3))
    with recording(tmp_path / "run"), net.no_sync():
        loss = net(torch.ones(2, 3)).sum()
        net.reducer.prepare_for_backward([])
        loss.backward()
    dist.barrier()
    assert rows(tmp_path / "run", "SELECT ddp_sync FROM backward_passes") == [("sync",)] * 2
    reduced = "SELECT count(*) FROM gradients WHERE point = 'reduced'"
    assert rows(tmp_path / "run", reduced) == [(4,)]


def test_relays_hold_no_reducer() -> None:
    assert not list(RELAYS._of)


@ranks(2)
def test_our_own_failure_at_a_bucket_changes_no_gradient(tmp_path: Path) -> None:
    """The DDP source closes and says so; the other sources record on."""
    from gradtrace_recorder.recording.rows import Rows

    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Linear(3, 3))
    reference = backward(net)

    def broken(self: Rows, *args: object, **fields: object) -> None:
        raise ValueError("broken on purpose")

    original, Rows.hold_bucket = Rows.hold_bucket, broken  # type: ignore[method-assign, assignment]
    try:
        with recording(tmp_path / "run", strict=False):
            seen = [backward(net), backward(net)]
    finally:
        Rows.hold_bucket = original  # type: ignore[method-assign]
    dist.barrier()
    for gradients in seen:
        assert all(torch.equal(a, b) for a, b in zip(reference, gradients, strict=True))
    assert rows(tmp_path / "run", "SELECT count(*) FROM backward_passes") == [(4,)]
    (problems,) = rows(tmp_path / "run", "SELECT problems FROM ranks WHERE rank = 0")[0]
    assert "DDP source failed" in problems and "broken on purpose" in problems
