"""Recording beside the job's own tools: profilers, modes, compilers, copies; and what it holds of memory."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from support.recordings.in_process import recording, rows
from support.recordings.known_modules import equal_bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


def small() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 3)))


def both(job: Callable[[], Any], path: Path) -> Any:
    """What a job gives, the same without and with recording."""
    bare = job()
    with recording(path):
        seen = job()
    assert equal_bits(bare, seen), f"{bare} became {seen}"
    assert rows(path, "SELECT problems FROM ranks") == [("[]",)]
    return bare


def gradients(net: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in net.parameters()]


def test_profiler_of_the_job_sees_its_own_operations_alone(tmp_path: Path) -> None:
    def job() -> Any:
        net = small()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        ) as profile:
            net(torch.ones(2, 4)).sum().backward()
        return gradients(net), [event.name for event in profile.events()]

    _, nodes = both(job, tmp_path)
    assert len(nodes) > 5
    assert rows(tmp_path, "SELECT count(*) > 5 FROM node_events") == [(True,)]


@pytest.mark.filterwarnings("ignore")
def test_anomaly_mode_names_the_forward_of_the_node_that_made_nan(tmp_path: Path) -> None:
    def job() -> Any:
        net = small()
        with torch.autograd.set_detect_anomaly(True):
            loss = net(torch.ones(2, 4)).sum()
            bad = (loss - loss).sqrt() * 0
            try:
                (loss + bad).backward()
            except RuntimeError as error:
                return str(error)

    assert "SqrtBackward0" in both(job, tmp_path)
    assert rows(tmp_path, "SELECT exception_type FROM failures") == [("RuntimeError",)]


def test_debug_mode_logs_what_it_logs_without_us(tmp_path: Path) -> None:
    DebugMode = pytest.importorskip("torch.utils._debug_mode", exc_type=ImportError).DebugMode

    def job() -> Any:
        net = small()
        with DebugMode() as mode:
            net(torch.ones(2, 4)).sum().backward()
        return gradients(net), mode.debug_string()

    _, log = both(job, tmp_path)
    assert "addmm" in log


def test_mod_tracker_agrees_with_us(tmp_path: Path) -> None:
    from torch.distributed._tools.mod_tracker import ModTracker
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operations(TorchDispatchMode):
        """(operation, its innermost module, whether in backward) as the tracker knows it."""

        def __init__(self, tracker: Any) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.tracker = tracker
            self.log: list[tuple[str, str, bool]] = []

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            innermost = max(self.tracker.parents, key=len)
            self.log.append((str(function), innermost, bool(self.tracker.is_bw)))
            return function(*args, **(kwargs or {}))

    def job() -> Any:
        net, x = small(), torch.ones(2, 4, requires_grad=True)
        tracker = ModTracker()
        with tracker, Operations(tracker) as operations:
            net(x).sum().backward()
        return gradients(net), operations.log

    _, log = both(job, tmp_path)
    made = {operation: module for operation, module, backward in log if not backward}
    assert made["aten.tanh.default"] == "Sequential.1.0"
    assert rows(
        tmp_path, "SELECT module_fqn FROM node_events WHERE node_name = 'TanhBackward0'"
    ) == [("1.0",)]


def test_traced_graphs_hold_the_jobs_operations_alone(tmp_path: Path) -> None:
    def job() -> Any:
        net = small()
        parameters = {name: p.detach() for name, p in net.named_parameters()}

        def step(parameters: Any, x: torch.Tensor) -> Any:
            leaves = {name: p.requires_grad_() for name, p in parameters.items()}
            loss = torch.func.functional_call(net, leaves, (x,)).square().sum()
            return torch.autograd.grad(loss, list(leaves.values()))

        graph = make_fx(step)(parameters, torch.ones(2, 4))
        return len(graph.graph.nodes), list(graph(parameters, torch.ones(2, 4)))

    both(job, tmp_path)


def test_vmapped_models_and_their_summaries(tmp_path: Path) -> None:
    def job() -> Any:
        models = [small() for _ in range(3)]
        parameters, buffers = torch.func.stack_module_state(models)

        def call(values: Any, buffers: Any, x: torch.Tensor) -> Any:
            return torch.func.functional_call(models[0], (values, buffers), (x,))

        out = torch.func.vmap(call, (0, 0, None))(parameters, buffers, torch.ones(2, 4))
        out.sum().backward()
        return [value.grad for value in parameters.values()]

    both(job, tmp_path)
    ((unsummarised,),) = rows(tmp_path, "SELECT unsummarised FROM ranks")
    assert "functorch wrapper" in unsummarised


@pytest.mark.parametrize("way", ["model", "block", "method", "function", "step"])
def test_compiled_code_is_compiled_as_without_us(way: str, tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = small(), nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> Any:
            return self.last(self.inner(x).relu())

    def job() -> Any:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        small()(torch.ones(2, 4))  # what is compiled before the first event is compiled once more
        torch.manual_seed(0)
        net: Any = Net()
        call: Any = net
        if way == "model":
            call = torch.compile(net, backend="aot_eager", fullgraph=True)
        elif way == "block":
            net.inner = torch.compile(net.inner, backend="aot_eager", fullgraph=True)
        elif way == "method":
            net.inner.compile(backend="aot_eager")
            net.compile(backend="aot_eager")
        elif way == "function":

            def function(x: torch.Tensor) -> Any:
                return net(x).square()

            call = torch.compile(function, backend="aot_eager")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            call(torch.ones(2, 4)).sum().backward()
            optimizer.step()

        if way == "step":
            step = torch.compile(step, backend="aot_eager")
        for _ in range(3):
            step()
        counted = ["graph_break", "stats", "aot_autograd"]
        if way != "step":  # there dynamo compiles what pytest does with its log, too
            counted.append("frames")
        counters = torch._dynamo.utils.counters
        return gradients(net), {name: dict(counters[name]) for name in counted}

    both(job, tmp_path)
    steps = 1 if way == "step" else 3  # an optimizer's step that is compiled is not seen
    found = rows(tmp_path, "SELECT count(*), count(DISTINCT step) FROM backward_passes")
    assert found == [(3, steps)]


def test_module_compiled_in_place_is_recorded_where_it_runs_as_it_stands(tmp_path: Path) -> None:
    """Dynamo leaves torch's own containers alone, and would compile our hooks instead; torch 2.14 compiles them too."""

    def job() -> Any:
        torch._dynamo.reset()
        net = small()
        net[1].compile(backend="aot_eager")
        for _ in range(2):
            out = net(torch.ones(2, 4))
            out.sum().backward()
        return gradients(net), out.grad_fn.name()

    _, last = both(job, tmp_path)
    if "Compiled" in last:
        calls = rows(
            tmp_path, "SELECT module_fqn, count(*) FROM module_calls GROUP BY 1 ORDER BY 1"
        )
        assert calls == [("", 2), ("0", 2)]  # the container's own call is compiled too
        return
    assert rows(
        tmp_path, "SELECT DISTINCT module_fqn FROM node_events WHERE node_name = 'TanhBackward0'"
    ) == [("1.0",)]
    assert rows(tmp_path, "SELECT module_fqn, count(*) FROM module_calls GROUP BY 1 ORDER BY 1") == [
        ("", 2), ("0", 2), ("1", 2), ("1.0", 2), ("1.1", 2),
    ]  # fmt: skip


