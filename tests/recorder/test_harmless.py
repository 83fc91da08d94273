"""Jobs that recording could disturb: each runs as it does without us, and is recorded as far as it can be."""

from __future__ import annotations

import collections.abc
import copy
import dataclasses
import io
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from support.recordings.in_process import recording, rows


def small() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def run(source: str, directory: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"GRADTRACE_DIR": str(directory), "OMP_NUM_THREADS": "1"} | more
    return subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, timeout=100
    )


def test_parameter_whose_storage_is_freed_is_not_read(tmp_path: Path) -> None:
    class Sharded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(64, 64))
            self.keep = self.w.detach().clone()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.w.untyped_storage().resize_(64 * 64 * 4)
            self.w.data.copy_(self.keep)
            return x @ self.w

    net = Sharded()
    net.w.untyped_storage().resize_(0)
    with recording(tmp_path / "run"):
        net(torch.randn(3, 64)).sum().backward()
    ((unsummarised,),) = rows(tmp_path / "run", "SELECT unsummarised FROM ranks")
    assert "freed storage" in unsummarised


def test_view_beyond_the_end_of_its_storage_is_not_read(tmp_path: Path) -> None:
    short = torch.randn(4096, 64)[8:]
    short.untyped_storage().resize_(64)
    with recording(tmp_path / "run"):
        nn.Identity()(short)
    ((unsummarised,),) = rows(tmp_path / "run", "SELECT unsummarised FROM ranks")
    assert "freed storage" in unsummarised


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(lambda: torch.randn(3, dtype=torch.float64), id="float64"),
        pytest.param(lambda: torch.tensor(3).expand(5), id="expanded integer"),
        pytest.param(lambda: torch.zeros(0, 4), id="empty"),
        pytest.param(lambda: torch.tensor(2.0, dtype=torch.float64).expand(1), id="one element"),
        pytest.param(lambda: torch.randn(3, 4).to_sparse(), id="sparse"),
        pytest.param(lambda: torch.randn(4).to(torch.float8_e4m3fn), id="float8"),
        pytest.param(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), id="nested"),
        pytest.param(lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), id="q"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*")
def test_odd_tensor_costs_its_summary_at_most(value: Any, tmp_path: Path) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, odd: Any) -> Any:
            return self.layer(torch.ones(2, 4))

    with recording(tmp_path / "run"):
        Takes()(value()).sum().backward()
    assert rows(tmp_path / "run", "SELECT problems FROM ranks") == [("[]",)]
    assert rows(tmp_path / "run", "SELECT count(*) FROM module_calls") == [(2,)]


def test_gradient_of_a_double_precision_sum_is_summarised(tmp_path: Path) -> None:
    with recording(tmp_path / "run"):
        small().double()(torch.randn(5, 4, dtype=torch.float64)).sum().backward()
    assert rows(
        tmp_path / "run",
        "SELECT grad_output_norm, grad_input_norm FROM node_events WHERE node_name = 'SumBackward0'",
    ) == [(1.0, pytest.approx(15**0.5))]


SIGNALS = """
import random, signal, time, torch
def mlp(): return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
m, m2, x = mlp(), mlp(), torch.randn(5, 4)
class TimedOut(Exception): pass
runs = caught = 0
def handler(*a):
    global runs
    runs += 1
    with torch.enable_grad(): m2(x).sum().backward()
    if {raises}: raise TimedOut
m(x).sum().backward(); m2(x)
signal.signal(signal.SIGALRM, handler)
until = time.time() + 4
while time.time() < until:
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.002 + random.random() * 0.004)
        end = time.time() + 0.05
        while time.time() < end: m(x).sum().backward()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except TimedOut: caught += 1
signal.setitimer(signal.ITIMER_REAL, 0)
print(runs > 20, caught == runs if {raises} else caught == 0)
"""


@pytest.mark.parametrize("raises", [False, True])
def test_signal_handler_may_train_or_raise(raises: bool, tmp_path: Path) -> None:
    done = run(SIGNALS.format(raises=raises), tmp_path / "run")
    assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr
    assert done.stderr == ""


def test_recursive_module_with_a_hook_of_the_job(tmp_path: Path) -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, depth: int = 3) -> Any:
            return self.layer(x) if depth == 0 else self(torch.tanh(self.layer(x)), depth - 1)

    def job(net: Any) -> torch.Tensor:
        handle = net.register_forward_hook(lambda m, i, o: o * 2)
        net(torch.ones(2, 4)).sum().backward()
        handle.remove()
        gradient: torch.Tensor = net.layer.weight.grad
        return gradient

    torch.manual_seed(0)
    bare = Recursive()
    seen = copy.deepcopy(bare)
    with recording(tmp_path / "run"):
        result = job(seen)
    assert torch.equal(result, job(bare))
    assert rows(
        tmp_path / "run",
        "SELECT module_fqn, count(*), count(DISTINCT call_index) FROM module_calls GROUP BY 1 ORDER BY 1",
    ) == [("", 4, 4), ("layer", 4, 4)]
    assert rows(tmp_path / "run", "SELECT count(*) FROM inputs") == [(1,)]
    assert not seen._forward_hooks


