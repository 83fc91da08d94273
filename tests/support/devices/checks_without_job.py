"""Checks of scripts/gpu-check that need no job: threads, kernels, rows, and how fast they are made.

Each is a function of the place, whose first line says what must hold. It gives one line of what was seen.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from gradtrace_recorder.summaries.device.cuda import TimedEvent, enter
from gradtrace_recorder.summaries.device.ring import Ring
from gradtrace_recorder.summaries.device.rows import TORN, as_summaries
from gradtrace_recorder.summaries.torch_ops import TorchSummary
from gradtrace_schemas.summary import CHUNK, STATE_FULL, reference_summary
from support.devices.checked_device import FLOATS, Place


def check_entering(place: Place) -> str:
    """A thread of ours enters the job's device, asks events past torch, and makes no context elsewhere."""
    place.only_on_cuda("there is no driver to ask")
    torch.ones(1, device=place.device)
    before, index = place.contexts(), place.device.index
    place.expect(before == [index], f"contexts of devices {before} before, {index} is used")
    first, last = TimedEvent(index), TimedEvent(index)
    first.record()
    torch.cuda._sleep(100_000_000)
    last.record()
    found: dict[str, Any] = {}

    def ask() -> None:
        found["entered"] = enter(index)
        found["at once"] = last.query()
        deadline = time.monotonic() + 10
        while not last.query() and time.monotonic() < deadline:
            time.sleep(0.001)
        found["over"] = last.query()
        found["took"] = first.elapsed_time(last)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(20)
    torchs = first._event.elapsed_time(last._event)
    place.numbers |= {**found, "torch's": torchs, "contexts": place.contexts()}
    place.expect(found.get("entered") is True, "the thread could not enter")
    place.expect(found.get("at once") is False, "an event was over before what precedes it")
    place.expect(found.get("over") is True, "the event was never over")
    is_same = abs(found.get("took", -1.0) - torchs) <= 0.01  # torch may ask in another way
    place.expect(is_same, f"{found.get('took')} ms, and by torch {torchs} ms")
    place.expect(place.contexts() == before, f"contexts of devices {place.contexts()} afterwards")
    return f"{torchs:.1f} ms between two events, contexts of devices {place.contexts()}"


def _compiled(place: Place) -> int:
    """How many kernels Triton holds for the device, 0 where it interprets or is not there."""
    kernel = sys.modules.get("gradtrace_recorder.summaries.device.kernel")
    functions = [] if kernel is None else [kernel.summarise_one, kernel.summarise_many]
    held = [getattr(f, "device_caches", None) or getattr(f, "cache", {}) for f in functions]
    found = [caches[place.device.index] for caches in held if place.device.index in caches]
    return sum(len(kernels[0] if isinstance(kernels, tuple) else kernels) for kernels in found)


