"""The device that scripts/gpu-check looks at, and what a check tells of it."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import gradtrace_recorder
from gradtrace_recorder.summaries.device.backends import BACKENDS
from gradtrace_recorder.summaries.device.ring import RING_ROWS, Ring

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_MOST_TOLD = 20


class LeftOut(Exception):
    """A check does not apply here; the text says why."""


class Place:
    """One device, for one check: what it expects is collected, so that it goes on where something is otherwise."""

    def __init__(self, kind: str, seconds: float, *, chooses_device: bool = True) -> None:
        """A check that can do with less should end within so many seconds.

        On CUDA the last device is taken, so that of several the first must stay untouched. It is made the thread's
        own unless the check wants it otherwise."""
        self._ends = time.monotonic() + seconds
        self.is_cuda = kind == "cuda"
        index = torch.cuda.device_count() - 1 if self.is_cuda else 0
        self.device = torch.device("cuda", index) if self.is_cuda else torch.device("cpu")
        self.backend = BACKENDS[kind]
        self.folder = Path(tempfile.mkdtemp(prefix="gpu-check-"))
        self.said: list[str] = []
        self.failures: list[str] = []
        self.numbers: dict[str, Any] = {}
        self._runs = 0
        if self.is_cuda and chooses_device:
            torch.cuda.set_device(self.device)

    def expect(self, is_so: bool, otherwise: str) -> None:
        """Note a failure, and go on."""
        if not is_so:
            if len(self.failures) < _MOST_TOLD:
                self.failures.append(otherwise)
            elif len(self.failures) == _MOST_TOLD:
                self.failures.append("and more")

    @property
    def seconds_left(self) -> float:
        """How long the check may still take."""
        return self._ends - time.monotonic()

    def only_on_cuda(self, why: str) -> None:
        """Leave the check out where the host is in the device's place."""
        if not self.is_cuda:
            raise LeftOut(why)

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def launches(self) -> tuple[Any, Ring]:
        """A launcher of the device, and the ring it fills: the memory and the kernels that recordings use too."""
        memory = self.backend.memory(RING_ROWS)
        ring = Ring(memory.numpy())
        return self.backend.open(self.device, memory, ring.have_arrived, self.said.append), ring

    def with_kernels(self) -> tuple[Any, Ring]:
        """The same, when its kernels are ready; where they cannot be used, torch's operations are what is checked."""
        launcher, ring = self.launches()
        wanted = [
            (d, s, m) for d in FLOATS for s, m in ((False, False), (True, False), (False, True))
        ]
        deadline = time.monotonic() + 100
        while not launcher.readiness.is_over and time.monotonic() < deadline:
            if all([launcher.readiness.is_ready(what) for what in wanted]):
                self.numbers["way"] = "Triton's kernel"
                return launcher, ring
            time.sleep(0.02)
        self.numbers["way"] = "torch's operations"
        return launcher, ring

    @contextlib.contextmanager
    def recording(self, **settings: Any) -> Iterator[Path]:
        """Record what the block does, into a folder of its own."""
        self._runs += 1
        run = self.folder / str(self._runs)
        gradtrace_recorder.start(str(run), strict=True, quiet=True, **settings)
        try:
            yield run
        finally:
            self.wait()
            gradtrace_recorder.stop()

    def close(self) -> None:
        """Leave no file behind."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def contexts(self) -> list[int]:
        """Devices on which this process has a context."""
        asked = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
        return [n for n in range(torch.cuda.device_count()) if asked(n)]


@contextlib.contextmanager
def waiting_forbidden(place: Place) -> Iterator[None]:
    """What waits for the device raises."""
    if place.is_cuda:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if place.is_cuda:
            torch.cuda.set_sync_debug_mode("default")
