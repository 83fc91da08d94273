"""Nodes that make others, under the native observer: Functions defined in Python, passes that make a graph."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradtrace_recorder.state.attribution import Attribution
from gradtrace_recorder.summaries.summariser import Summariser
from support.models.autograd_functions import applied
from support.recordings.both_observers import both
from support.recordings.in_process import recording, rows

pytestmark = pytest.mark.usefixtures("native_library")


class Changes(torch.autograd.Function):
    """Changes what came in, and has an output of which no gradient comes and an input that gets none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, y * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].mul_(3), None


class Makes(torch.autograd.Function):
    """Makes Nodes while it runs, by modules that it calls, and runs a pass of its own through them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, inner: Any, fails: bool) -> torch.Tensor:
        ctx.inner, ctx.fails = inner, fails
        ctx.save_for_backward(x)
        made: torch.Tensor = x * 1
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            out = (ctx.inner(leaf).tanh() * 2).sum()
            out.backward()
        if ctx.fails:
            raise ValueError("on purpose")
        return gradients[0] * leaf.grad, None, None


class Block(nn.Module):
    """A layer, and one more that its Function calls in backward."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.layer, self.inner, self.fails = nn.Linear(4, 4), nn.Linear(4, 4), fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, _ = applied(Changes, self.layer(x), x)
        made: torch.Tensor = applied(Makes, first, self.inner, self.fails)
        return made


def model(fails: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Block(), Block(fails))


def functions() -> list[float]:
    net = model()
    for _ in range(2):
        net(torch.ones(2, 4, requires_grad=True)).sum().backward()
    return [float(p.grad.sum()) for p in net.parameters() if p.grad is not None]


def a_function_fails() -> None:
    """In one that has begun to make Nodes; what runs afterwards belongs to its own modules again."""
    net = model(fails=True)
    with pytest.raises(ValueError, match="on purpose"):
        net(torch.ones(2, 4)).sum().backward()
    net[:2](torch.ones(2, 4)).sum().backward()


def a_hook_raises() -> None:
    """Before a Function and after a Node, while others run."""
    net = model()
    for where in ("register_prehook", "register_hook"):
        out = net[1](net[0](torch.ones(2, 4)))
        getattr(out.grad_fn, where)(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            net[2](out).sum().backward()


def second_derivatives() -> list[float]:
    """Three passes, each through what the one before has made, by modules and Functions."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1))
    x = torch.randn(3, 4, requires_grad=True)
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    (curve,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
    (net(x).sum() + curve.square().sum() + slope.sum()).backward()
    return [float(p.grad.sum()) for p in net.parameters() if p.grad is not None]


def a_reentrant_checkpoint() -> None:
    net = model()
    x = torch.randn(5, 4, requires_grad=True)
    checkpoint(
        net[1], checkpoint(net[0], x, use_reentrant=True), use_reentrant=True
    ).sum().backward()


class Runs(torch.autograd.Function):
    """Runs a pass over a graph that it was given, when its own Node runs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, graph: Any) -> torch.Tensor:
        ctx.graph = graph
        made: torch.Tensor = x * 2
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        with torch.enable_grad():
            loss = ctx.graph()
        loss.backward(retain_graph=True)
        return 2 * gradients[0], None


def passes_in_passes() -> list[float]:
    """Three deep, over graphs that share Nodes and parameters with the outer ones; one fails inside."""
    torch.manual_seed(0)
    net, other = nn.Linear(4, 4), nn.Linear(4, 4)
    hidden = net(torch.ones(2, 4)).tanh()
    inner = applied(Runs, hidden, lambda: other(hidden).square().sum())
    outer = applied(Runs, hidden, lambda: (inner * other(hidden)).sum())
    outer.sum().backward(retain_graph=True)
    failing = applied(Runs, hidden, lambda: applied(Makes, hidden, other, True).sum())
    with pytest.raises(ValueError, match="on purpose"):
        failing.sum().backward(retain_graph=True)
    (hidden.sum() + outer.sum()).backward()
    return [
        float(p.grad.sum()) for p in (*net.parameters(), *other.parameters()) if p.grad is not None
    ]


def passes_over_what_runs() -> list[float]:
    """From hooks before and after a Node, and from a Function: the very Node that the outer pass runs is in them."""
    torch.manual_seed(0)
    net, seen = nn.Linear(4, 4), list[Any]()

    def again(*_: Any) -> Any:
        if not seen:
            seen.append(1)
            loss.backward(retain_graph=True)

    for where in ("register_prehook", "register_hook", "Runs"):
        out = net(torch.ones(2, 4)).exp()
        if where == "Runs":
            loss = applied(Runs, out, lambda out=out: (again(), out.sum())[1]).sum()
        else:
            loss = out.sum()
            getattr(out.grad_fn, where)(again)
        loss.backward(retain_graph=True)
        seen.clear()
    return [float(p.grad.sum()) for p in net.parameters() if p.grad is not None]


