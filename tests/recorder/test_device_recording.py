"""Whole recordings of a job whose tensors lie on a device, of which a thread of the host plays the part."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradtrace_recorder
from gradtrace_recorder.summaries.device import torch_rows
from gradtrace_recorder.summaries.device.ring import RING_ROWS
from gradtrace_recorder.summaries.device.torch_rows import TorchRows
from support.devices.host_device import HostBackend, HostLauncher, InlineBackend, host_device
from support.launching.launcher import ranks
from support.recordings.in_process import recording, rows


class Doubling(torch.autograd.Function):
    """Changes what came in, as a Node defined in Python can."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].mul_(2)


def train(steps: int = 3) -> list[torch.Tensor]:
    """Nodes with several gradients, views, a buffer, integers, a tensor of no elements; the losses."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Embedding(9, 6), nn.Linear(6, 8), nn.BatchNorm1d(4), nn.GELU(), nn.Linear(8, 5)
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        out = net(torch.randint(0, 9, (3, 4)))
        halves = out.transpose(0, 1).reshape(12, 5).split([2, 3], dim=1)
        loss = halves[0].sum() * torch.stack([halves[1].mean(), out.var()]).prod()
        gradtrace_recorder.note("empty", torch.zeros(0, 3))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """The same job recorded as it is, and on the device."""
    folder = tmp_path_factory.mktemp("pair")
    with recording(folder / "host"):
        losses = train()
    with host_device() as device, recording(folder / "device", device_times="nodes"):
        assert all(map(torch.equal, losses, train()))
    assert len(device.launchers) == 1
    yield folder / "host", folder / "device"


SUMMARIES = {
    "node_events": ("grad_output_", "grad_input_"),
    "node_tensors": ("",),
    "gradients": ("",),
    "parameters": ("",),
    "inputs": ("",),
    "module_calls": ("input_", "output_"),
}


@pytest.mark.parametrize("table", SUMMARIES)
def test_tables_are_those_of_the_cpus_path(pair: tuple[Path, Path], table: str) -> None:
    for prefix in SUMMARIES[table]:
        exact = ", ".join(
            prefix + name for name in ("numel", "dtype", "fingerprint", "abs_max", "nan_count")
        )
        near = f"{prefix}norm, {prefix}sum, {prefix}sketch"
        query = f"SELECT {{}} FROM {table} ORDER BY step, record_index"
        on_host, on_device = (rows(run, query.format(exact)) for run in pair)
        assert on_device == on_host and len(on_host) > 0
        assert any(fingerprint is not None for _, _, fingerprint, *_ in on_host)
        for a, b in zip(*(rows(run, query.format(near)) for run in pair), strict=True):
            assert (a[0] is None) == (b[0] is None)
            if a[0] is not None:
                flat = [*a[:2], *a[2]], [*b[:2], *b[2]]
                assert flat[1] == pytest.approx(flat[0], abs=1e-5 * a[0] + 1e-12)


def test_digests_are_those_of_the_cpus_path(pair: tuple[Path, Path]) -> None:
    query = "SELECT COLUMNS('digest_.*') FROM steps ORDER BY step"
    on_host, on_device = (rows(run, query) for run in pair)
    assert on_host == on_device and any(d is not None for d in on_host[0])


def test_passes_and_nodes_have_times_of_the_device(pair: tuple[Path, Path]) -> None:
    for table in ("backward_passes", "node_events"):
        query = f"SELECT count(*), count(device_ns), min(device_ns) FROM {table}"
        (host,), (device,) = (rows(run, query) for run in pair)
        assert host[1] == 0 and device[0] == device[1] and device[2] >= 0


def test_actions_of_stages_have_times_of_the_device(tmp_path: Path) -> None:
    with host_device(), recording(tmp_path / "run"):
        net = nn.Linear(3, 2)
        with gradtrace_recorder.stage(1, 0, "forward") as action:
            out = net(torch.ones(1, 3))
            action.sent(out)
        with gradtrace_recorder.stage(1, 0, "backward_full"):
            out.sum().backward()
    query = "SELECT kind, device_ns >= 0, sent_norm > 0 FROM stage_events ORDER BY start_ns"
    assert rows(tmp_path / "run", query) == [("forward", True, True), ("backward_full", True, None)]


@ranks(1)
def test_buckets_of_a_jobs_own_hook_have_times_of_the_device(tmp_path: Path) -> None:
    """Until the callbacks of its future are called, which stands behind the reduction."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    with host_device(), recording(tmp_path / "run"):
        net = DistributedDataParallel(nn.Linear(3, 2))
        net.register_comm_hook(None, hook)
        for _ in range(2):
            net(torch.ones(1, 3)).sum().backward()
    query = "SELECT device_ns >= 0, done_ns, before_norm > 0 FROM buckets"
    assert rows(tmp_path / "run", query) == [(True, None, True)] * 2


