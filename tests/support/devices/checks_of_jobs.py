"""Checks of scripts/gpu-check that record a job: it is left as it was, its rows are whole, and what that costs.

Each is a function of the place, whose first line says what must hold. It gives one line of what was seen.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from support.devices.checked_device import LeftOut, Place, waiting_forbidden
from support.models.gpt2 import Training
from support.recordings.in_process import rows


def _small(place: Place) -> Training:
    sizes = (256, 4, 4, 512, 64) if place.is_cuda else (8, 1, 2, 10, 4)
    return Training(place.device, sizes, 4 if place.is_cuda else 1)


def _expect_equal(place: Place, plain: nn.Module, recorded: nn.Module) -> None:
    for (name, a), b in zip(plain.named_parameters(), recorded.parameters(), strict=True):
        place.expect(torch.equal(a, b), f"{name} differs")


def _expect_whole(place: Place, run: Path, table: str, *columns: str, where: str = "true") -> None:
    for column in columns:
        query = f"SELECT count(*), count({column}) FROM {table} WHERE {where}"
        ((every, have),) = rows(run, query)
        place.numbers[f"{table}.{column}"] = have
        place.expect(every > 0, f"{table} has no rows")
        place.expect(have == every, f"{column} of {every - have} of {every} {table} is missing")


def check_training(place: Place) -> str:
    """Recorded training is equal to the last bit, and its rows are whole."""
    torch.use_deterministic_algorithms(True)
    steps = 12 if place.is_cuda else 2
    with sdpa_kernel(SDPBackend.MATH):  # the others may differ from run to run
        plain, again = _small(place), _small(place)
        expected, once_more = ([job.step() for _ in range(steps)] for job in (plain, again))
        if not all(map(torch.equal, expected, once_more)):
            raise LeftOut("without a recording it is not equal to the last bit either")
        if place.is_cuda:
            place.with_kernels()
        recorded = _small(place)
        with place.recording(device_times="nodes") as run:
            losses = [recorded.step() for _ in range(steps)]
    torch.use_deterministic_algorithms(False)
    place.expect(all(map(torch.equal, expected, losses)), "losses differ")
    _expect_equal(place, plain.net, recorded.net)
    summary = "grad_output_fingerprint"
    _expect_whole(place, run, "node_events", summary, "grad_output_norm", "device_ns")
    _expect_whole(place, run, "gradients", "fingerprint")
    _expect_whole(place, run, "parameters", "fingerprint")
    _expect_whole(place, run, "backward_passes", "device_ns")
    ((unsummarised, least, most),) = rows(
        run,
        "SELECT any_value(unsummarised), min(device_ns), max(device_ns) FROM ranks, node_events",
    )
    place.numbers["least and most device_ns"] = [least, most]
    place.expect(least is not None and least >= 0, f"times from {least} to {most} ns")
    return f"{steps} steps, {place.numbers[f'node_events.{summary}']} Nodes; not summarised: {unsummarised}"


def check_no_wait(place: Place) -> str:
    """Nothing in the job's thread waits for the device, with kernels and before they are ready."""
    place.only_on_cuda("the host has no such mode")
    plain = _small(place)
    plain.step()
    try:
        with waiting_forbidden(place):
            plain.step()
    except RuntimeError as error:
        raise LeftOut(f"the job waits itself: {error}") from error
    for way in ("torch's operations", "Triton's kernel"):
        if way == "Triton's kernel":
            place.with_kernels()
        job = _small(place)
        job.step()
        try:
            with place.recording(device_times="nodes"), waiting_forbidden(place):
                for _ in range(4):
                    job.step()
        except RuntimeError as error:
            place.expect(False, f"with {way}: {error}")
            place.numbers[way] = traceback.format_exc()
    return "4 steps of each, set_sync_debug_mode('error')"


