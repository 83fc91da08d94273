"""From any tensor of a job to its packed summary, whatever the tensor is and whatever modes are on."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from gradtrace_recorder.guard import is_of_a_signal_handler
from gradtrace_recorder.journal.writer import JournalWriter
from gradtrace_recorder.summaries.device.backends import is_on_device
from gradtrace_recorder.summaries.device.devices import Devices, NotNow
from gradtrace_recorder.summaries.native import NativeSummary
from gradtrace_recorder.summaries.nested import named_tensors
from gradtrace_recorder.summaries.torch_ops import Numbers, TorchSummary
from gradtrace_recorder.summaries.values import NO_LANES, STATE, Packed, combined, unread
from gradtrace_recorder.torch_internals.modes import unseen
from gradtrace_recorder.torch_internals.tensors import (
    dense_parts,
    is_lazy,
    is_plain,
    local_shard,
    why_unreadable,
)
from gradtrace_schemas.journal import MAX_DIMENSIONS, NULL_BOOL
from gradtrace_schemas.summary import STATE_FULL, STATE_NORMS, STATE_PENDING, STATE_SHAPE

_MOST_REMEMBERED = 4096


class Summariser:
    """Summaries of tensors, with what could not be summarised counted by reason.

    `of` may be called in any hook, on any thread that runs Python.
    """

    def __init__(
        self,
        journal: JournalWriter,
        summary: str,
        *,
        strict: bool = False,
        library: Any = None,
        devices: Devices | None = None,
    ) -> None:
        """`library` is the native one, None where it is not used. Of tensors that are not on the CPU those are
        summarised that `devices` knows."""
        self.off = summary == "off"
        self.unsummarised: collections.Counter[str] = collections.Counter()
        self._strict = strict
        self._norms_only = summary == "norms"
        self._state = STATE_NORMS if self._norms_only else STATE_FULL
        self._journal = journal
        self._devices = devices
        self._reads = _nowhere if devices is None else devices.has
        self._dtypes: dict[torch.dtype, int] = {}
        if library is None:
            self._ways = TorchSummary(norms_only=self._norms_only)
        else:
            self._ways = NativeSummary(library, norms_only=self._norms_only)
        self._remembered: dict[int, tuple[weakref.ref[torch.Tensor], int, Packed]] = {}

    def of(self, tensor: torch.Tensor) -> Packed | None:
        """The tensor's packed summary; None where summaries are off."""
        if self.off:
            return None
        reason = why_unreadable(tensor, self._reads)
        if reason is not None:
            return self._unread(tensor, reason)
        try:
            with unseen():
                if is_plain(tensor):
                    # Detached, and so without `no_grad`, which a signal handler of the job would see.
                    return self._strided(tensor)
            with unseen(), torch.no_grad():
                parts = dense_parts(tensor)
                if parts is not None:
                    return self.combined([self._strided(part) for part in parts])
            return self._unread(tensor, f"subclass {type(tensor).__name__}")
        except NotNow as error:
            return self._unread(tensor, str(error))
        except Exception as error:
            # One odd tensor is one summary less, not the end of its source.
            if self._strict or is_of_a_signal_handler(error):
                raise
            return self._unread(tensor, f"{tensor.dtype} {tensor.layout}: {type(error).__name__}")

    def of_each(self, tensors: Sequence[torch.Tensor]) -> list[Packed | None]:
        """The summary of each: what `of` gives, in a few calls for all plain ones."""
        if self.off:
            return [None] * len(tensors)
        if self._devices is not None and self._devices.is_asked(tensors):
            return self._of_each_on_devices(self._devices, tensors)
        made: dict[int, Packed] = {}
        try:
            with unseen():
                plain = {
                    at: tensor.detach()
                    for at, tensor in enumerate(tensors)
                    if is_plain(tensor) and why_unreadable(tensor, self._reads) is None
                }
                numbers = self._ways.each(list(plain.values()))
                for (at, tensor), found in zip(plain.items(), numbers, strict=True):
                    made[at] = self._packed(tensor, found)
        except Exception as error:
            if self._strict or is_of_a_signal_handler(error):
                raise
            made.clear()  # one by one then: of one odd tensor the others have no less
        return [made[at] if at in made else self.of(one) for at, one in enumerate(tensors)]

    def of_gradient(self, gradient: torch.Tensor) -> Packed | None:
        """The same inside a backward pass, where a gradient is often handed on unchanged.

        A result is used again only for the same tensor object, proved by a weak reference, at the same
        version. Called between the Nodes of one pass; `forget` ends it.
        """
        key = id(gradient)
        known = self._remembered.get(key)
        version = -1 if gradient.is_inference() else gradient._version
        if known is not None and known[0]() is gradient and known[1] == version:
            return known[2]
        packed = self.of(gradient)
        if packed is not None and version >= 0:
            if len(self._remembered) > _MOST_REMEMBERED:
                self._remembered.clear()
            self._remembered[key] = (weakref.ref(gradient), version, packed)
        return packed

    def remember(self, gradient: torch.Tensor, packed: Packed) -> None:
        """Use this summary for that very tensor too: the caller has proved that it holds the same."""
        if not gradient.is_inference():
            self._remembered[id(gradient)] = (weakref.ref(gradient), gradient._version, packed)

    def forget(self) -> None:
        """Nothing computed before may be used again."""
        self._remembered.clear()

    def of_all(self, values: Any) -> Packed | None:
        """One summary for all tensors in nested arguments or results of a call."""
        if self.off:
            return None
        tensors = [tensor for _, tensor in named_tensors(values)]
        return self.combined([self.of(tensor) for tensor in tensors]) if tensors else None

    def _of_each_on_devices(
        self, devices: Devices, tensors: Sequence[torch.Tensor]
    ) -> list[Packed | None]:
        """Those of one device together, in few launches."""
        found: list[Packed | None] = [None] * len(tensors)
        together: dict[torch.device, dict[int, torch.Tensor]] = {}
        for place, tensor in enumerate(tensors):
            own = tensor if is_plain(tensor) else local_shard(tensor)
            if (
                own is not None
                and devices.has(own.device)
                and why_unreadable(tensor, self._reads) is None
                and why_unreadable(own, self._reads) is None
                and own.numel()
            ):
                together.setdefault(own.device, {})[place] = own
        for some in together.values():
            for place, packed in zip(some, self._listed(list(some.values())), strict=True):
                found[place] = packed
        return [p or self.of(tensor) for p, tensor in zip(found, tensors, strict=True)]

    def combined(self, parts: Sequence[Packed | None]) -> Packed:
        """`values.combined`, of which some parts may be yet to come."""
        if self._devices is None or not self.uses_devices:
            return combined(parts)
        states = [part[STATE] for part in parts if part is not None]
        if STATE_PENDING not in states or STATE_SHAPE in states:
            return combined(parts)
        present = [(place, part) for place, part in enumerate(parts) if part is not None]
        if len(present) == 1 and present[0][0] == 0:
            return present[0][1]
        return self._devices.combination(present)

    @property
    def uses_devices(self) -> bool:
        """Whether some summaries come later: who combines or compares them goes by `combined` and their states."""
        return self._devices is not None and self._devices.ring is not None

    def missed(self, reason: str, count: int) -> None:
        """So many summaries that a record waited for will not come. Called on the drain thread."""
        self.unsummarised[reason] += count

    def _listed(self, tensors: Sequence[torch.Tensor]) -> list[Packed | None]:
        assert self._devices is not None
        dtypes = [self._dtype(tensor.dtype) for tensor in tensors]
        try:
            with unseen():
                return list(self._devices.summaries([t.detach() for t in tensors], dtypes))
        except Exception as error:
            if (self._strict and not isinstance(error, NotNow)) or is_of_a_signal_handler(error):
                raise
            return [None] * len(tensors)  # one by one, each with its own reason

    def _strided(self, tensor: torch.Tensor) -> Packed:
        if is_on_device(tensor):
            if not tensor.numel():
                zeros: Packed = (0, 0.0, 0.0, 0.0, 0, 0, 0, *NO_LANES)
                return (*zeros, self._dtype(tensor.dtype), self._state)
            if self._devices is None or not self._devices.has(tensor.device):
                raise NotNow(f"on {tensor.device.type}")
            return self._devices.summary(tensor.detach(), self._dtype(tensor.dtype))
        return self._packed(tensor, self._ways.numbers(tensor.detach()))

    def _packed(self, tensor: torch.Tensor, numbers: Numbers) -> Packed:
        return (
            tensor.numel(),
            *numbers[:6],
            *numbers[6],
            self._dtype(tensor.dtype),
            self._state,
        )

    def _unread(self, tensor: torch.Tensor, reason: str) -> Packed:
        self.unsummarised[reason] += 1
        try:
            numel = tensor.numel()
        except (ValueError, RuntimeError):
            numel = 0
        return unread(numel if type(numel) is int else 0, self._dtype(tensor.dtype))

    def _dtype(self, dtype: torch.dtype) -> int:
        number = self._dtypes.get(dtype)
        if number is None:
            number = self._dtypes[dtype] = self._journal.string(str(dtype).removeprefix("torch."))
        return number


def _nowhere(device: torch.device) -> bool:
    return False


def shape_fields(tensor: torch.Tensor) -> tuple[int, ...]:
    """A shape as the journal packs it: how many sizes, then eight of them."""
    try:
        sizes = tuple(tensor.shape)[:MAX_DIMENSIONS]
    except RuntimeError:  # not yet initialised: a lazy module's parameter
        sizes = ()
    if not all(type(size) is int for size in sizes) or is_lazy(tensor):
        # Reading a symbolic size would fix it.
        return (NULL_BOOL, *(0,) * MAX_DIMENSIONS)
    return (len(sizes), *sizes, *(0,) * (MAX_DIMENSIONS - len(sizes)))
