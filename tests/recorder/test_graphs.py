"""Every Node in its module and phase, in every kind of graph: each case runs with and without us, equal in every
bit, and its rows are compared with what is known without us."""

from __future__ import annotations

import contextlib
import copy
import os
import resource
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from support.recorded import recording, rows
from support.watched import Watch, equal_bits

Job = Callable[[Any, Any], Any]

# What torch's own modules for compiling do is not for the tests to judge.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


def both(make: Callable[[], Any], job: Job, path: Path, *, watched: bool = True) -> Watch | None:
    """Run a job without and with recording: equal in every bit. Where the forward is watched, every row that has
    a number names the module that made it."""

    def run(watching: Callable[[nn.Module], Any]) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = make()
        watch = watching(model)
        result = job(model, watch)
        left = {
            name: (parameter.detach().clone(), parameter.grad)
            for name, parameter in model.named_parameters()
        }
        return watch, (result, left)

    _, bare = run(lambda model: contextlib.nullcontext())
    with recording(path):
        watch, seen = run(Watch if watched else lambda model: contextlib.nullcontext())
    assert equal_bits(bare, seen), "recording changed the job"
    assert rows(path, "SELECT problems FROM ranks") == [("[]",)]
    if not watched:
        return None
    found = rows(path, "SELECT autograd_seq, module_fqn FROM node_events WHERE autograd_seq >= 0")
    assert found
    assert {seq: fqn for seq, fqn in found} == {seq: watch.owner[seq] for seq, _ in found}
    assert rows(path, "SELECT sum(unattributed_count) FROM backward_passes") == [(0,)]
    assert isinstance(watch, Watch)
    return watch


def nodes(path: Path, name: str, columns: str = "module_fqn") -> list[Any]:
    """These columns of every run of a Node of that name, in order."""
    found = rows(
        path,
        f"SELECT {columns} FROM node_events WHERE node_name LIKE '{name}' "
        "ORDER BY step, backward_index, event_index",
    )
    return [row[0] if len(row) == 1 else row for row in found]