@ranks(1)
def test_shards_of_parameters_are_summarised_in_lists_too(tmp_path: Path) -> None:
    """As FSDP2 leaves them: one launch for all, not one for each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    found = {}
    for place in ("host", "device"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 9), nn.Linear(9, 4), nn.Linear(4, 4))
        mesh = init_device_mesh("cpu", (1,))
        for part in net:
            for name, parameter in list(part.named_parameters()):
                shard = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
                part.register_parameter(name, nn.Parameter(shard))
        context = host_device() if place == "device" else contextlib.nullcontext()
        with context as device, recording(tmp_path / place, detail="params"):
            x = distribute_tensor(torch.ones(1, 3), mesh, [Shard(0)])
            net(x)
            launches = device.launchers[0].launches if device is not None else 0
        query = "SELECT parameter_fqn, fingerprint FROM parameters ORDER BY record_index"
        found[place] = rows(tmp_path / place, query)
    assert found["device"] == found["host"] and all(f is not None for _, f in found["host"])
    assert (
        len(found["host"]) == 8 and launches < 8
    )  # the parameters, the input, a generator's state


def test_nothing_is_counted_as_missing(pair: tuple[Path, Path]) -> None:
    facts = json.loads(next((pair[1] / "ranks").glob("*.json")).read_text())
    assert facts["complete"] and not facts["unsummarised"] and not facts["problems"]


def test_while_a_graph_is_captured_nothing_is_launched_and_rows_say_so(tmp_path: Path) -> None:
    with host_device() as device, recording(tmp_path / "run", device_times="nodes"):
        net = nn.Linear(3, 2)
        net(torch.ones(1, 3)).sum().backward()
        launches, events = device.launchers[0].launches, device.events
        device.is_captured = True
        net(torch.ones(1, 3)).sum().backward()
        assert (device.launchers[0].launches, device.events) == (launches, events)
    last = rows(
        tmp_path / "run", "SELECT grad_input_numel, grad_input_norm, device_ns FROM node_events"
    )
    assert any(n is not None for _, n, _ in last) and any(n is None for _, n, _ in last)
    facts = json.loads(next((tmp_path / "run" / "ranks").glob("*.json")).read_text())
    assert set(facts["unsummarised"]) == {"while a graph is captured"}


def test_a_device_that_hangs_holds_nobody_up(tmp_path: Path) -> None:
    """The job goes on and ends; what never came is lost, and counted."""
    with host_device() as device:
        gradtrace_recorder.start(str(tmp_path / "run"), strict=True)
        device.stream.hold()
        began = time.monotonic()
        train(1)
        gradtrace_recorder.stop()
        assert time.monotonic() - began < 20
        device.stream.release()
    facts = json.loads(next((tmp_path / "run" / "ranks").glob("*.json")).read_text())
    assert facts["complete"] and facts["unsummarised"]["lost on the device"] > 50
    assert (
        rows(tmp_path / "run", "SELECT count(*), count(grad_input_norm) FROM node_events")[0][1]
        == 0
    )


def test_a_device_that_was_opened_in_inference_mode_serves_training_too(tmp_path: Path) -> None:
    with host_device(), recording(tmp_path / "run"):
        net = nn.Linear(3, 2)
        with torch.inference_mode():
            net(torch.ones(1, 3))
        net(torch.ones(1, 3)).sum().backward()
    query = "SELECT count(*), count(input_fingerprint), count(output_fingerprint) FROM module_calls"
    assert rows(tmp_path / "run", query) == [(2, 2, 2)]


class Failing(HostLauncher):
    """Its kernel cannot be launched."""

    def launch(self, tensor: torch.Tensor, ticket: int) -> None:
        raise RuntimeError("invalid configuration argument")

    def launch_many(self, tensors: Any, tickets: Any) -> list[int | None]:
        raise RuntimeError("invalid configuration argument")


class FailingBackend(HostBackend):
    """Its devices' launchers fail."""

    def open(self, device: torch.device, rows: torch.Tensor, *rest: Any) -> HostLauncher:
        return Failing(self.stream, TorchRows(rows, device))


