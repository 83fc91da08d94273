"""The native observer against the Python one: the same rows of the same job, and the same job."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining import _backward
from torch.utils.checkpoint import checkpoint

import gradtrace_recorder
from gradtrace_recorder.observers.native.build import library
from gradtrace_schemas.journal import NULL_INT32
from support.answers.commands import told
from support.devices.host_device import host_device
from support.models.autograd_functions import Raises, applied
from support.recordings.both_observers import both
from support.recordings.in_process import recording, rows

pytestmark = pytest.mark.usefixtures("native_library")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 2 * gradients[0]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3))


def train(model: nn.Module, steps: int = 2, **of_backward: Any) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(steps):
        for _ in range(2):
            loss = model(torch.randn(5, 4)).square().mean()
            loss.backward(**of_backward)
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("summary", ["off", "norms", "full"])
def test_training_leaves_the_same_rows(tmp_path: Path, summary: str) -> None:
    account = both(tmp_path, lambda: train(net()), summary=summary)
    assert account == {"kind": "native", "python_passes": {}, "python_nodes": {}}


@pytest.mark.parametrize("summary, left", [("full", 1), ("off", 0)])
def test_a_pass_on_a_device_before_any_summary_is_left_to_python(
    tmp_path: Path, summary: str, left: int
) -> None:
    """The rules in C++ would combine what is yet to come. Without summaries there is nothing to combine."""
    with host_device(), recording(tmp_path, observer="native", summary=summary):
        x = torch.ones(3, requires_grad=True)
        torch.stack((x * 2, x + 1)).sum().backward()
    account = json.loads((tmp_path / "ranks" / "rank=00000-0.json").read_text())["observer"]
    assert account["python_passes"] == ({"summaries are made on a device": 1} if left else {})
    ((every, have),) = rows(
        tmp_path,
        "SELECT count(*), count(grad_input_norm) FROM node_events WHERE node_name LIKE 'Stack%'",
    )
    assert (every, have) == (1, left)


def test_modules_that_are_not_wanted_have_no_rows(tmp_path: Path) -> None:
    both(tmp_path, lambda: train(net()), modules="3")


def of_a_function() -> list[float]:
    model = net()

    def around(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = applied(Doubled, x)
        return out

    model[1].register_forward_hook(lambda m, a, out: around(out))
    return train(model)


def of_a_reentrant_checkpoint() -> None:
    model = net()
    x = torch.randn(5, 4, requires_grad=True)
    checkpoint(model, x, use_reentrant=True).sum().backward()


def of_a_checkpoint() -> None:
    model = net()
    checkpoint(model, torch.randn(5, 4), use_reentrant=False).sum().backward()


def of_a_graph_that_runs_twice() -> None:
    loss = net()(torch.ones(2, 4)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def of_a_second_derivative() -> None:
    model = net()
    x = torch.ones(2, 4, requires_grad=True)
    (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    first.square().sum().backward()


def of_odd_gradients() -> None:
    """Sparse, complex, expanded, transposed, empty, of nothing, not finite, in several places of one Node."""
    torch.manual_seed(0)
    table = nn.Embedding(10, 4, sparse=True)
    weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
    out = table(torch.tensor([1, 1, 7]))
    parts = (out.to(torch.complex64) @ weight.t()).abs().sum()
    several = torch.stack([p * 2 for p in out.unbind()]).t().reshape(-1)[:0].sum()
    broken = (out / 0).sum() * 0
    (parts + several + broken + out.double().expand(2, 3, 4).sum()).backward()


def of_hooks() -> list[Any]:
    """Hooks of the job's that change gradients, on Nodes, tensors and parameters; and a frozen parameter."""
    model = net()
    seen: list[Any] = []
    weights: Any = [layer.weight for layer in model if hasattr(layer, "weight")]
    weights[0].register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 2))
    weights[2].register_hook(lambda g: g + 1)
    loss = model(torch.ones(2, 4)).sum()
    node = loss.grad_fn.next_functions[0][0]
    node.register_prehook(lambda g: (g[0] * 3,))
    node.register_hook(lambda i, o: seen.append(float(o[0].sum())))
    model[3].bias.requires_grad_(False)
    loss.backward()
    return seen