JOBS: list[Callable[[], Any]] = [
    functions, a_function_fails, a_hook_raises, second_derivatives, a_reentrant_checkpoint, passes_in_passes,
    passes_over_what_runs,
]  # fmt: skip


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_the_same_rows_by_both_observers(tmp_path: Path, job: Callable[[], Any]) -> None:
    account = both(tmp_path, job)
    assert account["python_nodes"] == {}
    assert set(account["python_passes"]) <= {"inside or beside another pass"}
    if job is functions:
        changed = rows(
            tmp_path / "native",
            "SELECT DISTINCT node_name, grad_output_mutated FROM node_events "
            "WHERE grad_output_mutated IS NOT NULL ORDER BY 1",
        )
        assert changed == [("ChangesBackward", True), ("MakesBackward", False)]
    assert sum(account["python_passes"].values()) == (4 if job is passes_over_what_runs else 0)


@pytest.mark.parametrize("summary", ["off", "norms"])
def test_functions_leave_the_same_rows_with_less_detail(tmp_path: Path, summary: str) -> None:
    both(tmp_path, functions, summary=summary)


@pytest.mark.parametrize("where", [(Summariser, "of_gradient"), (Attribution, "node_begins")])
def test_an_interrupt_that_comes_while_a_hook_calls_python_reaches_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[type, str]
) -> None:
    original = getattr(*where)
    came: list[int] = []

    def interrupted(*arguments: Any) -> Any:
        if not came:
            came.append(1)
            raise KeyboardInterrupt
        return original(*arguments)

    table = nn.Embedding(10, 4, sparse=True)  # its gradient is one that Python is asked about
    block = Block()
    with recording(tmp_path / "run", observer="native"):
        monkeypatch.setattr(*where, interrupted)
        out = table(torch.tensor([1]))
        with pytest.raises(KeyboardInterrupt):
            (out.sum() if where[0] is Summariser else block(out).sum()).backward()
        block(torch.ones(2, 4)).sum().backward()
    found = rows(tmp_path / "run", "SELECT error FROM backward_passes ORDER BY backward_index")
    assert found[0] == ("KeyboardInterrupt: ",) and (None,) in found


def test_threads_that_run_functions_at_once_keep_apart(tmp_path: Path) -> None:
    """Each takes the GIL from inside its hooks, while the others hold the journal's lock now and then."""
    together = threading.Barrier(3)

    def work() -> None:
        x = torch.ones(2, 4, requires_grad=True)
        for _ in range(30):
            out = applied(Changes, x.tanh(), x)[0].square().sum()
            together.wait()
            out.backward()

    with recording(tmp_path / "run", observer="native"):
        workers = [threading.Thread(target=work) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
    count = rows(tmp_path / "run", "SELECT count(*) FROM node_events WHERE grad_output_mutated")
    assert count == [(90,)]


# A process of its own: once the engine has begun threads, as some tests make it do, no child of a fork may use it.
FORKING = """
import os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader
import gradtrace_recorder

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        return gradient.mul_(2)

def squares(n):
    x = torch.ones(2, requires_grad=True)
    (Twice.apply(x).square().sum() * n).backward()
    return x.grad

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, n):
        return squares(n)

def fork(gradient):
    child = os.fork()
    if child:
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

net, parent = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), os.getpid()
gradtrace_recorder.start(sys.argv[1], observer="native", strict=True, quiet=True)
expected = [squares(n).tolist() for n in range(4)]
print("workers", [g.tolist() for g in DataLoader(Numbers(), batch_size=None, num_workers=1)] == expected)
hidden = net[0](torch.ones(2, 4))
hidden.register_hook(fork)
try:
    net[1](hidden).sum().backward()
finally:
    if os.getpid() != parent:
        os._exit(7 if net[0].weight.grad is not None else 8)
net[0](torch.ones(2, 4)).sum().backward()
gradtrace_recorder.stop()
"""


def test_forked_children_leave_the_recording_alone(tmp_path: Path) -> None:
    """Workers of a DataLoader, and a child that is forked inside a hook and runs that very pass to its end."""
    job = subprocess.run(
        [sys.executable, "-c", FORKING, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (job.returncode, job.stdout, job.stderr) == (0, "workers True\nchild 7\n", "")
    whole = """SELECT count(*) FROM backward_passes p WHERE node_count = (
        SELECT count(*) FROM node_events n WHERE n.backward_index = p.backward_index)"""
    passes = "SELECT count(*) FROM backward_passes"
    assert rows(tmp_path / "run", whole) == rows(tmp_path / "run", passes) == [(4 + 1 + 1,)]