def test_hooks_do_not_pile_up_on_what_outlives_a_pass(tmp_path: Path) -> None:
    """DDP keeps AccumulateGrad Nodes from step to step; a retained graph is run again."""
    net = small()
    kept = [
        parameter.view_as(parameter).grad_fn.next_functions[0][0] for parameter in net.parameters()
    ]
    assert all(node is not None for node in kept)
    with recording(tmp_path):
        loss = net(torch.ones(2, 4)).sum()
        for _ in range(4):
            loss.backward(retain_graph=True)
    per_pass = rows(
        tmp_path,
        "SELECT count(*), count(DISTINCT autograd_seq), count(*) FILTER (node_name = 'AccumulateGrad') "
        "FROM node_events GROUP BY backward_index",
    )
    assert per_pass == [(len(kept) + 6, 6, len(kept))] * 4
    points = (
        "SELECT backward_index, count(*) FROM gradients WHERE point = 'local' GROUP BY 1 ORDER BY 1"
    )
    assert rows(tmp_path, points) == [(index, 4) for index in range(4)]
    assert not any(parameter._post_accumulate_grad_hooks for parameter in net.parameters())


def test_summary_is_not_used_again_for_other_memory_at_the_same_address(tmp_path: Path) -> None:
    """Gradients of one shape come and go at one address: each has the norm that it has."""

    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, factor: float) -> Any:
            ctx.factor = factor
            return x * 1

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * ctx.factor, None

    def job() -> Any:
        x = torch.ones(64, requires_grad=True)
        y = x
        for turn in range(100):
            y = Times.apply(y, 1.0 + turn % 3)  # type: ignore[no-untyped-call]
        y.sum().backward()
        return x.grad

    with recording(tmp_path):
        job()
    found = rows(
        tmp_path,
        "SELECT grad_output_norm, grad_input_norm FROM node_events WHERE node_name = 'TimesBackward' "
        "ORDER BY event_index",
    )
    factors = [gone / came for came, gone in found]
    assert factors == pytest.approx([1.0 + turn % 3 for turn in reversed(range(100))], rel=1e-5)