def of_a_nested_pass() -> None:
    model = net()
    hidden: torch.Tensor = model[0](torch.ones(2, 4))
    other, loss = hidden.square().sum(), model[3](model[1](model[0](torch.ones(2, 4)))).sum()
    loss.register_hook(lambda g: other.backward(retain_graph=True))
    loss.backward()


def of_a_failed_stage() -> None:
    """An own pipeline's actions, of several microbatches; the Node that runs when a pass fails is of one."""
    model = net()
    for microbatch in (1, 0):
        with gradtrace_recorder.stage(2, microbatch, "forward"):
            out = model(torch.ones(2, 4))
        with gradtrace_recorder.stage(2, microbatch, "backward_full"):
            out.sum().backward()
    with gradtrace_recorder.stage(3, 4, "forward"):
        out = applied(Raises, model(torch.ones(2, 4)))
    with gradtrace_recorder.stage(3, 4, "backward_full"), pytest.raises(ValueError):
        out.sum().backward()


def of_a_failure() -> str:
    model = net()
    out = model[3](model[2](applied(Raises, model[0](torch.ones(2, 4)))))
    with pytest.raises(ValueError, match="on purpose") as caught:
        out.sum().backward()
    with pytest.raises(RuntimeError, match="inplace"):
        hidden = model[0](torch.ones(2, 4)).exp()
        hidden.mul_(2)
        hidden.sum().backward()
    return str(caught.value)


class Chain(nn.ModuleDict):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.values():
            x = part(x)
        return x


def of_moved_parameters() -> None:
    """Between passes parameters change their places and names, and one is replaced by another."""
    torch.manual_seed(0)
    model = Chain({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 4)})

    def step() -> None:
        train(model, steps=1)

    step()
    a, b, c = model.values()
    a.weight, b.weight = b.weight, a.weight
    step()
    c.bias = nn.Parameter(torch.ones(4))
    step()
    model["d"] = model.pop("a")  # the same parameters of the same module, by another name
    step()
    later = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    later[0].weight = c.weight
    later(torch.ones(2, 4)).sum().backward()
    del later
    step()


def of_several_outputs() -> None:
    """What the engine is given: several tensors of one Node, an edge, a leaf, a view that was changed in place."""
    model = net()
    out = model(torch.ones(3, 4))
    one, other, _ = out.unbind()
    torch.autograd.backward([one.sum(), other.sum(), other], [None, None, torch.ones(3)])
    edge = torch.autograd.graph.get_gradient_edge(model(torch.ones(3, 4)))
    try:
        torch.autograd.backward(edge, torch.ones(3, 3))
    except AssertionError:  # torch 2.6 wants a sequence of edges
        torch.autograd.backward([edge], [torch.ones(3, 3)])
    leaf: Any = model[0].bias
    leaf.backward(torch.ones(8))
    out = model(torch.ones(3, 4)).clone()
    part = out[0]
    out.mul_(2)
    part.sum().backward()


ODD_JOBS: list[Callable[[], Any]] = [
    of_a_function, of_a_reentrant_checkpoint, of_a_checkpoint, of_a_graph_that_runs_twice, of_a_second_derivative,
    of_odd_gradients, of_hooks, of_a_nested_pass, of_a_failure, of_a_failed_stage,
    of_moved_parameters, of_several_outputs,
]  # fmt: skip


# What is left to Python of each, by reason: the rest is watched in C++.
LEFT: dict[str, dict[str, dict[str, int]]] = {
    "of_hooks": {"python_nodes": {"a hook sees the gradient first": 1}},
    "of_a_nested_pass": {"python_passes": {"inside or beside another pass": 1}},
}


@pytest.mark.parametrize("job", ODD_JOBS, ids=lambda job: job.__name__)
def test_odd_jobs_leave_the_same_rows(tmp_path: Path, job: Callable[[], Any]) -> None:
    account = both(tmp_path, job)
    nothing: dict[str, dict[str, int]] = {"python_passes": {}, "python_nodes": {}}
    assert account == {"kind": "native"} | nothing | LEFT.get(job.__name__, {})