class Every(nn.Module):
    """ModuleDict, ModuleList, ParameterList and ParameterDict, a module without parameters, one called twice,
    one called from another's hook, and code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Sequential(nn.Linear(4, 4))})
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(2)])
        self.shift = nn.ParameterDict({"left": nn.Parameter(torch.zeros(4))})
        self.act = nn.Softplus()
        self.probe = nn.Linear(4, 4)
        self.twice = nn.Linear(4, 4)
        self.layers[1].register_forward_hook(lambda module, args, out: out + self.probe(out))
        self.layers[1].register_forward_pre_hook(lambda module, args: (self.act(args[0]),))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.branch["a"](x) * self.branch["b"](x)
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = self.act(layer(x)) * scale + self.shift["left"]
        return torch.as_tensor(self.twice(self.twice(x).sin()))


def test_containers_hooks_that_call_modules_and_repeated_calls(tmp_path: Path) -> None:
    def job(model: Any, watch: Any) -> None:
        with watch:
            loss = F.mse_loss(model(torch.ones(3, 4)), torch.zeros(3, 4))
        loss.backward()

    torch.manual_seed(0)
    both(Every, job, tmp_path, watched=False)
    assert nodes(tmp_path, "MseLossBackward0") == [None]
    assert sorted(nodes(tmp_path, "AddmmBackward0", "module_fqn, call_index")) == [
        ("branch.a", 0),
        ("branch.b.0", 0),
        ("layers.0", 0),
        ("layers.1", 0),
        ("probe", 0),
        ("twice", 0),
        ("twice", 1),
    ]
    # Called from the pre-hook of layers.1, then twice by the root.
    assert sorted(nodes(tmp_path, "SoftplusBackward0", "module_fqn, call_index")) == [
        ("act", 0),
        ("act", 1),
        ("act", 2),
    ]
    assert nodes(tmp_path, "SinBackward0") == [""]
    assert sorted(nodes(tmp_path, "AccumulateGrad", "parameter_fqn")) == sorted(
        name for name, _ in Every().named_parameters()
    )


def test_module_that_is_gone_before_backward_keeps_its_name(tmp_path: Path) -> None:
    def job(model: Any, watch: Any) -> None:
        inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        model.inner = inner
        with torch.no_grad():
            hidden = model[0](torch.ones(2, 4))
        out = model(hidden)
        loss = inner(out).sum()
        del model.inner, inner
        loss.backward()

    both(lambda: nn.Sequential(nn.Linear(4, 4)), job, tmp_path, watched=False)
    assert nodes(tmp_path, "TanhBackward0") == ["inner.1", "inner.1"]
    assert sorted(nodes(tmp_path, "AddmmBackward0")) == ["0", "inner.0", "inner.0"]


def test_parameter_whose_module_is_gone_keeps_its_name_and_no_other_tensor_takes_it(
    tmp_path: Path,
) -> None:
    with recording(tmp_path):
        net = nn.Linear(3, 2)
        places = {id(parameter) for parameter in net.parameters()}
        loss = net(torch.ones(2, 3)).sum()
        del net
        loss.backward()
        del loss
        leaves = [nn.Parameter(torch.ones(2, 3)) for _ in range(100)]
        taken = [leaf for leaf in leaves if id(leaf) in places]
        assert taken, "the test is about a tensor in the place of a parameter that was freed"
        taken[0].sum().backward()
    found = rows(tmp_path, "SELECT backward_index, parameter_fqn FROM node_events "
                 "WHERE node_name = 'AccumulateGrad' ORDER BY 1, 2")  # fmt: skip
    assert found == [(0, "bias"), (0, "weight"), (1, None)]
    assert rows(tmp_path, "SELECT count(*) FROM gradients") == [(2,)]


def test_functional_call_names_modules_and_the_leaves_that_stand_in(tmp_path: Path) -> None:
    def job(model: Any, watch: Any) -> Any:
        values = {k: (v * 2).detach().requires_grad_() for k, v in model.named_parameters()}
        with watch:
            out = torch.func.functional_call(model, values, (torch.ones(2, 3),))
            scaled = {k: v * 3 for k, v in model.named_parameters()}
            out = out + torch.func.functional_call(model, scaled, (torch.ones(2, 3),))
            loss = out.sum()
        loss.backward()
        return [value.grad for value in values.values()]

    both(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), job, tmp_path)
    assert sorted(nodes(tmp_path, "TanhBackward0", "module_fqn, call_index")) == [
        ("1", 0),
        ("1", 1),
    ]
    assert sorted(str(f) for f in nodes(tmp_path, "AccumulateGrad", "parameter_fqn")) == sorted(
        ["None"] * 4 + ["0.weight", "0.bias", "2.weight", "2.bias"]
    )
    assert nodes(tmp_path, "MulBackward0") == [None] * 4


def test_teacher_without_gradients_and_student_are_two_roots(tmp_path: Path) -> None:
    def job(model: Any, watch: Any) -> None:
        with torch.no_grad():
            target = model["teacher"](torch.ones(2, 3))
        F.mse_loss(model["student"](torch.ones(2, 3)), target).backward()

    def make() -> nn.ModuleDict:
        return nn.ModuleDict(
            {name: nn.Sequential(nn.Linear(3, 3)) for name in ("teacher", "student")}
        )

    both(make, job, tmp_path, watched=False)
    assert rows(tmp_path, "SELECT root, module_fqn, phase FROM module_calls ORDER BY start_ns") == [
        (0, "", "no_grad"), (0, "0", "no_grad"), (1, "", "forward"), (1, "0", "forward"),
    ]  # fmt: skip
    assert nodes(tmp_path, "AddmmBackward0", "root, module_fqn") == [(1, "0")]
    assert rows(tmp_path, "SELECT DISTINCT root, parameter_fqn FROM gradients ORDER BY ALL") == [
        (1, "0.bias"), (1, "0.weight"),
    ]  # fmt: skip


def test_wrappers_inside_one_another_leave_no_trace(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.optim.swa_utils import AveragedModel

    def make() -> nn.Module:
        net: Any = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 1)))
        net[1][1] = checkpoint_wrapper(net[1][1])
        net[0] = torch.compile(net[0], backend="eager")
        return AveragedModel(nn.DataParallel(net))

    def job(model: Any, watch: Any) -> None:
        model(torch.ones(2, 3)).sum().backward()

    both(make, job, tmp_path, watched=False)
    assert rows(
        tmp_path,
        "SELECT root, module_fqn, module_class, depth FROM module_calls WHERE phase = 'forward' "
        "ORDER BY start_ns",
    ) == [
        (0, "", "Sequential", 0),
        (0, "0", "Linear", 1),
        (0, "1", "Sequential", 1),
        (0, "1.0", "Tanh", 2),
        (0, "1.1", "Linear", 2),
    ]
    assert sorted(nodes(tmp_path, "AccumulateGrad", "parameter_fqn")) == [
        "0.bias", "0.weight", "1.1.bias", "1.1.weight",
    ]  # fmt: skip


def test_parametrized_weights_are_made_by_their_own_modules(tmp_path: Path) -> None:
    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    def make() -> nn.Module:
        net = nn.Sequential(
            parametrizations.weight_norm(nn.Linear(3, 4)),
            parametrizations.spectral_norm(nn.Linear(4, 4)),
            nn.Linear(4, 2),
        )
        parametrize.register_parametrization(net[2], "weight", Doubled())
        return net

    def job(model: Any, watch: Any) -> None:
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()

    both(make, job, tmp_path, watched=False)
    assert nodes(tmp_path, "WeightNorm%") == ["0.parametrizations.weight.0"] * 2
    assert nodes(tmp_path, "VdotBackward0") == ["1.parametrizations.weight.0"] * 2
    assert nodes(tmp_path, "MulBackward0") == ["2.parametrizations.weight.0"] * 2
    # Registering one calls it, as the model is built: it is no root for that.
    assert rows(tmp_path, "SELECT DISTINCT root FROM node_events WHERE root IS NOT NULL") == rows(
        tmp_path, "SELECT root FROM module_calls WHERE module_class = 'Sequential' LIMIT 1"
    )
    assert set(nodes(tmp_path, "AccumulateGrad", "parameter_fqn")) == {
        name for name, _ in make().named_parameters()
    }


def test_part_called_alone_while_the_model_is_built_is_named_as_a_part(tmp_path: Path) -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(nn.Linear(3, 5), nn.Tanh())
            width = self.features(torch.zeros(1, 3)).shape[1]
            self.head = nn.Linear(width, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.head(self.features(x)))

    def job(model: Any, watch: Any) -> None:
        with watch:
            loss = model(torch.ones(2, 3)).sum()
        loss.backward()
        model.features(torch.ones(2, 3)).sum().backward()  # alone, later: the same names

    both(Sized, lambda model, watch: job(model, watch), tmp_path, watched=False)
    assert sorted(set(nodes(tmp_path, "AccumulateGrad", "parameter_fqn"))) == sorted(
        name for name, _ in Sized().named_parameters()
    )
    assert nodes(tmp_path, "TanhBackward0") == ["features.1"] * 2


def test_module_injected_later_moves_what_it_wraps(tmp_path: Path) -> None:
    class Lora(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down, self.up = nn.Linear(3, 2, bias=False), nn.Linear(2, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.base(x) + self.up(self.down(x)))

    def job(model: Any, watch: Any) -> None:
        model(torch.ones(2, 3, requires_grad=True)).sum().backward()
        model[0] = Lora(model[0])
        model.add_module("late", nn.Linear(1, 1))
        model(torch.ones(2, 3, requires_grad=True)).sum().backward()

    both(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), job, tmp_path, watched=False)  # fmt: skip
    assert rows(tmp_path, "SELECT module_fqn, call_index, depth FROM module_calls "
                "WHERE microbatch = 1 ORDER BY start_ns") == [
        ("", 0, 0), ("0", 0, 1), ("0.base", 0, 2), ("0.down", 0, 2), ("0.up", 0, 2),
        ("1", 0, 1), ("2", 0, 1), ("late", 0, 1),
    ]  # fmt: skip
    second = "SELECT module_fqn FROM node_events WHERE microbatch = 1 AND node_name = "
    assert rows(tmp_path, second + "'MmBackward0' ORDER BY 1") == [("0.down",), ("0.up",)]
    assert ("0.base",) in rows(tmp_path, second + "'AddmmBackward0' ORDER BY 1")
    assert {fqn for (fqn,) in rows(
        tmp_path, "SELECT parameter_fqn FROM gradients WHERE microbatch = 1 AND point = 'local'"
    )} == {"0.down.weight", "0.up.weight", "2.weight", "2.bias", "late.weight", "late.bias"}  # fmt: skip


@pytest.mark.parametrize("whole", [True, False], ids=["model", "block"])
def test_compiled_region_is_one_node_of_its_module(whole: bool, tmp_path: Path) -> None:
    def make() -> Any:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        net: Any = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        if whole:
            return torch.compile(net, backend="aot_eager")
        net[1] = torch.compile(net[1], backend="aot_eager")
        return net

    def job(model: Any, watch: Any) -> Any:
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
        return dict(torch._dynamo.utils.counters["frames"])

    both(make, job, tmp_path, watched=False)
    fqn = "" if whole else "1"
    name = "module_fqn, call_index, microbatch"
    assert nodes(tmp_path, "CompiledFunctionBackward", name) == [(fqn, 0, 0), (fqn, 0, 1)]
    assert nodes(tmp_path, "TanhBackward0") == []
    assert (
        rows(
            tmp_path,
            f"SELECT module_class, call_index, output_numel FROM module_calls WHERE module_fqn = '{fqn}' "
            "AND phase = 'forward'",
        )
        == [("Sequential", 0, 8)] * 2
    )
    assert set(nodes(tmp_path, "AccumulateGrad", "parameter_fqn")) == {
        "0.weight", "0.bias", "1.0.weight", "1.0.bias",
    }  # fmt: skip


def test_compiled_model_that_falls_back_is_recorded_once(tmp_path: Path) -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.layer(x))

    def make() -> Any:
        net = Breaks()
        net.forward = torch.compiler.disable(net.forward)  # type: ignore[method-assign]
        return torch.compile(net, backend="eager")

    both(make, lambda m, watch: m(torch.ones(2, 3)).sum().backward(), tmp_path, watched=False)
    assert nodes(tmp_path, "AddmmBackward0") == ["layer"]
    assert rows(tmp_path, "SELECT module_fqn, call_index, count(*) FROM module_calls "
                "GROUP BY ALL ORDER BY 1") == [("", 0, 1), ("layer", 0, 1)]  # fmt: skip


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


def test_modules_on_threads_of_the_job(tmp_path: Path) -> None:
    """Two threads run forward, the job's own thread runs backward, over code of its own between them."""

    def job(model: Any, watch: Any) -> None:
        x = model["first"](torch.ones(2, 3))
        outs: dict[str, Any] = {}

        def work(name: str) -> None:
            outs[name] = model[name](x)

        for name in ("left", "right"):
            thread = threading.Thread(target=work, args=(name,))
            thread.start()
            thread.join()
        model["last"](outs["left"] * outs["right"]).sum().backward()

    def make() -> nn.ModuleDict:
        sides = {s: nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()) for s in ("left", "right")}
        return nn.ModuleDict({"first": nn.Linear(3, 4), **sides, "last": nn.Softplus()})

    both(make, job, tmp_path, watched=False)
    assert nodes(tmp_path, "SoftplusBackward0", "root, module_fqn") == [(3, "")]
    assert sorted(nodes(tmp_path, "SigmoidBackward0", "root, module_fqn")) == [(1, "1"), (2, "1")]
    assert sorted(nodes(tmp_path, "AddmmBackward0", "root, module_fqn")) == [
        (0, ""), (1, "0"), (2, "0"),
    ]  # fmt: skip
    assert rows(tmp_path, "SELECT sum(unattributed_count) FROM backward_passes") == [(0,)]


