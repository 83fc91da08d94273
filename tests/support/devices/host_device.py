"""A device whose streams are threads of this host: what the recorder asks of CUDA, answered by real work done later.

Put into BACKENDS for `cpu`, tensors of an ordinary job are summarised as those of a device are: a launch returns at
once, the row is written when the stream comes to it, events are over when the stream has passed them.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from gradtrace_recorder.summaries.device.backends import BACKENDS
from gradtrace_recorder.summaries.device.launching import Launches
from gradtrace_recorder.summaries.device.rows import WORDS
from gradtrace_recorder.summaries.device.torch_rows import TorchRows


class HostStream:
    """Runs what it is given, in order, on a thread of its own, while it is not held."""

    def __init__(self) -> None:
        self._given: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._may_run = threading.Event()
        self._may_run.set()
        self._thread = threading.Thread(target=self._run, name="host-stream", daemon=True)
        self._thread.start()

    def give(self, work: Callable[[], None]) -> None:
        """Have this run after all that was given before."""
        self._given.put(work)

    def hold(self) -> None:
        """Run nothing more until `release`."""
        self._may_run.clear()

    def release(self) -> None:
        """Go on."""
        self._may_run.set()

    def wait(self) -> None:
        """Until all that was given has run."""
        done = threading.Event()
        self.give(done.set)
        assert done.wait(30)

    def end(self) -> None:
        """Run what was given, then end."""
        self.release()
        self._given.put(None)
        self._thread.join(30)

    def _run(self) -> None:
        while True:
            work = self._given.get()
            self._may_run.wait()
            if work is None:
                return
            work()


class HostEvent:
    """A point in a host stream."""

    def __init__(self, stream: HostStream) -> None:
        self._stream = stream
        self._passed: float | None = None

    def record(self) -> None:
        """Put it behind what the stream was given."""
        self._passed = None
        self._stream.give(self._pass)

    def query(self) -> bool:
        """Whether the stream has passed it."""
        return self._passed is not None

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds to a later event."""
        if self._passed is None or end._passed is None:
            raise RuntimeError("both events must be over")
        return (end._passed - self._passed) * 1e3

    def _pass(self) -> None:
        self._passed = time.perf_counter()


class HostLauncher:
    """Summaries by torch's operations, on the stream."""

    def __init__(self, stream: HostStream, rows: TorchRows) -> None:
        self._stream = stream
        self._rows = rows
        self.launches = 0

    def launch(self, tensor: torch.Tensor, ticket: int) -> None:
        """The tensor as it is now, read when the stream comes to it: as a device reads what precedes in its stream."""
        seen = tensor.clone()
        self.launches += 1
        self._stream.give(lambda: self._rows.launch(seen, ticket))

    def launch_many(
        self, tensors: Sequence[torch.Tensor], tickets: Callable[[], int]
    ) -> list[int | None]:
        """One piece of work for all."""
        given = [tickets() for _ in tensors]
        seen = [tensor.clone() for tensor in tensors]
        self.launches += 1

        def run() -> None:
            for tensor, ticket in zip(seen, given, strict=True):
                self._rows.launch(tensor, ticket)

        self._stream.give(run)
        return list(given)

    def stop(self) -> None:
        """Nothing is going on beside the stream."""


class HostBackend:
    """One device with one stream. `is_captured` says that what it is given goes into a graph."""

    def __init__(self) -> None:
        self.stream = HostStream()
        self.is_captured = False
        self.events = 0
        self.launchers: list[HostLauncher] = []

    def is_in_use(self) -> bool:
        """It is."""
        return True

    def is_capturing(self, index: int | None) -> bool:
        """As the test has it."""
        return self.is_captured

    def memory(self, rows: int) -> torch.Tensor:
        """Ordinary memory."""
        return torch.zeros((rows, WORDS), dtype=torch.int64)

    def open(
        self,
        device: torch.device,
        rows: torch.Tensor,
        have_arrived: Callable[[Sequence[int]], bool],
        say: Callable[[str], None],
    ) -> HostLauncher:
        """Its launcher."""
        self.launchers.append(HostLauncher(self.stream, TorchRows(rows, device)))
        return self.launchers[-1]

    def current(self) -> int | None:
        """Its only device."""
        return 0

    def event(self, index: int) -> HostEvent:
        """An event of its stream."""
        self.events += 1
        return HostEvent(self.stream)

    def begin_reading(self, index: int) -> bool:
        """Anybody may."""
        return True


class HostSurroundings:
    """Launches on the host itself, one at a time: Triton's interpreter changes its language while it runs."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """One at a time."""
        return self._lock

    def apart(self) -> contextlib.AbstractContextManager[Any]:
        """The same."""
        return self._lock

    def wait(self) -> None:
        """All is done when it returns."""

    def stream(self) -> int:
        """There is one."""
        return 0

    def interprets(self) -> bool:
        """It is what the host can do."""
        return True


class InlineBackend(HostBackend):
    """A device that is the host: launches of the recorder's own, done when they return."""

    def open(
        self,
        device: torch.device,
        rows: torch.Tensor,
        have_arrived: Callable[[Sequence[int]], bool],
        say: Callable[[str], None],
    ) -> Any:
        """Kernels by Triton's interpreter where Triton is there, torch's operations until then."""
        return Launches(device, HostSurroundings(), rows).begin(have_arrived, say)


@contextlib.contextmanager
def host_device(kind: type[HostBackend] = HostBackend) -> Iterator[HostBackend]:
    """Tensors of the CPU are on such a device meanwhile. No operation of its work is left running afterwards."""
    backend = kind()
    assert "cpu" not in BACKENDS
    BACKENDS["cpu"] = backend
    try:
        yield backend
    finally:
        del BACKENDS["cpu"]
        backend.stream.end()