class WithoutTriton(InlineBackend):
    """Its launches are made by torch's operations: no kernel becomes ready."""

    def open(self, *about: Any) -> Any:
        launches = super().open(*about)
        launches.readiness.is_over = True
        return launches


def test_a_launch_that_fails_costs_its_summary_alone(tmp_path: Path) -> None:
    with host_device(FailingBackend), recording(tmp_path / "run", strict=False):
        losses = train(1)
    assert all(map(torch.equal, losses, train(1)))
    facts = json.loads(next((tmp_path / "run" / "ranks").glob("*.json")).read_text())
    assert facts["unsummarised"]["torch.float32 torch.strided: RuntimeError"] > 0
    assert not facts["problems"]


def test_what_is_too_large_without_the_kernel_is_left_out_and_the_others_are_launched_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_rows, "MOST_BLOCKS", 0)  # of one block: what has more than no element
    asked: list[int] = []
    launch = TorchRows.launch

    def counted(rows: TorchRows, tensor: torch.Tensor, ticket: int) -> None:
        asked.append(ticket)
        limit = 1 if tensor.numel() <= 6 else 0
        monkeypatch.setattr(torch_rows, "MOST_BLOCKS", limit)
        launch(rows, tensor, ticket)

    monkeypatch.setattr(TorchRows, "launch", counted)
    with host_device(WithoutTriton), recording(tmp_path / "run", detail="params"):
        net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 9))
        net(torch.ones(1, 3)).sum().backward()
    found = rows(
        tmp_path / "run", "SELECT parameter_fqn, norm > 0 FROM parameters ORDER BY record_index"
    )
    assert found == [("0.weight", True), ("0.bias", True), ("1.weight", None), ("1.bias", None)]
    facts = json.loads(next((tmp_path / "run" / "ranks").glob("*.json")).read_text())
    assert set(facts["unsummarised"]) == {"too large without the kernel"}
    assert not facts["problems"] and len(asked) == len(set(asked))


class BreaksDown(HostBackend):
    """A device that fails: whatever it is asked then raises, as CUDA does after a kernel's error."""

    is_broken = False

    def is_capturing(self, index: int | None) -> bool:
        if self.is_broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return False


def test_where_a_device_fails_the_row_of_the_failure_is_written(tmp_path: Path) -> None:
    """What asks the device for times and summaries raises then, too: and the job's own error is what counts."""
    with host_device(BreaksDown) as device, recording(tmp_path / "run", strict=False):
        assert isinstance(device, BreaksDown)
        net = nn.Linear(3, 2)
        net(torch.ones(1, 3)).sum().backward()
        loss = net(torch.ones(1, 3)).sum()

        def fail(_: torch.Tensor) -> None:
            device.is_broken = True
            raise RuntimeError("CUDA error: device-side assert triggered")

        net.bias.register_hook(fail)
        with pytest.raises(RuntimeError, match="device-side assert"):
            loss.backward()
    query = "SELECT backward_index, exception_type FROM failures"
    assert rows(tmp_path / "run", query) == [(1, "RuntimeError")]
    facts = json.loads(next((tmp_path / "run" / "ranks").glob("*.json")).read_text())
    assert [p for p in facts["problems"] if "source" in p] == []