def test_times_are_those_of_the_monotonic_clock(tmp_path: Path) -> None:
    w = torch.ones(4, requires_grad=True)
    moments: list[int] = []

    def once() -> None:
        out = w.exp()
        # Ours come after these, which are there first.
        node: Any = out.grad_fn
        node.register_prehook(lambda _: moments.append(time.monotonic_ns()))
        node.register_hook(lambda *_: moments.append(time.monotonic_ns()))
        loss = out.sum()
        loss.register_hook(lambda _: time.sleep(0.0003))  # the clock is asked anew
        loss.backward()
        moments.append(time.monotonic_ns())

    with recording(tmp_path, observer="native", summary="off"):
        once()
        time.sleep(0.03)  # so long it takes to know how long a tick is
        for _ in range(50):
            once()
    rank = json.loads((tmp_path / "ranks" / "rank=00000-0.json").read_text())
    query = "SELECT start_ns, end_ns FROM node_events WHERE node_name = 'ExpBackward0' ORDER BY record_index"
    told = [[rank["monotonic_start_ns"] + at for at in row] for row in rows(tmp_path, query)]
    asked = [moments[at : at + 3] for at in range(0, len(moments), 3)]
    off = 10_000  # nanoseconds; a wrong rate shows as up to a quarter of a millisecond
    wrong = [
        (times, moments)
        for times, moments in zip(told, asked, strict=True)
        if not moments[0] - off
        < times[0]
        < moments[1] + off
        < times[1] + 2 * off
        < moments[2] + 3 * off
    ]
    assert len(told) == 51
    assert not wrong


class Halves(nn.Module):
    """A stage whose weight half walks past Nodes of the input half: a tied layer, a Function, idle outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.tied, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.tied(applied(Doubled, self.tied(x)).tanh()))
        return out


def halves() -> None:
    torch.manual_seed(0)
    model, others = Halves(), net()
    for _ in range(2):
        # The second one's Nodes are made between those of the first: their numbers lie among them.
        x, y = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
        losses = [model(x).square().mean(), others(y).square().mean(), model(x).sum()]
        pending = [
            (part, _backward.stage_backward_input([loss], None, [leaf], part.parameters())[1])
            for loss, leaf, part in zip(losses, (x, y, x), (model, others, model), strict=True)
        ]
        for part, groups in pending:
            _backward.stage_backward_weight(part.parameters(), groups)


def test_halves_of_a_split_backward_leave_the_same_rows(tmp_path: Path) -> None:
    account = both(tmp_path, halves)
    assert account["python_passes"] == {}
    found = rows(tmp_path / "native", "SELECT DISTINCT phase FROM node_events ORDER BY 1")
    assert found == [("input",), ("weight",)]


OPERATIONS: list[Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda inner, a, b: a @ b, lambda inner, a, b: a + b.t(), lambda inner, a, b: a.clone().mul_(2),
    lambda inner, a, b: inner(a), lambda inner, a, b: torch.cat(a.chunk(3), 1).view(3, 3),
    lambda inner, a, b: a.half().float(), lambda inner, a, b: a.tanh(), lambda inner, a, b: applied(Doubled, a),
    lambda inner, a, b: a.detach() * b, lambda inner, a, b: torch.where(a > 0, a, b),
    lambda inner, a, b: a.bfloat16().double().float(), lambda inner, a, b: a.unbind()[1].expand(3, 3),
]  # fmt: skip


def random_graph(seed: int) -> float:
    """A few tensors, combined at random inside a module, and one pass back through them."""
    draw = random.Random(seed)
    torch.manual_seed(seed)

    class Tangle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(3, 3) for _ in range(3))
            self.inner = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = [x, *self.weights]
            for _ in range(draw.randint(2, 12)):
                a, b = draw.choice(made), draw.choice(made)
                made.append(draw.choice(OPERATIONS)(self.inner, a, b))
            total: torch.Tensor = torch.stack(made[-3:]).sum() + self.weights[0].sum()
            return total  # some of it, as the rest may be detached

    model = Tangle()
    loss: torch.Tensor = model(torch.randn(3, 3, requires_grad=draw.random() < 0.5))
    loss.backward()
    return float(loss.detach())


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**31))
def test_random_graphs_leave_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    both(tmp_path_factory.mktemp("graph"), lambda: [random_graph(seed + n) for n in range(6)])


@pytest.mark.parametrize("observer", ["native", "python"])
def test_threads_with_passes_of_their_own_do_not_disturb_each_other(
    tmp_path: Path, observer: str
) -> None:
    """They share parameters, so the hooks of one pass lie on Nodes that the others run; and all come first at once."""
    weight = nn.Parameter(torch.ones(3, 3))
    together = threading.Barrier(3)

    def work() -> None:
        for _ in range(20):
            loss = (torch.ones(3, 3) @ weight).tanh().sum()
            together.wait()
            loss.backward()

    with recording(tmp_path / "run", observer=observer):
        workers = [threading.Thread(target=work) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    run = tmp_path / "run"
    assert rows(run, "SELECT count(*), count(error) FROM backward_passes") == [(60, 0)]
    assert rows(run, "SELECT count(*), count(DISTINCT (backward_index, event_index)) FROM node_events") == [
        (4 * 60, 4 * 60)
    ]  # fmt: skip


def test_norms_that_two_observers_added_up_are_the_same_to_diff(tmp_path: Path) -> None:
    """They agree to 1e-6 and not to the last bit. Which observer it was is told, as no number of the job's."""

    def job() -> list[float]:
        torch.manual_seed(0)
        return train(nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 3)), 3)

    both(tmp_path, job, summary="norms")
    code, said = told("diff", tmp_path / "python", tmp_path / "native")
    assert code == 0 and said.startswith("identical: "), said
    assert "in norms, sums and counts (norms to 1e-6, as they were not added up alike)" in said
    assert re.search(r"observer +python +native", said), said
    norms = [
        rows(
            tmp_path / one, "SELECT output_norm, output_sum FROM module_calls ORDER BY record_index"
        )
        for one in ("python", "native")
    ]
    assert norms[0] != norms[1]  # else this proves nothing


