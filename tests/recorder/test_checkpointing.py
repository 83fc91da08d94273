"""Activation checkpointing in all its ways: forward rows once, recompute rows as such, and Nodes with the module
that made them, whichever thread and whichever pass they were made in."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from support.recordings.in_process import recording, rows
from support.recordings.known_modules import equal_bits

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

WAYS = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())


class Nested(nn.Module):
    """Code between modules inside a checkpoint inside a checkpoint."""

    def __init__(self, reentrant: bool, **options: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.options = {"use_reentrant": reentrant, **options}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.outer, self.first(x), **self.options)
        x = checkpoint(self.blocks[2], x, **self.options)
        return torch.as_tensor(self.last(x))

    def outer(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x).sigmoid()
        return torch.as_tensor(checkpoint(self.blocks[1], x, **self.options)).exp()


def both(make: Callable[[], Any], job: Callable[[Any], Any], path: Path) -> None:
    """Run a job without and with recording: equal in every bit."""

    def run() -> Any:
        torch.manual_seed(0)
        model = make()
        result = job(model)
        return result, [p.grad for p in model.parameters()], torch.get_rng_state()

    bare = run()
    with recording(path):
        seen = run()
    assert equal_bits(bare, seen), "recording changed the job"
    assert rows(path, "SELECT problems FROM ranks") == [("[]",)]
    assert rows(path, "SELECT sum(unattributed_count) FROM backward_passes") == [(0,)]


def train(model: Any) -> torch.Tensor:
    loss = model(torch.ones(2, 3)).sum()
    loss.backward()
    return torch.as_tensor(loss.detach())


def owners(path: Path, name: str) -> list[str | None]:
    found = rows(path, f"SELECT module_fqn FROM node_events WHERE node_name = '{name}' ORDER BY 1")
    return [fqn for (fqn,) in found]


@WAYS
@pytest.mark.parametrize("preserve", [True, False], ids=["rng", "no rng"])
def test_nested_checkpoints(reentrant: bool, preserve: bool, tmp_path: Path) -> None:
    both(lambda: Nested(reentrant, preserve_rng_state=preserve), train, tmp_path)
    assert owners(tmp_path, "AddmmBackward0") == [
        "blocks.0.0", "blocks.1.0", "blocks.2.0", "first", "last",
    ]  # fmt: skip
    assert owners(tmp_path, "TanhBackward0") == ["blocks.0.2", "blocks.1.2", "blocks.2.2"]
    # Code between the modules is the root's, though it is run again outside of any module.
    assert owners(tmp_path, "SigmoidBackward0") == [""]
    assert owners(tmp_path, "ExpBackward0") == [""]
    assert owners(tmp_path, "CheckpointFunctionBackward") == ([""] * 3 if reentrant else [])
    assert rows(
        tmp_path,
        "SELECT phase, count(*) FROM module_calls WHERE module_fqn LIKE 'blocks._' GROUP BY 1 ORDER BY 1",
    ) == ([("no_grad", 3), ("recompute", 4)] if reentrant else [("forward", 3), ("recompute", 4)])
    parents = rows(
        tmp_path, "SELECT backward_index, parent_backward_index FROM backward_passes ORDER BY 1"
    )
    assert parents == ([(0, None), (1, 0), (2, 0), (3, 2)] if reentrant else [(0, None)])


@WAYS
def test_recomputation_lies_within_the_pass_that_asks_for_it(
    reentrant: bool, tmp_path: Path
) -> None:
    both(lambda: Nested(reentrant), train, tmp_path)
    ((outside,),) = rows(
        tmp_path,
        "SELECT count(*) FROM module_calls c, backward_passes p WHERE c.phase = 'recompute' AND "
        "p.parent_backward_index IS NULL AND (c.start_ns < p.start_ns OR c.end_ns > p.end_ns)",
    )
    assert outside == 0
    # Each is within its block's own call, also where that ends early.
    ((alone,),) = rows(
        tmp_path,
        "SELECT count(*) FROM module_calls c WHERE c.phase = 'recompute' AND c.depth = 1 AND NOT EXISTS "
        "(FROM module_calls b WHERE b.phase = 'recompute' AND b.depth = 0 "
        "AND c.module_fqn LIKE b.module_fqn || '.%' "
        "AND b.start_ns <= c.start_ns AND c.end_ns <= b.end_ns)",
    )
    assert alone == 0
    assert rows(
        tmp_path,
        "SELECT count(*), count(*) FILTER (start_ns < end_ns) FROM module_calls WHERE phase = 'recompute'",
    ) == [(16, 16)]


@pytest.mark.parametrize("early", [True, False], ids=["early stop", "to the end"])
def test_early_stop(early: bool, tmp_path: Path) -> None:
    def job(model: Any) -> Any:
        with set_checkpoint_early_stop(early):
            return train(model)

    def make() -> nn.Module:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.part = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.as_tensor(checkpoint(self.part, x, use_reentrant=False))

        return Net()

    both(make, job, tmp_path)
    assert rows(
        tmp_path,
        "SELECT module_fqn, output_numel FROM module_calls WHERE phase = 'recompute' ORDER BY start_ns",
    ) == (
        [("part", None), ("part.0", 8), ("part.1", 8), ("part.2", None)]
        if early
        else [("part", 4), ("part.0", 8), ("part.1", 8), ("part.2", 4)]
    )
    assert owners(tmp_path, "AddmmBackward0") == ["part.0", "part.2"]


@pytest.mark.parametrize("how", ["policy", "operations"])
def test_selective_policy_is_asked_as_without_us(how: str, tmp_path: Path) -> None:
    asked: list[str] = []

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.append(str(operation))
        if operation == torch.ops.aten.addmm.default:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        choice: Any = [torch.ops.aten.addmm.default] if how == "operations" else policy
        return create_selective_checkpoint_contexts(choice)

    def job(model: Any) -> Any:
        asked.clear()
        checkpoint(
            model, torch.ones(2, 4), use_reentrant=False, context_fn=contexts
        ).sum().backward()
        return list(asked)

    both(lambda: nn.Sequential(block(), block()), job, tmp_path)
    assert bool(asked) == (how == "policy")
    assert owners(tmp_path, "AddmmBackward0") == ["0.0", "1.0"]
    assert owners(tmp_path, "TanhBackward0") == ["0.2", "1.2"]


def test_sequential_helper_and_twice_the_same_module(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
            self.twice = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> Any:
            x = checkpoint_sequential(self.layers, 2, x, use_reentrant=False)
            x = checkpoint(self.twice, x, use_reentrant=False).tanh()
            return checkpoint(self.twice, x, use_reentrant=False)

    both(Net, train, tmp_path)
    assert rows(
        tmp_path,
        "SELECT module_fqn, call_index FROM node_events WHERE node_name = 'AddmmBackward0' ORDER BY 1, 2",
    ) == [*((f"layers.{i}", 0) for i in range(4)), ("twice", 0), ("twice", 1)]
    for phase in ("forward", "recompute"):
        assert rows(
            tmp_path,
            f"SELECT call_index FROM module_calls WHERE module_fqn = 'twice' AND phase = '{phase}' "
            "ORDER BY 1",
        ) == [(0,), (1,)]


def test_second_order_through_a_checkpoint(tmp_path: Path) -> None:
    def job(model: Any) -> Any:
        x = torch.ones(2, 3, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        return slope.detach()

    both(lambda: Nested(False), job, tmp_path)
    assert set(owners(tmp_path, "TanhBackwardBackward0")) == {f"blocks.{i}.2" for i in range(3)}
    assert set(owners(tmp_path, "SigmoidBackwardBackward0")) == {""}


@WAYS
def test_backward_on_another_thread(reentrant: bool, tmp_path: Path) -> None:
    """What the backward thread makes anew has numbers that the forward thread has used."""

    def job(model: Any) -> Any:
        for _ in range(2):
            loss = model(torch.ones(2, 3)).sum()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()

    def run() -> Any:
        torch.manual_seed(0)
        model = Nested(reentrant)
        job(model)
        return [p.grad for p in model.parameters()]

    bare = run()
    with recording(tmp_path):
        seen = run()
    assert equal_bits(bare, seen)
    for name, right in (
        ("TanhBackward0", {"blocks.0.2", "blocks.1.2", "blocks.2.2"}),
        ("AddmmBackward0", {"blocks.0.0", "blocks.1.0", "blocks.2.0", "first", "last"}),
        ("SigmoidBackward0", {""}),
        ("CheckpointFunctionBackward", {""}),
    ):
        assert set(owners(tmp_path, name)) - {None} <= right, name
    # What is run again within modules is known by its tag, whatever was numbered elsewhere.
    if reentrant:
        assert set(owners(tmp_path, "TanhBackward0")) == {f"blocks.{i}.2" for i in range(3)}


def test_failure_inside_a_reentrant_checkpoint_leaves_later_code_alone(tmp_path: Path) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise ValueError("on purpose")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.part = nn.Linear(3, 4), nn.Linear(4, 4)
            self.fails = True

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.inner, self.first(x), use_reentrant=True)

        def inner(self, x: torch.Tensor) -> Any:
            x = self.part(x)
            return Fails.apply(x) if self.fails else x  # type: ignore[no-untyped-call]

    net = Net()
    with recording(tmp_path):
        with contextlib.suppress(ValueError):
            net(torch.ones(2, 3)).sum().backward()
        net.fails = False
        net(torch.ones(2, 3)).square().sum().backward()
    assert owners(tmp_path, "PowBackward0") == [None]
    assert rows(
        tmp_path, "SELECT backward_index, node_name, module_fqn FROM failures ORDER BY 1"
    ) == [
        (0, "CheckpointFunctionBackward", ""),
        (1, "FailsBackward", ""),
    ]


class Deep(nn.Module):
    """A reentrant checkpoint in a reentrant checkpoint and so on."""

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.inner = Deep(levels - 1) if levels > 1 else None

    def forward(self, x: torch.Tensor) -> Any:
        x = self.layer(x).sin()
        return x if self.inner is None else checkpoint(self.inner, x, use_reentrant=True)


def test_nested_passes_that_torch_moves_to_another_thread_are_inside_the_right_one(
    tmp_path: Path,
) -> None:
    levels = 65  # more than torch nests on one thread (60)

    def job(model: Any) -> None:
        model(torch.ones(2, 3, requires_grad=True)).sum().backward()

    both(lambda: Deep(levels), job, tmp_path)
    parents = rows(
        tmp_path, "SELECT backward_index, parent_backward_index FROM backward_passes ORDER BY 1"
    )
    assert parents == [(0, None), *((i, i - 1) for i in range(1, levels))]
    assert rows(tmp_path, "SELECT count(DISTINCT thread) FROM node_events") == [(2,)]
    made = rows(tmp_path, "SELECT module_fqn FROM node_events WHERE node_name = 'SinBackward0'")
    assert {fqn for (fqn,) in made} == {".".join(["inner"] * level) for level in range(levels)}