class Snapshot:
    """A hook of the job's that copies and saves its module."""

    copies: ClassVar[list[Any]] = []
    files: ClassVar[list[bytes]] = []

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.copies.append(copy.deepcopy(module))
        saved = io.BytesIO()
        torch.save(module, saved)
        self.files.append(saved.getvalue())


def test_module_is_copied_and_saved_inside_its_own_hook(tmp_path: Path) -> None:
    net, copies, files = small(), Snapshot.copies, Snapshot.files
    net[0].register_forward_hook(Snapshot())
    with recording(tmp_path / "run"):
        net(torch.ones(2, 4)).sum().backward()
        copies[0](torch.ones(2, 4)).sum().backward()
        loaded = torch.load(io.BytesIO(files[0]), weights_only=False)
        loaded(torch.ones(2, 4)).sum().backward()
    # A file that the job saves loads where we are not installed.
    assert len(loaded._forward_hooks) == 2 and b"gradtrace" not in files[0]


def test_parameters_may_be_swapped(tmp_path: Path) -> None:
    net = small()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with recording(tmp_path / "run"):
            net(torch.ones(2, 4)).sum().backward()
            net.zero_grad()
            net.double()(torch.ones(2, 4).double()).sum().backward()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert rows(
        tmp_path / "run", "SELECT dtype, count(*) FROM gradients GROUP BY 1 ORDER BY 1"
    ) == [("float32", 4), ("float64", 4)]


TRACED = """
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh())
print(torch.jit.trace(net, torch.randn(5, 4)).code)
"""


def test_first_call_may_be_traced(tmp_path: Path) -> None:
    seen = run(TRACED, tmp_path / "run")
    bare = run(TRACED, tmp_path / "run", GRADTRACE_DIR="")
    assert (seen.returncode, seen.stdout) == (0, bare.stdout)
    assert seen.stderr == bare.stderr


def test_symbolic_sizes_stay_symbolic(tmp_path: Path) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    def job() -> tuple[str, list[str]]:
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        with mode:
            net = small()
            fake = mode.from_tensor(torch.randn(5, 4), static_shapes=False)
            out = net(fake)
        assert mode.shape_env is not None
        return str(out.shape), [str(guard.expr) for guard in mode.shape_env.guards]

    bare = job()
    with recording(tmp_path / "run"):
        assert job() == bare


def test_leaf_frozen_after_the_forward_takes_no_hook(tmp_path: Path) -> None:
    net = small()
    with recording(tmp_path / "run"):
        loss = net(torch.ones(2, 4)).sum()
        net[0].weight.requires_grad_(False)
        loss.backward()
    assert rows(tmp_path / "run", "SELECT count(*) FROM node_events") != [(0,)]


def test_batched_gradients_and_lazy_modules_are_counted_not_read(tmp_path: Path) -> None:
    lazy = nn.Sequential(nn.LazyLinear(3))
    with recording(tmp_path / "run"):
        x = torch.randn(3, requires_grad=True)
        torch.autograd.grad([x * 2], [x], [torch.eye(3)], is_grads_batched=True)
        lazy(torch.ones(2, 4)).sum().backward()
    ((problems,),) = rows(tmp_path / "run", "SELECT problems FROM ranks")
    assert problems == "[]"


def test_threads_that_come_first_at_once_are_all_recorded(tmp_path: Path) -> None:
    start = threading.Barrier(4)

    def work() -> None:
        net = small()
        start.wait()
        for _ in range(3):
            net(torch.ones(2, 4)).sum().backward()

    with recording(tmp_path / "run"):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert rows(tmp_path / "run", "SELECT count(*) FROM backward_passes") == [(12,)]


def test_node_made_on_another_thread_is_null_and_counted_where_it_cannot_be_told(
    tmp_path: Path,
) -> None:
    first, second, made = small(), small(), list[torch.Tensor]()
    with recording(tmp_path / "run"):
        for _ in range(5):
            first(torch.ones(2, 4)).sum().backward()
        threads = [threading.Thread(target=lambda: made.append(second(torch.ones(2, 4)).sum()))]
        threads[0].start()
        threads[0].join()
        made[0].backward()
    found = rows(
        tmp_path / "run",
        "SELECT DISTINCT root, module_fqn FROM node_events n JOIN "
        "(SELECT max(backward_index) AS last FROM backward_passes) ON backward_index = last "
        "WHERE parameter_fqn IS NULL AND root IS NOT NULL AND root <> 1",
    )
    assert found == []


