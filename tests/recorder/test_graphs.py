"""Every kind of Node and every way of running the engine: each case runs with and without us, equal in every bit, and
its rows are compared with what is known without us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.recordings.in_process import rows
from support.recordings.with_and_without import both, nodes

# What torch's own modules for compiling do is not for the tests to judge.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


class Scaled(torch.autograd.Function):
    """Several outputs, one of them integers; saves nothing; None for one input."""

    @staticmethod
    def forward(ctx: Any, x: Any, y: Any, factor: Any) -> Any:
        ctx.factor = factor
        rounded = (x * 10).to(torch.int64)
        ctx.mark_non_differentiable(rounded)
        return x * factor, rounded, y + 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.factor, None, None


class Odd(nn.Module):
    """Custom Functions, in-place operations and views, Nodes with several outputs, sparse, complex and integer
    tensors, tensors without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4, sparse=True)
        self.layer = nn.Linear(4, 4)
        self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.none = nn.Linear(4, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.embed(tokens))
        a, rounded, b = Scaled.apply(x, x.detach() + self.turn.real, 3.0)  # type: ignore[no-untyped-call]
        board = torch.zeros(3, 4)
        board[:2] = (a + b)[:2]
        board.t()[1].mul_(2)
        board[2:].add_(rounded[2:])
        u, s, _ = torch.linalg.svd(board[:2, :2])
        values, places = board.topk(2)
        waves = torch.fft.ifft(torch.fft.fft(board) * self.turn).abs().square()
        nothing = self.none(torch.zeros(0, 4)).sum() + self.none(board[3:]).sum()
        parts = board.split(2, 1)
        total = s.sum() + u[0, 0] + values.sum() + (places > 1).sum() + waves.mean() + nothing
        return torch.as_tensor(total + (parts[0] * parts[1].relu()).sum())


def test_nodes_of_every_kind_of_operation(tmp_path: Path) -> None:
    def job(model: Any, watch: Any) -> Any:
        with watch:
            loss = model(torch.tensor([1, 2, 2])) * 2
        loss.backward()
        return loss

    both(Odd, job, tmp_path, watched=False)
    names = rows(tmp_path, "SELECT DISTINCT node_name FROM node_events WHERE module_fqn = ''")
    assert {
        "ScaledBackward", "CopySlices", "LinalgSvdBackward0", "TopkBackward0", "SplitBackward0",
        "FftC2CBackward0", "AbsBackward0",
    } <= {name for (name,) in names}  # fmt: skip
    assert set(nodes(tmp_path, "AddmmBackward0")) == {"layer", "none"}
    assert nodes(tmp_path, "EmbeddingBackward0") == ["embed"]
    # The Function's None is counted as no gradient, and what it got as two.
    columns = "grad_output_count, grad_input_count, grad_output_mutated"
    assert nodes(tmp_path, "ScaledBackward", columns) == [(2, 1, False)]
    ((layout, norm),) = rows(
        tmp_path, "SELECT shape, norm FROM gradients WHERE parameter_fqn = 'embed.weight'"
    )
    assert layout == [6, 4] and norm > 0
    assert rows(
        tmp_path, "SELECT numel, nan_count FROM gradients WHERE parameter_fqn = 'turn'"
    ) == [(4, 0)]


def test_in_place_nodes_are_watched_operation_by_operation(tmp_path: Path) -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.act = nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            board = self.layer(x)
            view = board[:, :2]
            view.mul_(2)
            board = self.act(board).clone()
            board[0].add_(board[1] * 2)
            return torch.as_tensor(board.view(-1).sigmoid_())

    def job(model: Any, watch: Any) -> None:
        with watch:
            loss = model(torch.ones(2, 4)).sum()
        loss.backward()

    both(Steps, job, tmp_path)


def test_hooks_of_the_job_replace_gradients_and_run_in_their_order(tmp_path: Path) -> None:
    def job(model: Any, watch: Any) -> Any:
        log: list[tuple[str, float]] = []

        def logged(what: str, result: Any) -> Any:
            def hook(*args: Any) -> Any:
                value = args[-1][0] if isinstance(args[-1], tuple) else args[-1]
                log.append((what, float(value.detach().sum())))
                changed = result(args[-1])
                return None if what == "first" else changed

            return hook

        weight = model[0].weight
        weight.register_hook(logged("tensor", lambda g: g * 2))
        weight.register_post_accumulate_grad_hook(logged("first", lambda p: p.grad.mul_(3)))
        weight.register_post_accumulate_grad_hook(logged("second", lambda p: None))
        model[0].bias.register_post_accumulate_grad_hook(Cleared())
        out = model(torch.ones(2, 3))
        out.register_hook(logged("output", lambda g: g + 1))
        out.grad_fn.register_prehook(logged("before", lambda g: (g[0] * 5,)))
        out.grad_fn.register_hook(logged("after", lambda g: None))
        out.retain_grad()
        out.sum().backward()
        return log, out.grad

    both(lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), job, tmp_path, watched=False)
    # Ours is called before those of the job: what is accumulated is what they find.
    assert rows(tmp_path, "SELECT parameter_fqn FROM gradients WHERE point = 'local' ORDER BY 1") == [
        ("0.bias",), ("0.weight",), ("1.bias",), ("1.weight",),
    ]  # fmt: skip
    # The Node got what the job's hooks made of it: (1 + 1) * 5 for each of four elements.
    assert rows(
        tmp_path,
        "SELECT grad_output_sum FROM node_events WHERE node_name = 'AddmmBackward0' AND module_fqn = '1'",
    ) == [(40.0,)]


