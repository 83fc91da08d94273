"""Launches of the Triton kernel: which programs, over which workspace, and many tensors in one launch.

Nothing here waits for the device. Triton is imported with this module, and a kernel is compiled when it is first
launched, which takes a second or two: `readiness` sees to it that neither happens in a thread of the job's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter

from gradtrace_recorder.summaries.device import kernel
from gradtrace_recorder.summaries.device.rows import CHECK, WORDS, factors
from gradtrace_recorder.summaries.device.tables import NoWorkspace, Sent
from gradtrace_schemas.summary import (
    CHUNK,
    MIX_FACTORS,
    MULTIPLIER_SEED,
    TURN_SEED,
    lanes,
    signed,
    signs,
    weights,
)
from gradtrace_schemas.table import SKETCH_LANES

# A tensor's chunks are shared among at most so many programs, each of which takes several.
_MOST_PROGRAMS = 512
_CHUNKS_A_PROGRAM = 4
_WORKSPACE_PROGRAMS = 8192
_WORKSPACE_WORDS = 24
_MOST_LISTED = 512
# Each stream has a workspace of its own (1.6 MB), since kernels of two may run at once.
MOST_STREAMS = 16
_LISTS = 4
_LIST_WORDS = 8


@dataclass(frozen=True)
class _Kind:
    dtype: Any
    exponent: int
    mantissa: int


KINDS = {
    torch.float16: _Kind(tl.float16, 0x7C00, 0x03FF),
    torch.bfloat16: _Kind(tl.bfloat16, 0x7F80, 0x007F),
    torch.float32: _Kind(tl.float32, 0x7F80_0000, 0x007F_FFFF),
    torch.float64: _Kind(tl.float64, 0x7FF0_0000_0000_0000, 0x000F_FFFF_FFFF_FFFF),
}

# Triton 3.9 warns where the second is left to it, in a job that may take warnings for errors.
OPTIONS: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}

# (dtype, strided, listed): each is a kernel of its own.
Variant = tuple[torch.dtype, bool, bool]


@dataclass
class _List:
    """Where the host writes what a launch of many is told, and where the device reads it."""

    host: torch.Tensor
    numbers: Any
    device: torch.Tensor
    tickets: Sequence[int] = ()


@dataclass(frozen=True)
class _Workspace:
    """Memory that was allocated on a stream, and is used on it alone: on another one it might still be read by what
    the job gave that stream before it let go of the same memory."""

    partials: torch.Tensor
    counters: torch.Tensor
    lists: list[_List] = field(default_factory=list)


class TritonRows:
    """Launches kernels that leave rows in `rows`, memory that the host reads and the device writes.

    `stream` names the stream that a launch goes to. `have_arrived` tells of tickets
    whether all their rows are there.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        device: torch.device,
        stream: Callable[[], int],
        have_arrived: Callable[[Sequence[int]], bool],
    ) -> None:
        self._rows = rows
        self._slots = rows.shape[0]
        self._device = device
        self._stream = stream
        self._have_arrived = have_arrived
        self._sent = sent = Sent(device)
        self._weights, self._places, self._constants = (sent.table(table) for table in _tables())
        self._workspaces: dict[int, _Workspace] = {}

    @property
    def most_listed(self) -> int:
        """How many tensors one launch of many takes at most."""
        return _MOST_LISTED

    def make(self, dtype: torch.dtype, *, strided: bool, listed: bool) -> None:
        """Compile that kernel, by launching it on a few numbers."""
        some = torch.zeros((2, 2), dtype=dtype, device=self._device)
        if listed:
            self.launch_many([some], lambda: 1)
        else:
            self.launch(some.t() if strided else some, 1)

    def variant(self, tensor: torch.Tensor) -> Variant | None:
        """Which kernel the tensor needs; None where none reads it."""
        if tensor.dtype not in KINDS or tensor.is_neg():  # a view whose signs are only marked
            return None
        if tensor.is_contiguous():
            return tensor.dtype, False, False
        return (tensor.dtype, True, False) if _collapsed(tensor) is not None else None

    def launch(self, tensor: torch.Tensor, ticket: int) -> None:
        """The summary of a detached tensor that has a variant, into the row of that ticket."""
        kind = KINDS[tensor.dtype]
        workspace = self._workspace()
        sizes = None if tensor.is_contiguous() else _collapsed(tensor)
        (_, n1, n2, n3), strides = sizes or ((0, 0, 0, 0), (0, 0, 0, 0))
        kernel.summarise_one[(_programs(tensor.numel()),)](
            tensor, tensor.numel(), n1, n2, n3, *strides, self._rows, ticket % self._slots, ticket,
            workspace.partials, _WORKSPACE_PROGRAMS, workspace.counters,
            self._weights, self._places, self._constants,
            EXPONENT=kind.exponent, MANTISSA=kind.mantissa, STRIDED=sizes is not None, **OPTIONS,
        )  # fmt: skip

    def launch_many(
        self, tensors: Sequence[torch.Tensor], tickets: Callable[[], int]
    ) -> Sequence[int]:
        """The same for contiguous tensors of one dtype in one launch; tickets of those, from the first, that it took.

        Of none where all lists are still in use on the device. Tensors must outlive the call alone: what runs later on
        this stream cannot overtake it.
        """
        workspace = self._workspace()
        chosen = self._free_list(workspace)
        if chosen is None:
            return ()
        numels = [tensor.numel() for tensor in tensors[:_MOST_LISTED]]
        programs = [_programs(numel) for numel in numels]
        ends = np.cumsum(programs)
        count = int(np.searchsorted(ends, _WORKSPACE_PROGRAMS, side="right"))
        total = int(ends[count - 1])
        given = [tickets() for _ in range(count)]  # no more: each is a row less for others
        entries = chosen.numbers[: _MOST_LISTED * _LIST_WORDS].reshape(_MOST_LISTED, _LIST_WORDS)
        entries[:count, 0] = [tensor.data_ptr() for tensor in tensors[:count]]
        entries[:count, 1] = numels[:count]
        entries[:count, 2] = [ticket % self._slots for ticket in given]
        entries[:count, 3] = given
        entries[:count, 4] = ends[:count] - programs[:count]
        entries[:count, 5] = programs[:count]
        owners = _MOST_LISTED * _LIST_WORDS
        chosen.numbers[owners : owners + total] = np.repeat(np.arange(count), programs[:count])
        used = owners + total
        chosen.device[:used].copy_(chosen.host[:used], non_blocking=True)
        chosen.tickets = given
        kind = KINDS[tensors[0].dtype]
        kernel.summarise_many[(total,)](
            chosen.device, chosen.device[owners:], self._rows, workspace.partials, _WORKSPACE_PROGRAMS,
            workspace.counters, self._weights, self._places, self._constants,
            DTYPE=kind.dtype, EXPONENT=kind.exponent, MANTISSA=kind.mantissa, **OPTIONS,
        )  # fmt: skip
        workspace.lists.append(chosen)
        return given

    def _workspace(self) -> _Workspace:
        stream = self._stream()
        return self._workspaces.get(stream) or self._new_workspace(stream)

    @torch.inference_mode(False)  # what is written to later must be no tensor of an inference mode
    def _new_workspace(self, stream: int) -> _Workspace:
        if len(self._workspaces) >= MOST_STREAMS:
            raise NoWorkspace(f"summaries were asked for on more than {MOST_STREAMS} streams")
        shape = _WORKSPACE_WORDS * _WORKSPACE_PROGRAMS
        self._sent.wait()
        found = self._workspaces[stream] = _Workspace(
            torch.empty(shape, dtype=torch.int64, device=self._device),
            torch.zeros(_MOST_LISTED, dtype=torch.int32, device=self._device),
        )
        return found

    @torch.inference_mode(False)
    def _free_list(self, workspace: _Workspace) -> _List | None:
        """Memory for a list that no kernel has yet to read: all its rows have arrived. It is the caller's until it is
        put back: another thread on this stream, or a signal handler of the job's, must not find it meanwhile."""
        lists = workspace.lists
        for _ in range(len(lists)):
            try:
                chosen = lists.pop(0)
            except IndexError:  # another thread has it
                break
            if self._have_arrived(chosen.tickets):
                return chosen
            lists.append(chosen)
        if len(lists) >= _LISTS:
            return None
        words = _MOST_LISTED * _LIST_WORDS + _WORKSPACE_PROGRAMS
        host = torch.zeros(
            words, dtype=torch.int64, pin_memory=self._device.type == "cuda", device="cpu"
        )
        device = torch.empty(words, dtype=torch.int64, device=self._device)
        return _List(host, host.numpy(), device)


