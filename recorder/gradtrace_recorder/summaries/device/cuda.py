"""CUDA: what the rest of this package asks of a device, answered by torch.cuda and the driver.

None of this has run on a device yet; `scripts/gpu-check` is what to run there first. Facts relied on:

- Pinned memory is mapped into every device's address space (unified addressing), and Triton takes a pinned tensor
  for an argument: it asks the driver for the pointer's device address.
- `torch.cuda.is_current_stream_capturing` asks the driver about one stream, and is allowed during capture.
- While a thread captures in the default (global) mode, another thread that queries an event makes the capture fail,
  unless it has put itself into the relaxed mode (`cuThreadExchangeStreamCaptureMode`). Torch's NCCL watchdog has the
  same need. Hence `relax_capture`, on every thread of ours that calls CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from gradtrace_recorder.summaries.device.launching import Launches
from gradtrace_recorder.summaries.device.rows import WORDS

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NOTHING = contextlib.nullcontext()
_KEPT: list[object] = []


class CudaBackend:
    """CUDA devices of this process. What it gives out stays: a device may write to it after a recording has ended."""

    def __init__(self) -> None:
        self._rows: torch.Tensor | None = None
        self._launches: dict[torch.device, Launches] = {}

    def is_in_use(self) -> bool:
        """Whether the job has initialised CUDA."""
        return bool(torch.cuda.is_initialized())

    def is_capturing(self) -> bool:
        """Whether the current stream is captured into a graph."""
        return torch.cuda.is_current_stream_capturing()

    def memory(self, rows: int) -> torch.Tensor:
        """Pinned memory, zeros at first."""
        if self._rows is None or len(self._rows) != rows:
            self._launches.clear()
            self._rows = torch.zeros(
                (rows, WORDS), dtype=torch.int64, device="cpu", pin_memory=True
            )
            _KEPT.append(self._rows)
        return self._rows

    def open(
        self,
        device: torch.device,
        rows: torch.Tensor,
        have_arrived: Callable[[Sequence[int]], bool],
        say: Callable[[str], None],
    ) -> Launches:
        """What launches on that device."""
        if device not in self._launches:
            self._launches[device] = Launches(device, _Cuda(device), rows)
            _KEPT.append(self._launches[device])
        return self._launches[device].begin(have_arrived, say)

    def current(self) -> int:
        """The index of the current device."""
        return torch.cuda.current_device()

    def event(self) -> Any:
        """A CUDA event that can time."""
        return torch.cuda.Event(enable_timing=True)

    def begin_reading(self) -> bool:
        """Whether the calling thread may query events whatever the job captures."""
        return relax_capture()


class _Cuda:
    """Surroundings of launches on one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """The device is the calling thread's current one."""
        if torch.cuda.current_device() == self._device.index:
            return _NOTHING
        return torch.cuda.device(self._device)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """A stream of our own, on a thread of ours."""
        if not relax_capture():
            raise RuntimeError("the driver does not let a thread of ours work beside a capture")
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device)):
            yield

    def wait(self) -> None:
        """By asking: a call that synchronises is refused where the job has forbidden such
        (`torch.cuda.set_sync_debug_mode`)."""
        event = torch.cuda.Event()
        event.record()
        while not event.query():
            time.sleep(0.001)

    def stream(self) -> int:
        """The current stream's handle."""
        return int(torch.cuda.current_stream().cuda_stream)

    def interprets(self) -> bool:
        """Never: it would copy the device's tensors to the host."""
        return False


def relax_capture() -> bool:
    """Let the calling thread ask things of CUDA while another one captures a graph. Whether that was possible."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        mode = ctypes.c_int(_RELAXED)
        return bool(driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0)
    except (OSError, AttributeError):
        return False