def test_pass_over_a_shared_graph_from_a_hook_of_its_root(tmp_path: Path) -> None:
    net = small()
    hidden = net[0](torch.ones(2, 4))
    with recording(tmp_path / "run"):
        other, loss = hidden.square().sum(), net[2](net[1](net[0](torch.ones(2, 4)))).sum()
        loss.register_hook(lambda g: other.backward(retain_graph=True))
        loss.backward()
    found = rows(
        tmp_path / "run",
        "SELECT backward_index, count(*), count(*) FILTER (node_name = 'SumBackward0') "
        "FROM node_events GROUP BY 1 ORDER BY 1",
    )
    assert [row[2] for row in found] == [1, 1]
    assert rows(
        tmp_path / "run", "SELECT backward_index, count(*) FROM gradients GROUP BY 1 ORDER BY 1"
    ) == [(0, 4), (1, 2)]


@dataclasses.dataclass
class Lazy:
    """A property under the name of a field, as libraries make them that load what is asked for."""

    x: torch.Tensor
    later: Any = None


Lazy.later = property(lambda self: 1 / 0)


class Refuses(collections.abc.Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise OSError

    def __iter__(self) -> Any:
        return iter("ab")

    def __len__(self) -> int:
        return 2


def test_arguments_that_refuse_to_be_looked_at_hold_nothing_for_us(tmp_path: Path) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, lazy: Any, refuses: Any, rest: Any) -> Any:
            return self.layer(lazy.x + next(rest))

    lazy = Lazy.__new__(Lazy)
    lazy.x = torch.ones(2, 4)
    with recording(tmp_path / "run"):
        Takes()(lazy, Refuses(), iter([1])).sum().backward()
    assert rows(tmp_path / "run", "SELECT name FROM inputs") == [("lazy.x",)]


def test_long_list_of_numbers_is_not_walked(tmp_path: Path) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, numbers: Any, x: torch.Tensor) -> Any:
            return self.layer(x)

    knot: list[Any] = []
    knot += [knot] * 20
    with recording(tmp_path / "run"):
        Takes()(list(range(10**6)), torch.ones(2, 4)).sum().backward()
        Takes()(knot, torch.ones(2, 4)).sum().backward()
    assert rows(tmp_path / "run", "SELECT name FROM inputs") == [("x",), ("x",)]


def test_compiled_block_has_no_more_graph_breaks(tmp_path: Path) -> None:
    counters = torch._dynamo.utils.counters
    counters.clear()
    net = small()
    torch._dynamo.reset()
    with recording(tmp_path / "run"):
        net(torch.ones(2, 4))
        compiled: Any = torch.compile(net, backend="eager", fullgraph=True)
        F.mse_loss(compiled(torch.ones(2, 4)), torch.zeros(2, 3)).backward()
    assert not counters["graph_break"]


class Asked(torch.Tensor):
    """Keeps what it is asked."""

    asked: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cls.asked.append(function.__name__)
        return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class Keeps(TorchFunctionMode):
    """Keeps every function that is called on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.log.append(str(function))
        return function(*args, **(kwargs or {}))


def test_tensor_classes_and_function_modes_of_the_job_are_asked_nothing(tmp_path: Path) -> None:
    def job() -> Any:
        net = small()
        net[0].weight = nn.Parameter(net[0].weight.detach().as_subclass(Asked))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        Asked.asked.clear()
        with Keeps() as keeps:
            out = net(torch.ones(2, 4).as_subclass(Asked))
            out.sum().backward()
        log = [*Asked.asked]
        optimizer.step()
        return len(keeps.log), log, out.detach().as_subclass(torch.Tensor)

    bare = job()
    with recording(tmp_path / "run"):
        seen = job()
    assert seen[:2] == bare[:2] and torch.equal(seen[2], bare[2])
    assert rows(tmp_path / "run", "SELECT unsummarised FROM ranks") == [("{}",)]


LOADED = """
import sys, torch
net = torch.nn.Linear(2, 2)
net(torch.ones(1, 2))
loaded = set(sys.modules)
net(torch.ones(1, 2)).sum().backward()
import gradtrace_recorder
gradtrace_recorder.stop()
print(sorted(set(sys.modules) - loaded))
"""


def test_nothing_is_imported_on_our_thread(tmp_path: Path) -> None:
    """An import makes so many objects that Python's collector would run finalizers of the job's there."""
    assert run(LOADED, tmp_path / "run").stdout == "[]\n"