def test_hooks_leave_their_nodes(tmp_path: Path) -> None:
    """A graph that outlives its pass and the recording runs on as if nothing had been there."""
    loss = net()(torch.ones(2, 4)).sum()
    with recording(tmp_path / "run", observer="native"):
        loss.backward(retain_graph=True)
        before = rows_written(tmp_path / "run")
    loss.backward(retain_graph=True)
    loss.backward()
    assert rows_written(tmp_path / "run") >= before
    assert rows(tmp_path / "run", "SELECT count(*) FROM backward_passes") == [(1,)]


def rows_written(run: Path) -> int:
    return sum(len(list(folder.glob("*.parquet"))) for folder in run.rglob("rank=*"))


def test_failure_of_ours_in_a_hook_closes_the_source_and_not_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from gradtrace_recorder.summaries.summariser import Summariser

    def fails(self: Summariser, gradient: torch.Tensor) -> None:
        raise RuntimeError("ours")

    table = nn.Embedding(10, 4, sparse=True)  # a gradient that Python is asked about
    with recording(tmp_path / "run", observer="native", strict=False):
        monkeypatch.setattr(Summariser, "of_gradient", fails)
        table(torch.tensor([1])).sum().backward()
        table(torch.tensor([1])).sum().backward()
    assert table.weight.grad is not None
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "HookFailed: RuntimeError: ours" in said
    assert rows(tmp_path / "run", "SELECT count(*) FROM backward_passes") == [(1,)]


def test_a_pass_at_a_place_of_its_own_is_found_there(tmp_path: Path) -> None:
    """The place of a thread is the very object that was given, as the recorder compares it."""
    from gradtrace_recorder.journal.writer import NOWHERE
    from gradtrace_recorder.observers.native.journal import NativeJournal

    about = {"rank": 0, "attempt": 0, "wall_start_ns": 1, "monotonic_start_ns": 2}
    journal = NativeJournal(library(), tmp_path / "j", **about)
    place = (1, journal.string("act"), 0, 0, 0, 0, NULL_INT32)
    journal.move(7, 10, place)
    assert journal.place_of(7) is place and journal.place_of(8) is NOWHERE
    journal.close(remove=True)