def refuse_interpreter() -> None:
    """Raise where Triton interprets kernels on the host (TRITON_INTERPRET=1): that reads a device's tensors."""
    if isinstance(kernel.summarise_one, triton.runtime.interpreter.InterpretedFunction):
        raise RuntimeError("TRITON_INTERPRET is set")


def _programs(numel: int) -> int:
    """How many programs share a tensor: by its size alone, so that its bits are the same on every device."""
    chunks = -(-numel // CHUNK)
    return max(1, min(_MOST_PROGRAMS, -(-chunks // _CHUNKS_A_PROGRAM)))


def _collapsed(
    tensor: torch.Tensor,
) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]] | None:
    """Sizes and strides of the same elements in the same order over four dimensions; None where they need more."""
    sizes: list[int] = []
    strides: list[int] = []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size == 1:
            continue
        if sizes and strides[-1] == stride * size:
            sizes[-1] *= size
            strides[-1] = stride
        else:
            sizes.append(size)
            strides.append(stride)
    if len(sizes) > 4:
        return None
    missing = 4 - len(sizes)
    n = (*(1,) * missing, *sizes)
    s = (*(0,) * missing, *strides)
    return (n[0], n[1], n[2], n[3]), (s[0], s[1], s[2], s[3])


def _tables() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(weights by place, place and sign by row and lane, constants) as the kernel reads them."""
    places = np.zeros(CHUNK, np.int32)
    every = np.arange(CHUNK)
    places[every // SKETCH_LANES * SKETCH_LANES + lanes()] = every | (
        (signs() < 0).astype(np.int64) << 12
    )
    constants = np.zeros(WORDS, np.int64)
    constants[:CHECK] = factors()
    seeds = (MULTIPLIER_SEED, TURN_SEED, *MIX_FACTORS)
    constants[CHECK : CHECK + len(seeds)] = [signed(value) for value in seeds]
    return weights().astype(np.int32), places, constants
