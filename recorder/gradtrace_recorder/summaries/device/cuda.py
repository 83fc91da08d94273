"""CUDA: pinned rows, the kernel where Triton can make it, torch's operations where it cannot.

None of this has run on a device yet; `scripts/gpu-check` is what to run there first. Facts relied on:

- Pinned memory is mapped into every device's address space (unified addressing), and Triton takes a pinned tensor
  for an argument: it asks the driver for the pointer's device address.
- `torch.cuda.is_current_stream_capturing` asks the driver about one stream, and is allowed during capture.
- While a thread captures in the default (global) mode, other threads that query an event make the capture fail,
  unless they have put themselves into the relaxed mode (`cuThreadExchangeStreamCaptureMode`). Torch's NCCL watchdog
  has the same need. Hence `relax_capture`, on every thread of ours that calls CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gradtrace_recorder.summaries.device.readiness import Readiness
from gradtrace_recorder.summaries.device.rows import WORDS
from gradtrace_recorder.summaries.device.tables import NoWorkspace
from gradtrace_recorder.summaries.device.torch_rows import TorchRows

if TYPE_CHECKING:
    from gradtrace_recorder.summaries.device.triton_rows import TritonRows

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class CudaBackend:
    """CUDA devices of this process."""

    def is_in_use(self) -> bool:
        """Whether the job has initialised CUDA."""
        return bool(torch.cuda.is_initialized())

    def is_capturing(self) -> bool:
        """Whether the current stream is captured into a graph."""
        return torch.cuda.is_current_stream_capturing()

    def memory(self, rows: int) -> torch.Tensor:
        """Pinned zeros."""
        return torch.zeros((rows, WORDS), dtype=torch.int64, device="cpu", pin_memory=True)

    def open(
        self,
        device: torch.device,
        rows: torch.Tensor,
        have_arrived: Callable[[Sequence[int]], bool],
        say: Callable[[str], None],
    ) -> CudaLauncher:
        """What launches on that device."""
        return CudaLauncher(device, rows, have_arrived, say)

    def current(self) -> int:
        """The index of the current device."""
        return torch.cuda.current_device()

    def event(self) -> Any:
        """A CUDA event that can time."""
        return torch.cuda.Event(enable_timing=True)

    def begin_reading(self) -> bool:
        """Whether the calling thread may query events whatever the job captures."""
        return relax_capture()


class CudaLauncher:
    """One CUDA device."""

    def __init__(
        self,
        device: torch.device,
        rows: torch.Tensor,
        have_arrived: Callable[[Sequence[int]], bool],
        say: Callable[[str], None],
    ) -> None:
        self._device = device
        self._rows = rows
        self._have_arrived = have_arrived
        self._say = say
        self._triton: TritonRows | None = None
        with self._current():
            self._torch = TorchRows(rows, device)
        self._readiness = Readiness(self._prepare, self._without_triton)

    def launch(self, tensor: torch.Tensor, ticket: int) -> None:
        """By the kernel if it is ready, else by torch's operations."""
        with self._current():
            triton = self._triton
            if triton is None:
                if tensor.is_floating_point():
                    self._readiness.is_ready((tensor.dtype, False, False))  # asks for it
            else:
                variant = triton.variant(tensor)
                if variant is not None and self._readiness.is_ready(variant):
                    try:
                        triton.launch(tensor, ticket)
                        return
                    except NoWorkspace:
                        pass
                    except Exception as error:
                        self._readiness.give_up(error)
            self._torch.launch(tensor, ticket)

    def launch_many(self, tensors: Sequence[torch.Tensor], tickets: Callable[[], int]) -> list[int]:
        """Contiguous ones of one dtype together, in one launch; the others one by one."""
        given = [0] * len(tensors)
        triton = self._triton
        if triton is not None:
            with self._current():
                for dtype in {tensor.dtype for tensor in tensors}:
                    chosen = [
                        place
                        for place, tensor in enumerate(tensors)
                        if tensor.dtype == dtype and triton.variant(tensor) == (dtype, False, False)
                    ]
                    while len(chosen) > 1 and self._readiness.is_ready((dtype, False, True)):
                        count = self._launch_list(triton, tensors, chosen, given, tickets)
                        if not count:
                            break
                        del chosen[:count]
        for place, tensor in enumerate(tensors):
            if not given[place]:
                given[place] = ticket = tickets()
                self.launch(tensor, ticket)
        return given

    def stop(self) -> None:
        """No kernel is made any more. Waits for the one that is being made: a thread that is still inside a compiler
        when Python ends would take the process down."""
        self._readiness.stop()

    def _launch_list(
        self,
        triton: TritonRows,
        tensors: Sequence[torch.Tensor],
        chosen: Sequence[int],
        given: list[int],
        tickets: Callable[[], int],
    ) -> int:
        """As many of the chosen as one launch takes, from the first; how many."""
        some = chosen[: triton.most_listed]
        numbers = [tickets() for _ in some]
        try:
            count = triton.launch_many([tensors[place] for place in some], numbers)
        except NoWorkspace:
            return 0
        except Exception as error:
            self._readiness.give_up(error)
            return 0
        for place, ticket in zip(some[:count], numbers[:count], strict=True):
            given[place] = ticket
        return count

    def _prepare(self, what: Any) -> None:
        """On the thread of readiness: make a kernel by launching it on a few numbers, in a stream of its own."""
        relax_capture()
        from gradtrace_recorder.summaries.device import triton_rows

        triton_rows.refuse_interpreter()
        dtype, strided, listed = what
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device)):
            scratch = torch.zeros((4, WORDS), dtype=torch.int64, device=self._device)
            trial = triton_rows.TritonRows(scratch, self._device, _stream, lambda tickets: True)
            if dtype in triton_rows.KINDS:
                trial.make(dtype, strided=strided, listed=listed)
            _wait()
            if self._triton is None:
                self._triton = triton_rows.TritonRows(
                    self._rows, self._device, _stream, self._have_arrived
                )
                _wait()

    def _without_triton(self, error: Exception) -> None:
        text = str(error).strip().splitlines()
        self._say(
            f"summaries on {self._device} are made by torch's operations, which costs more launches: Triton's kernel "
            f"cannot be used ({type(error).__name__}{': ' + text[0][:200] if text else ''})"
        )

    def _current(self) -> contextlib.AbstractContextManager[Any]:
        if torch.cuda.current_device() == self._device.index:
            return _NOTHING
        return torch.cuda.device(self._device)


_NOTHING = contextlib.nullcontext()


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def _wait() -> None:
    """On a thread of ours: until the current stream has nothing left to do. A call that synchronises would be refused
    where the job has forbidden such (`torch.cuda.set_sync_debug_mode`)."""
    event = torch.cuda.Event()
    event.record()
    while not event.query():
        time.sleep(0.001)


def relax_capture() -> bool:
    """Let the calling thread ask things of CUDA while another one captures a graph. Whether that was possible."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        mode = ctypes.c_int(_RELAXED)
        return bool(driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0)
    except (OSError, AttributeError):
        return False
