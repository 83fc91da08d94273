"""From any tensor of a job to its packed summary, whatever the tensor is and whatever modes are on."""

from __future__ import annotations

import collections
import contextlib
import itertools
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from gradtrace_recorder.guard import is_of_a_signal_handler
from gradtrace_recorder.journal.writer import JournalWriter
from gradtrace_recorder.summaries.device.backends import is_on_device
from gradtrace_recorder.summaries.device.devices import Devices, NotNow
from gradtrace_recorder.summaries.native import NativeSummary
from gradtrace_recorder.summaries.torch_ops import Numbers, TorchSummary
from gradtrace_recorder.summaries.values import NO_LANES, STATE, Packed, combined, unread
from gradtrace_recorder.torch_internals.privates import found
from gradtrace_schemas.journal import MAX_DIMENSIONS, NULL_BOOL
from gradtrace_schemas.summary import STATE_FULL, STATE_NORMS, STATE_PENDING, STATE_SHAPE

is_lazy = found("torch.nn.parameter.is_lazy", lambda tensor: False)
profiler_enabled = found("torch._C._autograd._profiler_enabled", lambda: False)
enable_record_function = found("torch._C._autograd._enable_record_function", lambda on: None)
_disable_current_modes = found(
    "torch.utils._python_dispatch._disable_current_modes", contextlib.nullcontext
)
_dispatch_modes = found("torch._C._len_torch_dispatch_stack", lambda: 0)
_function_modes = found("torch._C._len_torch_function_stack", lambda: 0)
is_functorch_wrapped = found(
    "torch._C._functorch.is_functorch_wrapped_tensor", lambda tensor: False
)
is_legacy_batched = found("torch._C._functorch.is_legacy_batchedtensor", lambda tensor: False)
_tracing_state = found("torch._C._get_tracing_state", lambda: None)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
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
        reason = self._unreadable(tensor)
        if reason is not None:
            return self._unread(tensor, reason)
        try:
            with unseen():
                if _is_plain(tensor):
                    # Detached, and so without `no_grad`, which a signal handler of the job would see.
                    return self._strided(tensor)
            with unseen(), torch.no_grad():
                parts = _dense_parts(tensor)
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
                    if _is_plain(tensor) and self._unreadable(tensor) is None
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
            own = tensor if _is_plain(tensor) else _local_shard(tensor)
            if (
                own is not None
                and devices.has(own.device)
                and self._unreadable(tensor) is None
                and self._unreadable(own) is None
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

    def _unreadable(self, tensor: torch.Tensor) -> str | None:
        """Why a tensor's values cannot be read here, or None where they can."""
        if is_functorch_wrapped(tensor) or is_legacy_batched(tensor):
            return "functorch wrapper"
        if is_lazy(tensor):
            return "not yet initialised"
        if tensor.is_quantized:
            return "quantized"
        if tensor.device.type != "cpu" and (
            self._devices is None or not self._devices.has(tensor.device)
        ):
            # Reading its values would synchronise.
            return f"on {tensor.device.type}"
        fake = sys.modules.get("torch._subclasses.fake_tensor")
        if isinstance(
            tensor, getattr(fake, "FakeTensor", ())
        ):  # another thread may be importing it
            return "fake tensor"
        if _tracing_state() is not None:
            return "tracing"
        if _is_plain(tensor) and _is_freed(tensor):
            return "freed storage"
        return None

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


# Of a nested argument so many items are looked at: a list of a million numbers holds no tensors to record.
_MOST_ITEMS = 4096


def named_tensors(values: Any, name: str = "") -> list[tuple[str, torch.Tensor]]:
    """The tensors in nested tuples, lists, mappings and dataclasses, with dotted names, in order."""
    if isinstance(values, torch.Tensor):
        return [(name, values)]
    found: list[tuple[str, torch.Tensor]] = []
    waiting: list[tuple[str, Any]] = [(name, values)]
    seen: set[int] = set()
    looked_at = 0
    while waiting and looked_at < _MOST_ITEMS:
        looked_at += 1
        name, value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found.append((name, value))
        elif (
            not isinstance(value, str | bytes | int | float | type(None)) and id(value) not in seen
        ):
            items = _items(value)
            if items:
                seen.add(id(value))
                named = [(f"{name}.{key}" if name else str(key), item) for key, item in items]
                waiting += reversed(named)
    return found


def _items(values: Any) -> list[tuple[Any, Any]]:
    """What a container holds, by name. What its own class answers with an exception holds nothing for us."""
    try:
        return _named_items(values)
    except Exception as error:
        if is_of_a_signal_handler(error):
            raise
        return []


def _named_items(values: Any) -> list[tuple[Any, Any]]:
    if isinstance(values, tuple | list):
        names: Sequence[Any] = getattr(values, "_fields", range(len(values)))
        return list(itertools.islice(zip(names, values, strict=False), _MOST_ITEMS))
    if isinstance(values, dict):
        return list(itertools.islice(dict.items(values), _MOST_ITEMS))
    if isinstance(values, collections.abc.Mapping):
        return list(itertools.islice(values.items(), _MOST_ITEMS))
    fields = getattr(type(values), "__dataclass_fields__", None)
    if not fields:
        return []
    held = getattr(values, "__dict__", None)
    if held is None:  # a class with `__slots__`
        return [(key, getattr(values, key, None)) for key in fields]
    return [(key, held.get(key)) for key in fields]  # past properties, which may do anything


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout == torch.strided and not tensor.is_nested


def _is_freed(tensor: torch.Tensor) -> bool:
    """Whether its storage is smaller than what it spans: resized to nothing, as sharding does to parameters.

    The storage itself is not asked for: the object that Python has for it then lives as long as it does, is one that
    uses it, and the engine adds up gradients in place in a storage that nobody else uses. Source:
    torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace` (2.13).
    """
    if not tensor.numel():
        return False
    try:
        with unseen():  # a view that does not fit into its storage is refused
            tensor.detach().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    except RuntimeError as error:
        is_refused = str(error).startswith(
            "setStorage"
        )  # else it may be no answer: frames ran out, an alarm
        if not is_refused and (isinstance(error, RecursionError) or is_of_a_signal_handler(error)):
            raise
        return True
    return False


def _local_shard(tensor: torch.Tensor) -> torch.Tensor | None:
    """What of a DTensor lies here, where that is a plain tensor; None for any other tensor."""
    if not hasattr(tensor, "to_local"):
        return None
    local: Any = getattr(tensor, "_local_tensor", None)
    return local if type(local) in _PLAIN and local.layout == torch.strided else None


def _dense_parts(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """What is defined of a tensor that is no plain strided one: its parts, or None."""
    if hasattr(tensor, "to_local") and hasattr(tensor, "_local_tensor"):
        local = _local_shard(tensor)
        return None if local is None else [local]
    if tensor.layout == torch.sparse_coo:
        return [tensor._values(), tensor._indices()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.values(), tensor.crow_indices(), tensor.col_indices()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.values(), tensor.ccol_indices(), tensor.row_indices()]
    if tensor.is_nested:
        return [tensor.values()]
    if tensor.layout == torch.strided and not _overrides_dispatch(tensor):
        return [tensor.as_subclass(torch.Tensor)]
    return None


def _overrides_dispatch(tensor: torch.Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


@contextlib.contextmanager
def _autocast_off() -> Any:
    torch.set_autocast_enabled("cpu", False)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", True)


class _Profiled(threading.local):
    left_out = 0  # how many of our blocks, one inside the other, leave this thread out of the job's profile


_PROFILED = _Profiled()


@contextlib.contextmanager
def _not_profiled() -> Any:
    """The switch is one for the thread, and does not count: the outermost block turns it on again."""
    enable_record_function(False)
    _PROFILED.left_out += 1
    try:
        yield
    finally:
        _PROFILED.left_out -= 1
        if not _PROFILED.left_out:
            enable_record_function(True)


# Inside it nothing that we read of a tensor is asked of the job's function modes and tensor subclasses.
unasked = found("torch._C.DisableTorchFunction", contextlib.nullcontext)

_NOTHING_ON = contextlib.nullcontext()


def unseen() -> contextlib.AbstractContextManager[Any]:
    """Our operations are seen by no mode and no profiler of the job and cast by no autocast; cheap when none is on."""
    modes = _dispatch_modes() or _function_modes()
    autocast = torch.is_autocast_enabled("cpu")
    profiled = profiler_enabled()
    if not modes and not autocast and not profiled:
        return _NOTHING_ON
    stack = contextlib.ExitStack()
    if profiled:
        stack.enter_context(_not_profiled())
    if modes:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(unasked())
    if autocast:
        stack.enter_context(_autocast_off())
    return stack