def check_scaler(place: Place) -> str:
    """Float16 with a GradScaler: the same steps are skipped, to the last bit, and infinities are counted."""

    def train() -> tuple[nn.Module, float]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).to(place.device)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
        scaler = torch.amp.GradScaler(place.device.type, init_scale=256.0, growth_interval=2)
        for step in range(6):
            optimizer.zero_grad()
            with torch.autocast(place.device.type, torch.float16):
                out = net(torch.ones(16, 64, device=place.device))
            loss = out.float().square().mean() * (torch.inf if step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return net, scaler.get_scale()

    plain, scale = train()
    with place.recording() as run:
        recorded, its_scale = train()
    place.expect(scale == its_scale, f"scales {scale} and {its_scale}")
    _expect_equal(place, plain, recorded)
    ((skipped,),) = rows(run, "SELECT count(*) FROM steps WHERE skipped")
    query = (
        "SELECT count(*) FROM node_events WHERE grad_output_nan_count + grad_output_inf_count > 0"
    )
    ((odd,),) = rows(run, query)
    place.expect(skipped == 1, f"{skipped} steps were skipped")
    place.expect(odd > 0, "no Node got what is not finite")
    _expect_whole(place, run, "node_events", "grad_output_norm")
    return f"{skipped} step skipped, {odd} Nodes got what is not finite"


def check_capture(place: Place) -> str:
    """A CUDA graph is captured while a recording reads rows and times, and replays to the same numbers."""
    place.only_on_cuda("there are no CUDA graphs on the host")
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).to(place.device)
    given = torch.randn(16, 64, device=place.device)

    def run_once() -> torch.Tensor:
        for parameter in net.parameters():
            parameter.grad = None
        loss: torch.Tensor = net(given).square().mean()
        loss.backward()
        return loss

    expected = run_once().item()
    gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    with place.recording(device_times="nodes") as run:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run_once()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        time.sleep(1.2)
        with torch.cuda.graph(
            graph
        ):  # the default mode: a query of another thread's would spoil it
            loss = run_once()
            time.sleep(4)  # the drain thread looks meanwhile, and kernels are made ready
        captured = [p.grad for p in net.parameters() if p.grad is not None]
        for _ in range(3):
            graph.replay()
        run_once()
    same = abs(loss.item() - expected) <= 1e-6 * abs(expected)
    place.expect(same, f"the graph's loss is {loss.item()}, not {expected}")
    for a, b in zip(gradients, captured, strict=True):
        place.expect(torch.allclose(a, b), "the graph's gradients differ")
    query = "SELECT count(*), count(grad_output_norm), count(device_ns) FROM node_events"
    ((every, have, timed),) = rows(run, query)
    place.numbers |= {"Nodes": every, "with a summary": have, "with a time": timed}
    place.expect(
        0 < have < every, f"{have} of {every} have a summary; those of the captured pass cannot"
    )
    place.expect(
        0 < timed < every, f"{timed} of {every} have a time; those of the captured pass cannot"
    )
    return f"of {every} Nodes {every - have} ran while it was captured, and say so"


def check_elsewhere(place: Place) -> str:
    """A job on another device than its thread's own has times of that device, and no context is made elsewhere."""
    place.only_on_cuda("there is one host")
    if torch.cuda.device_count() < 2:
        raise LeftOut("there is one device")
    net = nn.Linear(2000, 2000).to(place.device)
    before = place.contexts()
    with place.recording() as run:
        for _ in range(4):
            net(torch.ones(2000, 2000, device=place.device)).sum().backward()
    place.expect(
        torch.cuda.current_device() != place.device.index, "the device is the thread's own"
    )
    place.expect(before == place.contexts(), f"contexts {before} before, {place.contexts()} after")
    _expect_whole(place, run, "backward_passes", "device_ns")
    _expect_whole(place, run, "node_events", "grad_output_norm")
    return f"contexts of devices {place.contexts()} of {torch.cuda.device_count()}"


