"""Which module a Node and a parameter belong to, however the model is put together: each job runs with and without us,
equal in every bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from support.recordings.in_process import recording, rows
from support.recordings.known_modules import equal_bits
from support.recordings.with_and_without import both, nodes

# What torch's own modules for compiling do is not for the tests to judge.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


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
        places = set()
        for _ in range(8):  # several: our thread may take the place of one
            net = nn.Linear(3, 2)
            places |= {id(parameter) for parameter in net.parameters()}
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
    of_nets = [(n, name) for n in range(8) for name in ("bias", "weight")]
    assert found == [*of_nets, (8, None)]
    assert rows(tmp_path, "SELECT count(*) FROM gradients") == [(16,)]


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


@pytest.mark.parametrize("generation", [1, 2], ids=["FSDP1", "FSDP2"])
@pytest.mark.filterwarnings("ignore")
def test_sharding_leaves_no_trace_in_names(generation: int, tmp_path: Path) -> None:
    from torch import distributed
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    if generation == 2 and not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("fully_shard of this torch (2.6) does not run on a CPU, also bare")

    def make() -> Any:
        net = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 1)))
        if generation == 2:
            fully_shard(net[1])
            fully_shard(net)
            return net
        net[1] = FullyShardedDataParallel(net[1], device_id=torch.device("cpu"))
        return FullyShardedDataParallel(net, device_id=torch.device("cpu"))

    def run() -> Any:
        torch.manual_seed(0)
        model = make()
        for _ in range(2):
            out = model(torch.ones(2, 3))
            out.sum().backward()
        return out.detach()

    store = vars(distributed)["HashStore"]()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        bare = run()
        with recording(tmp_path):
            assert equal_bits(bare, run())
    finally:
        distributed.destroy_process_group()
    assert nodes(tmp_path, "TanhBackward0") == ["1.0"] * 2
    assert sorted(nodes(tmp_path, "AddmmBackward0")) == ["0", "0", "1.1", "1.1"]
    assert rows(tmp_path, "SELECT DISTINCT module_fqn FROM module_calls ORDER BY 1") == [
        ("",), ("0",), ("1",), ("1.0",), ("1.1",),
    ]  # fmt: skip
    if generation == 2:  # the other accumulates into one flat parameter
        assert sorted(nodes(tmp_path, "AccumulateGrad", "parameter_fqn")) == [
            "0.bias", "0.bias", "0.weight", "0.weight", "1.1.bias", "1.1.bias", "1.1.weight", "1.1.weight",
        ]  # fmt: skip


class Forbidding(nn.Module):
    """Of a class that forbids to be hashed, compared and judged, and to be asked for what it lacks; its own child."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        vars(self)["_modules"] |= {"me": self, "a b\n": nn.Sequential(nn.Tanh())}

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    def __bool__(self) -> bool:
        raise AssertionError("judged")

    def __len__(self) -> int:
        raise AssertionError("measured")

    def __getattr__(self, name: str) -> Any:
        found = vars(self)["_modules"].get(name)
        if found is None:
            raise AssertionError(f"asked for {name}")
        return found

    def forward(self, x: torch.Tensor, again: bool = True) -> Any:
        x = vars(self)["_modules"]["a b\n"](self.layer(x)).sigmoid()
        return self.me(x, False) if again else x


def test_modules_of_classes_that_forbid_all_that_can_be_forbidden(tmp_path: Path) -> None:
    def run() -> Any:
        torch.manual_seed(0)
        net = Forbidding()
        out = net(torch.ones(2, 4))
        out.sum().backward()
        return out.detach(), net.layer.weight.grad

    bare = run()
    with recording(tmp_path):
        seen = run()
    assert equal_bits(bare, seen)
    calls = rows(
        tmp_path, "SELECT module_fqn, call_index, depth FROM module_calls ORDER BY start_ns"
    )
    assert calls == [
        ("", 0, 0), ("layer", 0, 1), ("a b\n", 0, 1), ("a b\n.0", 0, 2),
        ("", 1, 1), ("layer", 1, 2), ("a b\n", 1, 2), ("a b\n.0", 1, 3),
    ]  # fmt: skip
    assert sorted(nodes(tmp_path, "SigmoidBackward0", "module_fqn, call_index")) == [
        ("", 0),
        ("", 1),
    ]
    assert set(nodes(tmp_path, "TanhBackward0")) == {"a b\n.0"}


def test_wrapper_put_around_a_trained_model_takes_its_place(tmp_path: Path) -> None:
    def job(model: Any, watch: Any) -> None:
        model(torch.ones(2, 3)).sum().backward()
        wrappers: list[Any] = [nn.DataParallel(model), torch.compile(model[0], backend="eager")]
        for wrapped in wrappers:
            wrapped(torch.ones(2, 3)).sum().backward()

    both(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh()), job, tmp_path, watched=False)
    assert rows(tmp_path, "SELECT microbatch, root, module_fqn, call_index FROM module_calls "
                "ORDER BY start_ns") == [
        (0, 0, "", 0), (0, 0, "0", 0), (0, 0, "1", 0),
        (1, 0, "", 0), (1, 0, "0", 0), (1, 0, "1", 0), (2, 0, "0", 0),
    ]  # fmt: skip
