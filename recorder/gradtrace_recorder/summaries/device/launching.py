"""One device's launches: by the kernel where Triton has made it, by torch's operations where it cannot or has yet to.

What differs between kinds of devices is asked of `Surroundings`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from gradtrace_recorder.summaries.device.readiness import Readiness
from gradtrace_recorder.summaries.device.rows import WORDS
from gradtrace_recorder.summaries.device.tables import NoWorkspace
from gradtrace_recorder.summaries.device.torch_rows import TooLarge, TorchRows

if TYPE_CHECKING:
    from gradtrace_recorder.summaries.device.triton_rows import TritonRows


class Surroundings(Protocol):
    """Where launches happen, for one device."""

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """The device is the calling thread's current one."""

    def apart(self) -> contextlib.AbstractContextManager[Any]:
        """The same on a thread of ours, in a stream of its own, whatever the job's threads are capturing."""

    def wait(self) -> None:
        """Until the current stream has nothing left to do; on a thread of ours."""

    def stream(self) -> int:
        """What names the current stream."""

    def interprets(self) -> bool:
        """Whether kernels may be run by Triton's interpreter, on the host."""


class Launches:
    """Has summaries left in rows by one device. Never waits for it.

    It lives as long as the process: what was launched may still write into this memory after a recording has ended,
    and must not find the job's there.
    """

    def __init__(
        self,
        device: torch.device,
        surroundings: Surroundings,
        rows: torch.Tensor,
    ) -> None:
        self._device = device
        self._surroundings = surroundings
        self._rows = rows
        self._have_arrived: Callable[[Sequence[int]], bool] = lambda tickets: False
        self._say: Callable[[str], None] = lambda text: None
        self._triton: TritonRows | None = None
        with surroundings.current():
            self._torch = TorchRows(rows, device)
        self.readiness = Readiness(self._prepare, self._without_triton)

    def begin(
        self, have_arrived: Callable[[Sequence[int]], bool], say: Callable[[str], None]
    ) -> Launches:
        """Itself, for a recording that begins. `say` is told once where Triton's kernel cannot be used."""
        self._have_arrived = have_arrived
        self._say = say
        self.readiness = Readiness(self._prepare, self._without_triton, self.readiness.ready)
        return self

    def launch(self, tensor: torch.Tensor, ticket: int) -> None:
        """By the kernel if it is ready, else by torch's operations."""
        with self._surroundings.current():
            triton = self._triton
            if triton is None:
                if tensor.is_floating_point():
                    self.readiness.is_ready((tensor.dtype, False, False))  # asks for it
            else:
                variant = triton.variant(tensor)
                if variant is not None and self.readiness.is_ready(variant):
                    try:
                        triton.launch(tensor, ticket)
                        return
                    except NoWorkspace:
                        pass
                    except Exception as error:
                        self.readiness.give_up(error)
            self._torch.launch(tensor, ticket)

    def launch_many(
        self, tensors: Sequence[torch.Tensor], tickets: Callable[[], int]
    ) -> list[int | None]:
        """Contiguous ones of one dtype together, in one launch; the others one by one, without those that are too large
        for torch's operations."""
        given: list[int | None] = [None] * len(tensors)
        triton = self._triton
        if triton is not None:
            with self._surroundings.current():
                for dtype in {tensor.dtype for tensor in tensors}:
                    chosen = [
                        place
                        for place, tensor in enumerate(tensors)
                        if tensor.dtype == dtype and triton.variant(tensor) == (dtype, False, False)
                    ]
                    while len(chosen) > 1 and self.readiness.is_ready((dtype, False, True)):
                        count = self._launch_list(triton, tensors, chosen, given, tickets)
                        if not count:
                            break
                        del chosen[:count]
        for place, tensor in enumerate(tensors):
            if given[place] is None:
                ticket = tickets()
                with contextlib.suppress(TooLarge):
                    self.launch(tensor, ticket)
                    given[place] = ticket
        return given

    def stop(self) -> None:
        """No kernel is made any more. Waits for the one that is being made: a thread that is still inside a compiler
        when Python ends would take the process down."""
        self.readiness.stop()

    def _launch_list(
        self,
        triton: TritonRows,
        tensors: Sequence[torch.Tensor],
        chosen: Sequence[int],
        given: list[int | None],
        tickets: Callable[[], int],
    ) -> int:
        """As many of the chosen as one launch takes, from the first; how many."""
        some = chosen[: triton.most_listed]
        try:
            numbers = triton.launch_many([tensors[place] for place in some], tickets)
        except NoWorkspace:
            return 0
        except Exception as error:
            self.readiness.give_up(error)
            return 0
        for place, ticket in zip(some, numbers, strict=False):
            given[place] = ticket
        return len(numbers)

    def _prepare(self, what: Hashable) -> None:
        """On the thread of readiness: make a kernel by launching it on a few numbers."""
        # Its import takes a second, and fails where there is none.
        from gradtrace_recorder.summaries.device import triton_rows

        if not self._surroundings.interprets():
            triton_rows.refuse_interpreter()
        assert isinstance(what, tuple)
        dtype, strided, listed = what
        with self._surroundings.apart():
            stream = self._surroundings.stream
            scratch = torch.zeros((4, WORDS), dtype=torch.int64, device=self._device)
            trial = triton_rows.TritonRows(scratch, self._device, stream, lambda tickets: True)
            if dtype in triton_rows.KINDS:
                trial.make(dtype, strided=strided, listed=listed)
            self._surroundings.wait()
            if self._triton is None:
                made = triton_rows.TritonRows(
                    self._rows, self._device, stream, lambda tickets: self._have_arrived(tickets)
                )
                self._surroundings.wait()
                self._triton = made

    def _without_triton(self, error: Exception) -> None:
        text = str(error).strip().splitlines()
        self._say(
            f"summaries on {self._device} are made by torch's operations, which costs more launches: Triton's kernel "
            f"cannot be used ({type(error).__name__}{': ' + text[0][:200] if text else ''})"
        )
