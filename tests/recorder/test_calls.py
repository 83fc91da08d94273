"""Calls of modules that are no plain calls on one thread: compiled, scripted, interrupted, on threads of the job, in
replicas."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.recordings.in_process import recording, rows
from support.recordings.known_modules import equal_bits
from support.recordings.with_and_without import both, nodes

# What torch's own modules for compiling do is not for the tests to judge.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


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


def graph_itself(graph: Any, inputs: Any) -> Any:
    """A backend as in torch's tutorial: it looks at the graph, and returns it."""
    return graph


@pytest.mark.parametrize("backend", ["aot_eager", graph_itself], ids=["aot", "graph"])
def test_graph_that_a_backend_calls_as_a_module_is_none(backend: Any, tmp_path: Path) -> None:
    def make() -> Any:
        torch._dynamo.reset()
        return torch.compile(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), backend=backend)

    def job(model: Any, watch: Any) -> None:
        model(torch.ones(2, 3)).sum().backward()
        with torch.no_grad():
            model(torch.ones(2, 3))

    both(make, job, tmp_path, watched=False)
    assert rows(tmp_path, "SELECT DISTINCT root, module_fqn, module_class FROM module_calls") == [
        (0, "", "Sequential")
    ]
    found = set(nodes(tmp_path, "%Backward%", "root, module_fqn"))
    assert found == {(0, ""), (None, None)}
    assert nodes(tmp_path, "SumBackward0") == [None]


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_script_modules_are_parts_like_others(tmp_path: Path) -> None:
    def make() -> nn.Module:
        scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.Tanh()))
        traced = torch.jit.trace(nn.Linear(4, 4), torch.ones(2, 4))
        return nn.Sequential(scripted, nn.Sequential(nn.Sigmoid()), traced)

    def job(model: Any, watch: Any) -> None:
        for _ in range(4):  # the last ones run what the first ones were profiled for
            model(torch.ones(2, 3)).sum().backward()

    both(make, job, tmp_path, watched=False)
    assert set(nodes(tmp_path, "SigmoidBackward0")) == {"1.0"}
    assert set(nodes(tmp_path, "%Backward%")) == {None, "0", "1.0", "2"}
    parameters = set(nodes(tmp_path, "AccumulateGrad", "parameter_fqn"))
    assert {"0.0.weight", "0.0.bias"} <= parameters and None not in parameters


class Cancelled(BaseException):
    """What no hook sees: torch calls hooks of a call that failed for an `Exception` alone."""


class Cancels(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise Cancelled


def test_call_that_was_interrupted_takes_no_node_that_comes_later(tmp_path: Path) -> None:
    def job(model: Any, watch: Any) -> None:
        with pytest.raises(Cancelled):
            model["cancelled"](torch.ones(2, 3))
        alone = torch.ones(2, 3, requires_grad=True).exp()
        (model["other"](torch.ones(2, 3)) * alone.sum()).sum().backward()
        with pytest.raises(Cancelled):
            model["cancelled"](torch.ones(2, 3))
        torch.ones(2, 3, requires_grad=True).cos().sum().backward()

    def make() -> nn.ModuleDict:
        cancelled = nn.Sequential(nn.Linear(3, 3), Cancels())
        cancelled[1].register_forward_hook(lambda *args: None)
        return nn.ModuleDict({"cancelled": cancelled, "other": nn.Sequential(nn.Linear(3, 3))})

    both(make, job, tmp_path, watched=False)
    # Made when nobody could know that the call had ended: not told. Made since: no module's.
    assert nodes(tmp_path, "ExpBackward0") == [None]
    assert nodes(tmp_path, "CosBackward0") == [None]
    assert nodes(tmp_path, "MulBackward0") == [None]
    assert nodes(tmp_path, "AddmmBackward0", "root, module_fqn") == [(1, "0")]
    assert rows(
        tmp_path, "SELECT unattributed_count FROM backward_passes ORDER BY backward_index"
    ) == [(1,), (2,)]  # exp; cos and the sum after it
    assert rows(tmp_path, "SELECT root, module_fqn, depth FROM module_calls ORDER BY start_ns") == [
        (0, "0", 1), (1, "", 0), (1, "0", 1), (0, "0", 1),
    ]  # fmt: skip
    assert rows(tmp_path, "SELECT root, name FROM inputs ORDER BY record_index") == [
        (0, "input"), (1, "input"), (0, "input"),
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_shape_inference_of_a_pipeline_stage_is_no_call(tmp_path: Path) -> None:
    from torch import distributed
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    def job(model: Any, watch: Any) -> Any:
        stage = PipelineStage(model, 0, 1, torch.device("cpu"))
        schedule = ScheduleGPipe(
            stage, 2, loss_fn=lambda out, target: (out - target).square().mean()
        )
        losses: list[torch.Tensor] = []
        for _ in range(2):
            schedule.step(torch.ones(4, 3), target=torch.zeros(4, 2), losses=losses)
        return [loss.detach() for loss in losses]

    store = vars(distributed)["HashStore"]()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        both(lambda: nn.Sequential(nn.Linear(3, 2), nn.Tanh()), job, tmp_path, watched=False)
    finally:
        distributed.destroy_process_group()
    assert rows(tmp_path, "SELECT count(*) FROM module_calls WHERE module_fqn = ''") == [(4,)]
    assert rows(tmp_path, "SELECT kind, count(*) FROM backward_passes GROUP BY 1") == [
        ("backward", 4)
    ]
    assert rows(tmp_path, "SELECT abandoned_forwards FROM steps") == [(0,)]