def test_node_that_leads_to_no_output_of_another_threads_module_is_not_guessed(
    tmp_path: Path,
) -> None:
    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> Any:
            self.aside = self.layer(x).cos().sum()
            return self.layer(x)

    first, second = nn.Sequential(*(nn.Linear(3, 3) for _ in range(9))), Aside()

    def job() -> None:
        first(torch.ones(2, 3)).sum().backward()
        thread = threading.Thread(target=second, args=(torch.ones(2, 3),))
        thread.start()
        thread.join()
        second.aside.backward()

    with recording(tmp_path):
        outer = threading.Thread(target=job)  # a new one, which counts from 0 as the other does
        outer.start()
        outer.join()
    assert nodes(tmp_path, "CosBackward0", "root, module_fqn") == [(None, None)]
    ((unattributed,),) = rows(
        tmp_path, "SELECT unattributed_count FROM backward_passes WHERE backward_index = 1"
    )
    assert unattributed >= 3


def test_threads_that_train_each_a_model_of_their_own(tmp_path: Path) -> None:
    models = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in range(3)]

    def work(model: Any) -> None:
        for _ in range(3):
            model(torch.ones(2, 3)).square().sum().backward()

    bare = copy.deepcopy(models)
    for model in bare:
        work(model)
    with recording(tmp_path):
        work(models[0])
        threads = [threading.Thread(target=work, args=(model,)) for model in models[1:]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for one, other in zip(bare, models, strict=True):
        assert equal_bits([p.grad for p in one.parameters()], [p.grad for p in other.parameters()])
    assert rows(
        tmp_path,
        "SELECT root, module_fqn, count(*) FROM node_events WHERE node_name = 'TanhBackward0' "
        "GROUP BY ALL ORDER BY ALL",
    ) == [(0, "1", 3), (1, "1", 3), (2, "1", 3)]
    own = rows(
        tmp_path, "SELECT DISTINCT module_fqn FROM node_events WHERE node_name = 'PowBackward0'"
    )
    assert own == [(None,)]


def test_replicas_of_data_parallel_are_the_module_they_stand_for(tmp_path: Path) -> None:
    """As `nn.DataParallel` makes them on several GPUs, each for one call on a thread of its own."""

    def replica(module: nn.Module) -> Any:
        twin: Any = module._replicate_for_data_parallel()
        for name, child in module._modules.items():
            assert child is not None
            twin._modules[name] = replica(child)
        for name, parameter in module._parameters.items():
            assert parameter is not None
            setattr(twin, name, parameter.view_as(parameter))
        return twin

    def call(model: Any, part: torch.Tensor, outs: list[Any]) -> None:
        outs.append(model(part))

    def job(model: Any, watch: Any) -> None:
        for _ in range(2):
            outs: list[Any] = []
            for part in torch.ones(4, 3).chunk(2):
                twin = replica(model)
                thread = threading.Thread(target=call, args=(twin, part, outs))
                thread.start()
                thread.join()
            torch.cat(outs).sum().backward()

    make = lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh())  # noqa: E731

    def called_first(model: Any, watch: Any) -> None:
        model(torch.ones(1, 3)).sum().backward()
        job(model, watch)

    both(make, called_first, tmp_path, watched=False)
    assert rows(tmp_path, "SELECT DISTINCT root FROM module_calls") == [(0,)]
    assert nodes(tmp_path, "TanhBackward0") == ["1"] * 5
    assert set(nodes(tmp_path, "AddmmBackward0")) == {"0"}