def check_reducers(place: Place) -> str:
    """DDP and FSDP2 on NCCL, one rank: the same parameters to the last bit; a hook's buckets have summaries, times."""
    place.only_on_cuda("the suite has them on gloo")
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if not dist.is_nccl_available():
        raise LeftOut("there is no NCCL")
    store = f"file://{place.folder / 'store'}"
    dist.init_process_group("nccl", init_method=store, rank=0, world_size=1, device_id=place.device)

    def halved(_: Any, bucket: Any) -> Any:
        work: Any = dist.all_reduce(bucket.buffer().mul_(0.5), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def made(kind: str) -> nn.Module:
        torch.manual_seed(0)
        net: nn.Module = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
        net = net.to(place.device)
        if kind == "fsdp":
            for part in (net[0], net[2], net):  # type: ignore[index]
                fully_shard(part)
            return net
        wrapped = DistributedDataParallel(net, device_ids=[place.device])
        if kind == "ddp with a hook":
            wrapped.register_comm_hook(None, halved)
        return wrapped

    def train(kind: str) -> list[torch.Tensor]:
        net = made(kind)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(4):
            optimizer.zero_grad()
            net(torch.ones(32, 256, device=place.device)).square().mean().backward()
            optimizer.step()
        return [getattr(p, "_local_tensor", p).detach().clone() for p in net.parameters()]

    for kind in ("ddp", "ddp with a hook", "fsdp"):
        expected = train(kind)
        with place.recording() as run:
            found = train(kind)
        place.expect(all(map(torch.equal, expected, found)), f"{kind}: parameters differ")
        _expect_whole(place, run, "node_events", "grad_output_norm")
        buckets = rows(run, "SELECT count(*), count(before_norm), count(device_ns) FROM buckets")[0]
        place.numbers[f"{kind}: buckets, with summary, with time"] = buckets
        # Without a hook of the job's a bucket on a device is not seen; FSDP2 reduces nothing with one rank.
        if kind == "ddp with a hook":
            whole = buckets[0] > 0 and len(set(buckets)) == 1
            place.expect(
                whole, f"{kind}: of {buckets[0]} buckets {buckets[1:]} have summary and time"
            )
    place.wait()
    dist.destroy_process_group()
    return ", ".join(f"{k} {v}" for k, v in place.numbers.items() if "buckets" in k)


_JOB = """
import os, signal, sys, time
sys.path[:0] = {paths!r}
if {cpu}:
    from gradtrace_recorder.summaries.device.backends import BACKENDS
    from support.devices.host_device import InlineBackend
    BACKENDS["cpu"] = InlineBackend()
import torch, gradtrace_recorder
gradtrace_recorder.start({run!r}, strict=True, quiet=True)
device = torch.device({device!r})
net = torch.nn.Sequential(torch.nn.Linear(500, 500), torch.nn.Linear(500, 500)).to(device)
for step in range({steps}):
    net(torch.ones(500, 500, device=device)).sum().backward()
    if {killed} and step == {steps} - 5:
        time.sleep(2.5)
if {killed}:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def check_ends(place: Place) -> str:
    """A job that ends while kernels are compiled ends well; one that is killed has lost its newest summaries alone."""
    told = []
    for killed in (False, True) if place.is_cuda else (False,):  # the suite kills one on the host
        run = place.folder / ("killed" if killed else "ended")
        script = _JOB.format(
            paths=sys.path, cpu=not place.is_cuda, run=str(run), device=str(place.device), steps=20, killed=killed
        )  # fmt: skip
        environment = os.environ | {"TRITON_CACHE_DIR": str(place.folder / "fresh")}
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=80
        )  # fmt: skip
        seconds = time.monotonic() - began
        wanted = -9 if killed else 0
        last = done.stderr[-400:]
        place.expect(done.returncode == wanted, f"{run.name}: ended with {done.returncode}: {last}")
        from gradtrace_analyzer.runs.opening import open_run
        from gradtrace_analyzer.sql.views import connect

        with contextlib.closing(connect([open_run(run)])) as connection:
            every, have = connection.execute(
                "SELECT count(*), count(grad_output_norm) FROM node_events"
            ).fetchall()[0]
        place.numbers[run.name] = {"Nodes": every, "with summary": have, "seconds": seconds}
        place.expect(have > every / 2, f"{run.name}: {have} of {every} Nodes have a summary")
        told.append(f"{run.name}: {have} of {every} Nodes, {seconds:.0f} s")
    return "; ".join(told)


def check_memory(place: Place) -> str:
    """What a recording keeps of the device's memory is bounded."""
    place.only_on_cuda("the host has no such account")
    place.with_kernels()
    job = _small(place)
    job.step()
    job.optimizer.zero_grad()
    place.wait()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        with place.recording(device_times="nodes"):
            for _ in range(5):
                job.step()
            job.optimizer.zero_grad()
    kept = (torch.cuda.memory_allocated() - before) / 1e6
    place.numbers["MB"] = kept
    place.expect(kept < 40, f"{kept:.1f} MB")
    return f"{kept:.1f} MB"


def check_cost(place: Place) -> str:
    """What recording costs a step of GPT-2 (124M parameters, bfloat16, 8 x 1024): pairs alternated, medians."""
    sizes = (768, 12, 12, 50257, 1024) if place.is_cuda else (8, 1, 2, 10, 4)
    job = Training(place.device, sizes, 8 if place.is_cuda else 1)
    warm, steps, pairs = (2, 5, 4) if place.is_cuda else (0, 1, 1)
    for _ in range(3 if place.is_cuda else 1):
        job.step()
    place.with_kernels()

    def seconds() -> float:
        for _ in range(warm):
            job.step()
        place.wait()
        began = time.perf_counter()
        for _ in range(steps):
            job.step()
        place.wait()
        return (time.perf_counter() - began) / steps

    ways: dict[str, dict[str, str]] = {
        "names and times": {"summary": "off"},
        "names and times of Nodes": {"summary": "off", "device_times": "nodes"},
        "params": {"detail": "params"},
        "full": {"summary": "full"},
    }
    ratios: dict[str, list[float]] = {name: [] for name in ways}
    plain: list[float] = []
    lost: dict[str, Any] = {}
    took = 0.0
    for _ in range(pairs):
        if place.seconds_left < took:
            break
        began = time.monotonic()
        for name, settings in ways.items():
            plain.append(seconds())
            with place.recording(**settings) as run:
                ratios[name].append(seconds() / plain[-1])
            lost[name] = rows(run, "SELECT unsummarised, dropped FROM ranks")[0]
            shutil.rmtree(run, ignore_errors=True)
        took = time.monotonic() - began
    place.numbers |= {"ratios": ratios, "plain seconds": plain, "unsummarised and dropped": lost}
    told = ", ".join(f"{name} {statistics.median(found):.3f}" for name, found in ratios.items())
    if not place.is_cuda:
        return f"a toy in its place, on the host, which says nothing: {told}"
    step = statistics.median(plain) * 1e3
    wanted = "at most 1.01 of the first and 1.05 of the last are wanted"
    return f"step ratio: {told} ({wanted}); a step without takes {step:.1f} ms"


Check = Callable[[Place], str]
