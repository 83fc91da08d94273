"""The devices of a job, opened when a tensor of theirs is summarised first, and what is asked of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from gradtrace_recorder.summaries.device.backends import BACKENDS, Launcher, is_on_device
from gradtrace_recorder.summaries.device.ring import RING_ROWS, Part, Ring
from gradtrace_recorder.summaries.device.times import Event
from gradtrace_recorder.summaries.device.torch_rows import TooLarge
from gradtrace_recorder.summaries.values import NO_LANES, Packed
from gradtrace_schemas.summary import STATE_PENDING


class NotNow(Exception):
    """A tensor on a device cannot be summarised here; its text is the reason that is counted."""


class Devices:
    """Asks devices for summaries: what comes back at once is a ticket, for the drain thread to redeem."""

    def __init__(
        self, say: Callable[[str], None], wake: Callable[[], None], rows: int = RING_ROWS
    ) -> None:
        """`say` is told what a person should know; `wake` is called when the drain thread should look."""
        self.ring: Ring | None = None
        self._say = say
        self._wake = wake
        self._count = rows
        self._rows: dict[str, torch.Tensor] = {}
        self._launchers: dict[torch.device, Launcher] = {}
        self._refused: set[torch.device] = set()
        self._lock = threading.RLock()

    def has(self, device: torch.device) -> bool:
        """Whether tensors there are summarised by the device itself."""
        return device.type in BACKENDS

    def is_asked(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether any of these may be on a device: told at once of a job on the CPU."""
        return any(map(is_on_device, tensors))

    def summary(self, tensor: torch.Tensor, dtype: int) -> Packed:
        """A plain, detached tensor's summary, yet to come. Raises NotNow."""
        launcher, ring = self._launcher(tensor.device)
        if not tensor.data_ptr():
            raise NotNow("without memory")
        ticket = ring.ticket()
        try:
            launcher.launch(tensor, ticket)
        except TooLarge as error:
            raise NotNow("too large without the kernel") from error
        return pending(tensor.numel(), ticket, dtype)

    def summaries(
        self, tensors: Sequence[torch.Tensor], dtypes: Sequence[int]
    ) -> list[Packed | None]:
        """Those of several tensors of one device, in few launches; None for one that was left out. Raises NotNow."""
        launcher, ring = self._launcher(tensors[0].device)
        if not all(tensor.data_ptr() for tensor in tensors):
            raise NotNow("without memory")
        tickets = launcher.launch_many(tensors, ring.ticket)
        return [
            None if ticket is None else pending(tensor.numel(), ticket, dtype)
            for tensor, ticket, dtype in zip(tensors, tickets, dtypes, strict=True)
        ]

    def combination(self, parts: Sequence[tuple[int, Packed]]) -> Packed:
        """One summary for several, some of them yet to come; each with its position."""
        ring = self.ring
        assert ring is not None
        tickets: list[Part] = []
        for position, part in parts:
            is_pending = part[-1] == STATE_PENDING
            tickets.append((position, int(part[6]) if is_pending else ring.put(part)))
        numel = sum(int(part[0]) for _, part in parts)
        return pending(numel, ring.combination(tickets), int(parts[0][1][-2]))

    def place(self, of: Any = None) -> Hashable | None:
        """The device whose current stream takes an event now: that of the tensor `of`, where it lies on one, else the
        calling thread's. None where there is none in use, or a graph is being captured."""
        where = of.device if isinstance(of, torch.Tensor) and is_on_device(of) else None
        for kind, backend in BACKENDS.items():
            if (where is None or where.type == kind) and backend.is_in_use():
                index = None if where is None else where.index
                index = backend.current() if index is None else index
                return None if index is None or backend.is_capturing(index) else (kind, index)
        return None

    def takes(self, place: Hashable) -> bool:
        """Whether that device's current stream takes an event now: no graph is being captured from it."""
        assert isinstance(place, tuple)
        return not BACKENDS[place[0]].is_capturing(place[1])

    def event(self, place: Hashable) -> Event:
        """An event for that device."""
        assert isinstance(place, tuple)
        return BACKENDS[place[0]].event(place[1])

    def begin_reading(self, place: Hashable) -> bool:
        """Whether the calling thread may ask events, of which one is of that device."""
        assert isinstance(place, tuple)
        return BACKENDS[place[0]].begin_reading(place[1])

    def stop(self) -> None:
        """Nothing more is started."""
        for launcher in self._launchers.values():
            launcher.stop()

    def _launcher(self, device: torch.device) -> tuple[Launcher, Ring]:
        if BACKENDS[device.type].is_capturing(device.index):
            raise NotNow("while a graph is captured")
        launcher = self._launchers.get(device)
        if launcher is None:
            launcher = self._opened(device)
        assert self.ring is not None
        return launcher, self.ring

    def _opened(self, device: torch.device) -> Launcher:
        with self._lock:
            found = self._launchers.get(device)
            if found is not None:
                return found
            if device in self._refused:
                raise NotNow(f"on {device.type}")
            try:
                # What is written to later must be no tensor of an inference mode, in which the job may be just now.
                with torch.inference_mode(False):
                    return self._open(device)
            except Exception as error:
                self._refused.add(device)
                self._say(
                    f"tensors on {device} are not summarised: the memory for it could not be had "
                    f"({type(error).__name__}: {str(error)[:200]})"
                )
                raise NotNow(f"on {device.type}") from error

    def _open(self, device: torch.device) -> Launcher:
        backend = BACKENDS[device.type]
        if self.ring is None:
            memory = backend.memory(self._count)
            self._rows[device.type] = memory
            self.ring = Ring(memory.numpy(), self._wake)
        elif device.type not in self._rows:
            raise RuntimeError("devices of two kinds in one process")
        launcher = backend.open(device, self._rows[device.type], self.ring.have_arrived, self._say)
        self._launchers[device] = launcher
        return launcher


def pending(numel: int, ticket: int, dtype: int) -> Packed:
    """A summary that a device has yet to leave."""
    return (numel, 0.0, 0.0, 0.0, 0, 0, ticket, *NO_LANES, dtype, STATE_PENDING)