LONG_CHAIN = """
import sys, torch
x = torch.randn(3, requires_grad=True)
y, kept = x, None
for i in range({count}):
    y = y * 1.0000001
    if i == {count} // 2: kept = y
loss = y.sum()
for again in range({passes}):
    loss.backward(retain_graph=True)
print(x.grad.view(torch.int32).tolist())
{ends}
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "ends",
    [
        "del loss, y, kept",
        "del y, loss; other = kept.sum(); other.backward(); del kept, other",
        "import threading; box = [loss]; del loss, y, kept\n"
        "t = threading.Thread(target=box.clear); t.start(); t.join()",
        "class Knot: pass\na = Knot(); a.a, a.loss = a, loss; del a, loss, y, kept; import gc; gc.collect()",
        "",
    ],
    ids=["at once", "half is kept", "on a thread", "by the collector", "never"],
)
def test_chain_of_fifty_thousand_nodes_is_recorded_whole_and_freed(
    ends: str, tmp_path: Path
) -> None:
    source = LONG_CHAIN.format(count=50_000, passes=1, ends=ends)
    bare, seen = (python(source, directory) for directory in ("", str(tmp_path / "run")))
    assert bare.returncode == 0, bare.stderr
    assert (seen.returncode, seen.stdout, seen.stderr) == (0, bare.stdout, "")
    assert rows(
        tmp_path / "run",
        "SELECT count(*), max(event_index) FROM node_events WHERE backward_index = 0",
    ) == [(50_002, 50_001)]


@pytest.mark.slow
def test_step_of_two_hundred_thousand_nodes(tmp_path: Path) -> None:
    source = """
