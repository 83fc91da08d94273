"""CUDA: what the rest of this package asks of a device, answered by torch.cuda and the driver.

None of this has run on a device yet; `scripts/gpu-check` is what to run there first. Facts relied on:

- Pinned memory is mapped into every device's address space (unified addressing), and Triton takes a pinned tensor
  for an argument: it asks the driver for the pointer's device address.
- `torch.cuda.is_current_stream_capturing` asks the driver about one stream, and is allowed during capture.
- While a thread captures in the default (global) mode, another thread that queries an event makes the capture fail,
  unless it has put itself into the relaxed mode (`cuThreadExchangeStreamCaptureMode`). Torch's NCCL watchdog has the
  same need. A new thread is on device 0, whatever the job has chosen, and its first call of the runtime's makes a
  context there: half a gigabyte, of each rank of a host. Hence `enter`, first on every thread of ours that calls CUDA.
- `torch.cuda.Event.query` holds the GIL, and the driver may have it wait for a lock. The driver's own functions are
  called through ctypes, which lets go of the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from gradtrace_recorder.summaries.device.launching import Launches
from gradtrace_recorder.summaries.device.rows import WORDS

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_SUCCESS, _NOT_READY = 0, 600  # CUresult
# Torch hands out the 32 streams of a priority in turn, so that one of ours could be one that the job captures. Of the
# highest priority few jobs ask for any.
_PRIORITY = -3
_OLDEST = (7, 0)
_NOTHING = contextlib.nullcontext()
_KEPT: list[object] = []


class CudaBackend:
    """CUDA devices of this process. What it gives out stays: a device may write to it after a recording has ended."""

    def __init__(self) -> None:
        self._rows: torch.Tensor | None = None
        self._launches: dict[torch.device, Launches] = {}
        self._in_use: set[int] = set()  # devices with a context

    def is_in_use(self) -> bool:
        """Whether the job has initialised CUDA."""
        return bool(torch.cuda.is_initialized())

    def is_capturing(self, index: int | None) -> bool:
        """Whether that device's current stream is captured into a graph."""
        if index is None or index == torch.cuda.current_device():
            return torch.cuda.is_current_stream_capturing()
        with torch.cuda.device(index):
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

    def current(self) -> int | None:
        """The index of the current device; None where the job has no context on it, which an event would make."""
        index = torch.cuda.current_device()
        if index not in self._in_use:
            asked = getattr(torch._C, "_cuda_hasPrimaryContext", None)
            if asked is not None and not asked(index):
                return None
            self._in_use.add(index)
        return index

    def event(self, index: int) -> TimedEvent:
        """A CUDA event that can time."""
        return TimedEvent(index)

    def begin_reading(self, index: int) -> bool:
        """Whether the calling thread may query events whatever the job captures."""
        return enter(index)


class _Cuda:
    """Surroundings of launches on one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own_stream: torch.cuda.Stream | None = None

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """The device is the calling thread's current one."""
        if torch.cuda.current_device() == self._device.index:
            return _NOTHING
        return torch.cuda.device(self._device)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """A stream of our own, on a thread of ours."""
        if torch.cuda.get_device_capability(self._device) < _OLDEST:
            # For others it is not made: LLVM ends the process where it knows no way to say something.
            raise RuntimeError("Triton compiles for compute capability 7.0 and newer")
        if not enter(self._device.index):
            raise RuntimeError("the driver does not let a thread of ours work beside a capture")
        if self._own_stream is None:
            self._own_stream = torch.cuda.Stream(self._device, priority=_PRIORITY)
        with torch.cuda.stream(self._own_stream):
            yield

    def wait(self) -> None:
        """By asking: a call that synchronises is refused where the job has forbidden such
        (`torch.cuda.set_sync_debug_mode`)."""
        event = TimedEvent(self._device.index)
        event.record()
        while not event.query():
            time.sleep(0.001)

    def stream(self) -> int:
        """The current stream's handle, as Triton asks for it: `torch.cuda.current_stream` makes an object each time."""
        return int(torch._C._cuda_getCurrentRawStream(self._device.index))

    def interprets(self) -> bool:
        """Never: it would copy the device's tensors to the host."""
        return False


class TimedEvent:
    """An event of one device."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._event = torch.cuda.Event(enable_timing=True)

    def record(self) -> None:
        """Put it into the device's current stream."""
        self._event.record(torch.cuda.current_stream(self._index))

    def query(self) -> bool:
        """Whether the device has come to it. On a thread that has entered."""
        code = _driver().cuEventQuery(ctypes.c_void_p(self._event.cuda_event))
        if code not in (_SUCCESS, _NOT_READY):
            raise RuntimeError(f"CUDA error {code}")
        return bool(code == _SUCCESS)

    def elapsed_time(self, end: TimedEvent) -> float:
        """Milliseconds to a later event."""
        took = ctypes.c_float()
        events = [ctypes.c_void_p(event._event.cuda_event) for event in (self, end)]
        code = _driver().cuEventElapsedTime(ctypes.byref(took), *events)
        if code != _SUCCESS:
            raise RuntimeError(f"CUDA error {code}")
        return took.value


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def enter(index: int) -> bool:
    """Put the calling thread, one of ours, on a device that the job uses, and let it ask things of CUDA while another
    one captures a graph. Whether that was possible."""
    try:
        driver = _driver()
        torch.cuda.set_device(index)
        context, mode = ctypes.c_void_p(), ctypes.c_int(_RELAXED)
        failed = driver.cuCtxGetCurrent(ctypes.byref(context))
        if not failed and not context.value:
            # Torch leaves a new thread as it is where the device is 0; the driver wants a context in it.
            device = ctypes.c_int()
            failed = (
                driver.cuDeviceGet(ctypes.byref(device), index)
                or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
                or driver.cuCtxSetCurrent(context)
            )
        return not failed and driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0
    except (
        OSError,
        AttributeError,
        RuntimeError,
    ):  # no driver of NVIDIA's, or a device that has failed
        return False