class Cleared:
    """A hook of the job that takes the gradient away, as an optimizer in backward does."""

    def __call__(self, parameter: torch.Tensor) -> None:
        parameter.grad = None


def test_passes_over_one_graph_and_parts_of_it(tmp_path: Path) -> None:
    def job(model: Any, watch: Any) -> Any:
        x = torch.ones(2, 3, requires_grad=True)
        with watch:
            hidden = model[0](x)
            one, two = model[2](hidden.tanh()).sum(), model[1](hidden).square().sum()
        one.backward(retain_graph=True)
        one.backward(retain_graph=True, inputs=[model[0].weight])
        (inner,) = torch.autograd.grad(two, hidden, retain_graph=True)
        torch.autograd.backward([one, two])
        return inner, x.grad

    make = lambda: nn.ModuleList([nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 1)])  # noqa: E731
    both(make, job, tmp_path, watched=False)
    assert rows(
        tmp_path,
        "SELECT backward_index, kind, parent_backward_index, root_node_name FROM backward_passes ORDER BY 1",
    ) == [
        (0, "backward", None, "SumBackward0"),
        (1, "backward", None, "SumBackward0"),
        (2, "grad", None, "SumBackward0"),
        (3, "backward", None, "SumBackward0"),
    ]
    ran = rows(
        tmp_path,
        "SELECT backward_index, list(coalesce(parameter_fqn, node_name) ORDER BY event_index) "
        "FROM node_events WHERE node_name IN ('AccumulateGrad', 'SoftplusBackward0', 'TanhBackward0') "
        "GROUP BY 1 ORDER BY 1",
    )
    assert [sorted(names) for _, names in ran] == [
        ["AccumulateGrad", "TanhBackward0", "bias", "bias", "weight", "weight"],
        ["TanhBackward0", "weight"],
        ["SoftplusBackward0"],
        [
            "AccumulateGrad",
            "SoftplusBackward0",
            "TanhBackward0",
            "bias",
            "bias",
            "weight",
            "weight",
        ],
    ]
    assert rows(tmp_path, "SELECT DISTINCT phase FROM node_events WHERE backward_index = 2") == [
        ("grad",)
    ]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_higher_order_nodes_belong_to_the_module_of_the_node_that_made_them(tmp_path: Path) -> None:
    def job(model: Any, watch: Any) -> Any:
        x = torch.ones(2, 3, requires_grad=True)
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (curve,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        loss = out.mean() + (slope.norm(2, 1) - 1).square().mean() + curve.sum()
        loss.backward(create_graph=True)
        (model[0].weight.grad.square().sum() * 1e-3).backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad.detach()
        return slope, curve

    make = lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))  # noqa: E731
    both(make, job, tmp_path, watched=False)
    assert rows(tmp_path, "SELECT backward_index, kind FROM backward_passes ORDER BY 1") == [
        (0, "grad"), (1, "grad"), (2, "backward"), (3, "backward"),
    ]  # fmt: skip
    for name, fqns in (("TanhBackwardBackward0", {"1"}), ("TanhBackward0", {"1"})):
        assert set(nodes(tmp_path, name)) == fqns
    assert set(nodes(tmp_path, "MmBackward0")) == {"0", "2"}
    assert set(nodes(tmp_path, "LinalgVectorNormBackward0")) == {None}
    assert rows(tmp_path, "SELECT sum(unattributed_count) FROM backward_passes") == [(0,)]


def test_torch_func_and_autograd_functional(tmp_path: Path) -> None:
    functional = torch.autograd.functional

    def job(model: Any, watch: Any) -> Any:
        values = dict(model.named_parameters())
        x = torch.ones(2, 3)

        def loss(values: Any, x: torch.Tensor) -> Any:
            return torch.func.functional_call(model, values, (x,)).square().sum()

        return [
            torch.func.grad(loss)(values, x),
            torch.func.vmap(torch.func.grad(loss), (None, 0))(values, x),
            torch.func.jacrev(model)(x),
            torch.func.hessian(lambda x: loss(values, x))(x),
            torch.func.vjp(model, x)[1](torch.ones(2, 1)),
            torch.func.jvp(model, (x,), (x,)),
            functional.jacobian(model, x),
            functional.jacobian(model, x, vectorize=True),
            functional.hessian(lambda x: model(x).sum(), x[0]),
            functional.hvp(lambda x: model(x).sum(), x[0], x[0]),
            functional.vjp(lambda x: model(x).sum(), x),
        ]

    make = lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))  # noqa: E731
    both(make, job, tmp_path, watched=False)
    assert set(nodes(tmp_path, "TanhBackward0")) == {"1"}
    assert rows(tmp_path, "SELECT DISTINCT phase FROM node_events") == [("grad",)]


@pytest.mark.parametrize("way", ["anomaly", "one thread", "saved on cpu", "packed"])
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_ways_of_running_the_engine(way: str, tmp_path: Path) -> None:
    def around() -> Any:
        if way == "anomaly":
            return torch.autograd.set_detect_anomaly(True)
        if way == "one thread":
            return torch.autograd.set_multithreading_enabled(False)
        if way == "saved on cpu":
            return torch.autograd.graph.save_on_cpu()
        return torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2)

    def job(model: Any, watch: Any) -> None:
        with around():
            with watch:
                loss = model(torch.ones(2, 3)).square().sum()
            loss.backward()

    make = lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Tanh())  # noqa: E731
    both(make, job, tmp_path)
    assert nodes(tmp_path, "TanhBackward0") == ["2"]