def check_kernels(place: Place) -> str:
    """Triton's kernels become ready, and none is compiled in the job's thread."""
    began = time.monotonic()
    launcher, ring = place.with_kernels()
    place.numbers["seconds"] = took = time.monotonic() - began
    place.numbers["compiled"] = before = _compiled(place)
    for dtype in FLOATS:
        for count in (1, 16, 17, 4096, 70_000) if place.is_cuda else (1, 17):
            tensor = torch.ones(count + 1, dtype=dtype, device=place.device)
            launcher.launch(tensor[1:], ring.ticket())
            launcher.launch(tensor, ring.ticket())
            launcher.launch_many([tensor, tensor[1:], tensor[:1]], ring.ticket)
            launcher.launch(tensor[: (count + 1) // 2 * 2].view(2, -1).t(), ring.ticket())
    place.wait()
    if place.is_cuda:
        place.expect(place.numbers["way"] == "Triton's kernel", f"not used: {place.said}")
        place.expect(before == 12, f"{before} kernels are held, not 12")
    more = _compiled(place) - before
    place.expect(more == 0, f"{more} were compiled by launches in this thread")
    launcher.stop()
    return f"{place.numbers['way']}, {before} of them, ready after {took:.1f} s"


def _tensors(place: Place) -> Iterator[torch.Tensor]:
    """Of all floating dtypes and many forms, on the CPU; the device gets copies of equal strides."""
    draw = torch.Generator().manual_seed(0)
    large = 40 if place.is_cuda else 1
    for dtype in FLOATS:
        for count in (1, 15, 17, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, large * 16 * CHUNK + 3):
            yield torch.randn(count, generator=draw, dtype=torch.float64).to(dtype)
        whole = torch.randn(96, 130, generator=draw, dtype=torch.float64).to(dtype)
        yield whole.t()
        yield whole[:, ::3]
        yield whole[3:4].expand(50, 130)
        yield whole.view(8, 12, 130).permute(2, 0, 1)
        whole = whole.clone()
        whole[2, 3], whole[4, 5], whole[6, 7], whole[8, 9] = torch.nan, torch.inf, -torch.inf, -0.0
        whole[10, 11] = torch.finfo(dtype).smallest_normal / 4
        yield whole
    yield torch.arange(5000)
    yield torch.randn(40, 3, generator=draw).to(torch.complex64)
    yield torch.zeros(6, 5, 4, 3, 2)[::2, ::2, ::2, ::2, ::2] + 0.5


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same strides over a copy of the same memory."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    memory = tensor.as_strided((reach,), (1,), tensor.storage_offset()).clone().to(device)
    return memory.as_strided(tensor.shape, tensor.stride())


def _expect_equal(place: Place, row: Any, tensor: torch.Tensor) -> None:
    """The device's summary is the CPU's: its bits, counts and largest value; its sums within 1e-6 of the norm."""
    what = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"
    own = TorchSummary(norms_only=False).numbers(tensor)
    got = (row["fingerprint"], row["nan_count"], row["inf_count"], row["abs_max"])
    wanted = (own[5], own[3], own[4], own[1])
    if tensor.is_floating_point():
        place.expect(got == wanted, f"{what}: {got} is not {wanted}")
        exact = reference_summary(tensor.double().numpy())
        apart = [row["norm"] - exact.norm, row["sum"] - exact.sum]
        apart += [a - b for a, b in zip(row["sketch"].tolist(), exact.sketch, strict=True)]
        is_near = max(map(abs, apart)) <= 1e-6 * exact.norm + 1e-300
        place.expect(is_near, f"{what}: {apart} apart of {exact.norm}")
    else:
        place.expect(got[0] == wanted[0], f"{what}: fingerprint {got[0]} is not {wanted[0]}")


def _read(place: Place, ring: Ring, tickets: list[int]) -> Any:
    """The rows of these tickets; those that are missing or torn are told."""
    found, is_there, _ = ring.read(np.array(tickets, np.int64))
    torn = int((found[:, TORN] != 0).sum())
    place.expect(
        bool(is_there.all()), f"{(~is_there).sum()} of {len(tickets)} rows missing, {torn} torn"
    )
    return as_summaries(found, STATE_FULL)


def check_rows(place: Place) -> str:
    """Summaries of the device are those of the CPU."""
    launcher, ring = place.with_kernels()
    asked = [(tensor, _moved(tensor, place.device)) for tensor in _tensors(place)]
    tickets: list[int] = []
    for _, there in asked:
        tickets.append(ring.ticket())
        launcher.launch(there, tickets[-1])
    tickets += launcher.launch_many([there for _, there in asked], ring.ticket)
    place.wait()
    for row, (here, _) in zip(_read(place, ring, tickets), asked * 2, strict=True):
        _expect_equal(place, row, here)
    launcher.stop()
    return f"{len(asked)} tensors, one by one and in lists, by {place.numbers['way']}"


def check_streams(place: Place) -> str:
    """Programs and streams that run at once change no bit: the same tensors, again and again, on two streams."""
    launcher, ring = place.with_kernels()
    count, turns = (24, 150) if place.is_cuda else (3, 2)
    some = [torch.randn(5000 * (n + 1), device=place.device) for n in range(count)]
    place.wait()
    streams = [torch.cuda.Stream() for _ in range(2)] if place.is_cuda else [None, None]
    tickets: list[int] = []
    for turn in range(turns):
        stream = streams[turn % 2]
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            if turn % 3:
                for tensor in some:
                    tickets.append(ring.ticket())
                    launcher.launch(tensor, tickets[-1])
            else:
                tickets += launcher.launch_many(some, ring.ticket)
    place.wait()
    made = _read(place, ring, tickets).reshape(turns, count)
    for at in range(count):
        kinds = len(set(map(bytes, made[:, at])))
        place.expect(kinds == 1, f"tensor {at} has {kinds} summaries")
    launcher.stop()
    return f"{len(tickets)} launches on {len(streams)} streams"


def check_arrival(place: Place) -> str:
    """A row is seen by the host, whole, though nobody waits for the device."""
    launcher, ring = place.with_kernels()
    tensor, ticket = torch.ones(50_000, device=place.device), ring.ticket()
    place.wait()
    launcher.launch(tensor, ticket)
    event = torch.cuda.Event() if place.is_cuda else None
    if event is not None:
        torch.cuda._sleep(1_500_000_000)
        event.record()
    began = time.perf_counter()
    while not ring.have_arrived([ticket]) and time.perf_counter() - began < 5:
        time.sleep(0.0002)
    place.numbers["seconds"] = took = time.perf_counter() - began
    place.numbers["was busy"] = is_busy = event is not None and not event.query()
    place.expect(ring.have_arrived([ticket]), "it did not come within 5 s")
    place.wait()
    launcher.stop()
    return f"after {took * 1e3:.1f} ms, while the device {'was still' if is_busy else 'was no longer'} busy"


def _each(place: Place, what: Callable[[], object], times: int) -> tuple[float, float]:
    """(seconds of the calling thread, seconds until the device was done), for one of so many calls."""
    what()
    place.wait()
    began = time.perf_counter()
    for _ in range(times):
        what()
    own = (time.perf_counter() - began) / times
    place.wait()
    return own, (time.perf_counter() - began) / times


def check_speed(place: Place) -> str:
    """How fast the kernel reads, and what a launch takes of the job's thread (microseconds)."""
    launcher, ring = place.with_kernels()
    told, times = [], 300 if place.is_cuda else 2
    for dtype in FLOATS:
        name = str(dtype).removeprefix("torch.")
        for form, count in (("large", 1 << 28), ("medium", 1 << 22)):
            whole = torch.ones(count if place.is_cuda else CHUNK, dtype=dtype, device=place.device)
            for tensor in (whole, whole.view(64, -1).t()):
                _, seconds = _each(place, lambda t=tensor: launcher.launch(t, ring.ticket()), 5)  # type: ignore[misc]
                turned = "" if tensor.is_contiguous() else ", transposed"
                place.numbers[f"GB/s {name}, {form}{turned}"] = whole.nbytes / seconds / 1e9
        told.append(f"{name} {place.numbers[f'GB/s {name}, large']:.4g} GB/s")
        del whole, tensor
    some = torch.ones(64, device=place.device)
    several = [torch.ones(64 * (n + 1), device=place.device) for n in range(148)]
    ways: dict[str, tuple[Callable[[], object], int]] = {
        "launch": (lambda: launcher.launch(some, ring.ticket()), times),
        # No more than there are lists.
        "launch of 148": (lambda: launcher.launch_many(several, ring.ticket), 3),
        "launch by torch's operations": (
            lambda: launcher._torch.launch(some, ring.ticket()),
            min(times, 30),
        ),
    }
    if place.is_cuda:
        pair = [TimedEvent(place.device.index) for _ in range(2)]
        ways |= {
            "event": (pair[0].record, times),
            "is capturing": (lambda: place.backend.is_capturing(place.device.index), times),
            "small kernel of torch's": (some.zero_, times),
        }
    for name, (what, count) in ways.items():
        own, until_done = _each(place, what, count)
        place.numbers[f"us {name}"] = own * 1e6
        place.numbers[f"us {name}, device"] = until_done * 1e6
    launcher.stop()
    return f"{', '.join(told)}; a launch takes the job's thread {place.numbers['us launch']:.1f} us"
