"""What is asked of a device's library, and by whom: `Backend` for a kind of device, one `Launcher` for each of them.

A kind that stands in BACKENDS has its tensors summarised on the device. The tests put one there whose streams are
threads of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from gradtrace_recorder.summaries.device.cuda import CudaBackend
from gradtrace_recorder.summaries.device.times import Event


class Launcher(Protocol):
    """One device. Called on the job's threads, in whatever stream is current; never waits for the device."""

    def launch(self, tensor: torch.Tensor, ticket: int) -> None:
        """Have the summary of a plain, detached tensor left in the row of that ticket."""

    def launch_many(
        self, tensors: Sequence[torch.Tensor], tickets: Callable[[], int]
    ) -> list[int | None]:
        """Those of several at once, which hold something each; a ticket for every one of them, None for one that is too
        large."""

    def stop(self) -> None:
        """Start nothing more."""


class Backend(Protocol):
    """A kind of device."""

    def is_in_use(self) -> bool:
        """Whether the job uses such a device. Does not begin to use it."""

    def is_capturing(self, index: int | None) -> bool:
        """Whether what that device's current stream is given goes into a graph instead of being run; None: the calling
        thread's current device."""

    def memory(self, rows: int) -> torch.Tensor:
        """int64 zeros of shape (rows, WORDS) that the host reads and the device writes."""

    def open(
        self,
        device: torch.device,
        rows: torch.Tensor,
        have_arrived: Callable[[Sequence[int]], bool],
        say: Callable[[str], None],
    ) -> Launcher:
        """What launches on that device. `say` is told what a person should know, once."""

    def current(self) -> int | None:
        """The index of the calling thread's current device; None where the job does not use that one."""

    def event(self, index: int) -> Event:
        """An event of that device, that can time."""

    def begin_reading(self, index: int) -> bool:
        """Called first on the thread that asks events, with the device of one: whether it may, without harm to a
        capture elsewhere."""


BACKENDS: dict[str, Backend] = {"cuda": CudaBackend()}


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether work on the tensor is queued, and done when it pleases the device."""
    return not tensor.is_cpu or "cpu" in BACKENDS