import torch
net = torch.nn.Linear(2, 2)
x = torch.ones(1, 2)
total = net(x).sum()
for i in range(66_666):
    total = total + (x * net.weight[0, 0] if i % 2 else net.bias.sum() * 2).sum()
total.backward()
print(net.weight.grad.view(torch.int32).tolist(), net.bias.grad.view(torch.int32).tolist())
del total
"""
    bare, seen = (python(source, directory) for directory in ("", str(tmp_path / "run")))
    assert bare.returncode == 0, bare.stderr
    assert (seen.returncode, seen.stdout, seen.stderr) == (0, bare.stdout, "")
    ((ran, distinct, counted),) = rows(
        tmp_path / "run",
        "SELECT count(*), count(DISTINCT autograd_seq), any_value(node_count) FROM node_events "
        "JOIN backward_passes USING (step, backward_index)",
    )
    assert ran == counted > 200_000 and distinct == ran - 2


def python(source: str, directory: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"GRADTRACE_DIR": directory, "OMP_NUM_THREADS": "1"}
    environment |= {"GRADTRACE_STRICT": "1", "GRADTRACE_SUMMARY": "norms"}
    return subprocess.run(
        [sys.executable, "-c", source],
        env=environment,
        preexec_fn=_small_stack,
        capture_output=True,
        text=True,
        timeout=250,
    )


def _small_stack() -> None:
    """2 MiB: room for a chain of some 10,000 Nodes of which each frees the next."""
    resource.setrlimit(resource.RLIMIT_STACK, (2 << 20, resource.RLIM_INFINITY))


def test_long_graph_is_freed_soon_after_the_job_lets_go(tmp_path: Path) -> None:
    """Nothing of a graph that is too long to be freed in one go outlives the next line of the job."""
    with recording(tmp_path, summary="off"):
        y = x = torch.ones(2, requires_grad=True)
        held = []
        for turn in range(20_000):
            y = y * 1.0
            if turn % 1000 == 0:
                node: Any = y.grad_fn
                held.append(weakref.ref(node.metadata.setdefault("kept", Kept())))
                del node
        y.sum().backward()
        assert x.grad is not None
        del y
        sum(range(10))
        assert [ref for ref in held if ref() is not None] == []


class Kept:
    """Dies with the Node that it lies in."""


@pytest.mark.filterwarnings("ignore")
def test_wrapper_that_shards_leaves_no_trace_in_names(tmp_path: Path) -> None:
    from torch import distributed
    from torch.distributed.fsdp import FullyShardedDataParallel

    store = vars(distributed)["HashStore"]()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:

        def make() -> Any:
            net = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 1)))
            net[1] = FullyShardedDataParallel(net[1], device_id=torch.device("cpu"))
            return FullyShardedDataParallel(net, device_id=torch.device("cpu"))

        def job(model: Any, watch: Any) -> None:
            model(torch.ones(2, 3)).sum().backward()

        both(make, job, tmp_path, watched=False)
    finally:
        distributed.destroy_process_group()
    assert nodes(tmp_path, "TanhBackward0") == ["1.0"]
    assert sorted(nodes(tmp_path, "AddmmBackward0")) == ["0", "1.1"]
    assert rows(tmp_path, "SELECT DISTINCT module_fqn FROM module_calls ORDER BY 1") == [
        ("",), ("0",), ("1",), ("1.0",), ("1.1",),
    ]  # fmt: skip