def test_a_device_whose_memory_cannot_be_had_is_said_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class NoMemory(HostBackend):
        def memory(self, rows: int) -> torch.Tensor:
            raise RuntimeError("out of memory")

    with host_device(NoMemory), recording(tmp_path / "run"):
        train(1)
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("gradtrace")]
    assert len(said) == 1 and "out of memory" in said[0] and "not summarised" in said[0]


def test_a_mutated_gradient_cannot_be_told_on_a_device_and_is_null(tmp_path: Path) -> None:
    def job() -> None:
        x = torch.ones(3, requires_grad=True)
        y: torch.Tensor = Doubling.apply(x)  # type: ignore[no-untyped-call]
        (y * 3).sum().backward()

    with recording(tmp_path / "host"):
        job()
    with host_device(), recording(tmp_path / "device"):
        job()
    query = "SELECT grad_output_mutated FROM node_events WHERE node_name = 'DoublingBackward'"
    assert rows(tmp_path / "host", query) == [(True,)]
    assert rows(tmp_path / "device", query) == [(None,)]


def test_flight_mode_sees_values_that_are_not_finite(tmp_path: Path) -> None:
    with host_device() as device, recording(tmp_path / "run", mode="flight", flight_steps=4):
        net = nn.Linear(3, 2)
        factor = [1.0]
        net.weight.register_hook(lambda gradient: gradient * factor[0])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        for step in range(12):
            factor[0] = torch.inf if step == 3 else 1.0
            net(torch.ones(1, 3)).sum().backward()
            optimizer.zero_grad()  # before the step, so that the parameters stay finite
            optimizer.step()
            device.stream.wait()
            time.sleep(0.15)  # the drain thread looks when asked, or once a second
    facts = json.loads(next((tmp_path / "run" / "ranks").glob("*.json")).read_text())
    reasons = [trigger["reason"] for trigger in facts["flight"]["triggers"]]
    assert "a value that is not finite in a gradient" in reasons


KILLED = """
import os, signal, sys, time
sys.path[:0] = {paths!r}
import torch
from torch import nn
import gradtrace_recorder
from support.devices.host_device import host_device
with host_device() as device:
    gradtrace_recorder.start({run!r}, strict=True)
    net = nn.Linear(3, 2)
    for step in range(3):
        if step == 2:
            time.sleep(2.5)  # the drain thread has looked
            device.stream.hold()
        net(torch.ones(1, 3)).sum().backward()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_rank_keeps_what_had_come(tmp_path: Path) -> None:
    script = KILLED.format(paths=sys.path, run=str(tmp_path / "run"))
    done = subprocess.run([sys.executable, "-c", script], timeout=60, env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL
    from gradtrace_analyzer.runs.opening import open_run
    from gradtrace_analyzer.sql.views import connect

    found = (
        connect([open_run(tmp_path / "run")])
        .execute(
            "SELECT backward_index, count(*), count(grad_output_norm), count(grad_output_numel) "
            "FROM node_events GROUP BY ALL ORDER BY ALL"
        )
        .fetchall()
    )
    assert [(index, norms, numels) for index, _, norms, numels in found] == [
        (0, found[0][1], found[0][1]),
        (1, found[1][1], found[1][1]),
        (2, 0, found[2][1]),
    ]


def test_rows_are_as_many_as_a_step_needs() -> None:
    """A GPT of 1,500 Nodes asks for about 6,000 summaries a step; the drain thread is woken at every quarter."""
    assert RING_ROWS >= 4 * 6000