def test_copies_and_pickles_during_and_after_recording(tmp_path: Path) -> None:
    def copies(net: Any, out: torch.Tensor) -> list[Any]:
        stream = io.BytesIO()
        torch.save({"model": net, "out": out.detach(), "state": net.state_dict()}, stream)
        stream.seek(0)
        loaded = torch.load(stream, weights_only=False)
        twins = [copy.deepcopy(net), pickle.loads(pickle.dumps(net)), loaded["model"]]
        for twin in twins:
            twin.zero_grad()
            twin(torch.ones(2, 4)).sum().backward()
        tables = [
            {key: len(value) for key, value in vars(module).items() if "hooks" in key}
            for module in [*net.modules(), *(m for twin in twins for m in twin.modules())]
        ]
        return [[gradients(twin) for twin in twins], copy.deepcopy(out.detach()), tables]

    def job() -> Any:
        net = small()
        during = []
        net[1].register_forward_hook(Snapshot())
        out = net(torch.ones(2, 4))
        during.append(copies(net, out))
        out.sum().backward()
        during.append(copies(net, out))
        return net, out, during

    _, _, bare = job()
    with recording(tmp_path):
        net, out, seen = job()
    assert equal_bits(bare, seen)
    assert equal_bits(bare[1], copies(net, out))


class Snapshot:
    """A hook of the job, as a class that can be pickled."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        copy.deepcopy(module)


def test_nothing_of_a_step_is_kept_alive(tmp_path: Path) -> None:
    """Tensors, Nodes (by what lies in their metadata) and modules go when the job lets go of them."""

    class Mark:
        pass

    def step(net: Any, reentrant: bool | None) -> list[weakref.ref[Any]]:
        from torch.utils.checkpoint import checkpoint

        x = torch.ones(2, 4, requires_grad=True)
        out = net(x) if reentrant is None else checkpoint(net, x, use_reentrant=reentrant)
        loss = out.square().sum()
        marks, waiting = [], [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is not None:
                marks.append(node.metadata.setdefault("mark", Mark()))
                waiting += [after for after, _ in node.next_functions]
        loss.backward()
        return [weakref.ref(one) for one in (x, out, loss, *marks)]

    with recording(tmp_path):
        for reentrant in (None, True, False):
            net = small()
            gc.collect()
            gc.disable()
            try:
                left = step(net, reentrant)
                # AccumulateGrad Nodes live as long as their parameters do, if anybody has seen them.
                alive = [ref() for ref in left if ref() is not None]
                assert all(type(one) is Mark for one in alive) and len(alive) <= 4, reentrant
            finally:
                gc.enable()
            del alive
            module = weakref.ref(net)
            del net
            gc.collect()
            assert module() is None
            assert [ref for ref in left if ref() is not None] == []


def test_graph_that_fails_is_let_go_of(tmp_path: Path) -> None:
    with recording(tmp_path):
        for _ in range(3):
            net = small()
            out = net(torch.ones(2, 4))
            out.register_hook(lambda g: 1 / 0)
            with contextlib.suppress(ZeroDivisionError):
                out.sum().backward()
            refs = [weakref.ref(out), weakref.ref(net)]
            del out, net
            gc.collect()
            assert [ref for ref in refs if ref() is not None] == []


PEAK = """
import sys, torch
torch.manual_seed(0)
torch.set_num_threads(1)
net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.GELU()) for _ in range(8)))
optimizer = torch.optim.Adam(net.parameters())
seen = []
def look(*_):
    with open("/proc/self/status") as status:
        seen[-1] = max(seen[-1], *(int(line.split()[1]) for line in status if line.startswith("RssAnon")))
for module in net: module.register_full_backward_hook(look)
for _ in range({steps}):
    seen.append(0)
    optimizer.zero_grad()
    loss = net(torch.randn({batch}, 128)).square().mean()
    look()
    loss.backward()
    optimizer.step()
print(max(seen[:10]), max(seen[10:]))
"""


@pytest.mark.slow
def test_peak_memory_over_fifty_steps(tmp_path: Path) -> None:
    """It does not grow from step to step, nor with the job's tensors: what we take is there once.

    Counted is what a process has for itself, in kB: the journal is a mapped file.
    """

    def peak(directory: str, batch: int, steps: int) -> tuple[int, int]:
        environment = os.environ | {"GRADTRACE_DIR": directory, "OMP_NUM_THREADS": "1"}
        environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
        done = subprocess.run(
            [sys.executable, "-c", PEAK.format(batch=batch, steps=steps)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert done.returncode == 0, done.stderr
        first, later = done.stdout.split()
        return int(first), int(later)

    bare, seen = (peak(where, 8192, 60) for where in ("", str(tmp_path / "large")))
    assert seen[1] < seen[0] * 1.02, f"grew from step to step: {seen}"
    small_bare, small_seen = (peak(where, 2048, 20) for where in ("", str(tmp_path / "small")))
    more = (seen[1] - bare[1]) - (small_seen[1] - small_bare[1])
    print(bare, seen, small_bare, small_seen)
    assert more < 0.02 * bare[1], f"{more} kB more than for a quarter of the batch, of {bare}"


def test_tensor_that_was_made_under_inference_mode_may_go_into_a_module_that_trains(
    tmp_path: Path,
) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.linear(x.clone())
            return y

    head = Head()
    with torch.inference_mode():
        x = torch.randn(2, 3)
    with recording(tmp_path):
        head(x).sum().backward()
    assert rows(tmp_path, "SELECT problems FROM ranks") == [("[]",)]
    found = rows(tmp_path, "SELECT module_fqn FROM module_calls ORDER BY 1")
    assert found == [("",), ("linear",)]
