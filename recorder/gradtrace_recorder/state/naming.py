"""Modules and parameters to FQNs: roots numbered by first call, wrappers' prefixes stripped.

Only weak references are kept: what we held would be memory that the job loses.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradtrace_recorder.torch_internals.autograd import sequence_nr

# A wrapper owns the model under this attribute, and its name is no part of an FQN.
_WRAPPER_ATTRIBUTES = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "AveragedModel": "module",
    "DeepSpeedEngine": "module",
}


_ROOTS_BETWEEN_CLEARINGS = 256


class ModuleName:
    """A module's place: its root and its FQN there. `wraps` is true of a wrapper, which has its inner's FQN."""

    __slots__ = (
        "class_name", "class_number", "fqn", "fqn_number", "hooks", "is_compiled", "ref", "root", "wanted", "wraps",
    )  # fmt: skip

    def __init__(self, module: nn.Module, root: int, fqn: str, wraps: bool) -> None:
        self.ref = weakref.ref(module)
        self.root = root
        self.fqn = fqn
        self.wraps = wraps
        self.is_compiled = wraps and type(module).__name__ == "OptimizedModule"
        self.class_name = type(unwrapped(module) if self.is_compiled else module).__name__
        self.hooks = id(module._forward_hooks)
        self.fqn_number = self.class_number = -1
        self.wanted = True


@dataclass(frozen=True)
class ParameterName:
    """A parameter's or buffer's place; `others` are its other names where it is tied."""

    root: int
    fqn: str
    kind: str
    others: tuple[str, ...]


class _Place:
    """Where a tensor is held, and once that module is gone, when it went: (thread, its sequence number then)."""

    __slots__ = ("gone", "module", "name", "own")

    def __init__(self, module: nn.Module, own: str, name: ParameterName) -> None:
        self.own = own
        self.name = name
        self.gone: tuple[int, int] | None = None
        # No weak reference to a tensor: `torch.utils.swap_tensors` refuses one that has any.
        self.module = weakref.ref(module, self._left)

    def _left(
        self,
        _: object,
        # By reference: where the job's modules outlive ours at the interpreter's end, the names here are None by then.
        get_ident: Callable[[], int] = threading.get_ident,
        get_sequence_nr: Callable[[], int] = sequence_nr,
    ) -> None:
        self.gone = get_ident(), get_sequence_nr()


class Names:
    """All names that the recording has given out. Called on the job's threads, under the GIL."""

    def __init__(self) -> None:
        self._modules: dict[int, ModuleName] = {}
        self._by_hooks: dict[int, ModuleName] = {}
        self._roots: list[weakref.ref[nn.Module]] = []
        self._tensors: dict[int, _Place] = {}
        self.places_given = 0  # how often a tensor got a place, or lost it
        self.is_settled = False
        self.device: str | None = None  # type of the first root's device, None for the CPU
        # Torch's own records of sharded parameters (FSDP2), which know the tensor that stands in for each.
        self.sharded: list[weakref.ref[Any]] = []

    def module(self, module: nn.Module) -> ModuleName | None:
        """The module's place, None for one that no root is known to hold."""
        name = self._modules.get(id(module))
        if name is not None and name.ref() is module:
            return name
        if "_is_replica" in module.__dict__:
            # Made by `nn.DataParallel` for one call: it shares its hooks with the module that it stands for.
            name = self._by_hooks.get(id(module._forward_hooks))
            original = name.ref() if name is not None else None
            if original is not None and original._forward_hooks is module._forward_hooks:
                return name
        return None

    def adopt(self, module: nn.Module, inside: int | None = None) -> ModuleName:
        """The place of a module called for the first time: in the root it is called in, if that holds it
        by now (a module injected later), else as a root of its own. A wrapper takes the place of what it wraps.

        Before the first backward pass it takes over earlier roots that it holds: parts that were called alone
        while the model was built.
        """
        if inside is not None:
            root = self._roots[inside]()
            if root is not None:
                self._scan(root, inside)
                name = self.module(module)
                if name is not None:
                    return name
        inner = unwrapped(module)
        wrapped = self.module(inner) if inner is not module else None
        if wrapped is not None:
            name = ModuleName(module, wrapped.root, wrapped.fqn, wraps=True)
            self._modules[id(module)] = self._by_hooks[name.hooks] = name
            return name
        parts: set[int] = set()
        if not self.is_settled:
            held = {id(part) for part, _ in walk(module)}
            parts = {index for index, root in self.roots() if id(root) in held}
        self._roots.append(weakref.ref(module))
        if len(self._roots) % _ROOTS_BETWEEN_CLEARINGS == 0:
            self._forget_the_dead()
        self._scan(module, len(self._roots) - 1, parts)
        if len(self._roots) == 1:
            for _, tensor in self.tensors_of(0):
                self.device = tensor.device.type if tensor.device.type != "cpu" else None
                break
        name = self.module(module)
        assert name is not None
        return name

    def roots(self) -> Iterator[tuple[int, nn.Module]]:
        """Every root that is alive, with its number."""
        for index, ref in enumerate(self._roots):
            module = ref()
            if module is not None:
                yield index, module

    def root(self, index: int) -> nn.Module | None:
        """The root of that number, None once it is gone."""
        return self._roots[index]()

    def fqns(self) -> set[str]:
        """The FQNs of all modules that were named."""
        return {name.fqn for name in list(self._modules.values())}

    def class_names(self) -> set[str]:
        """The classes of all modules that were named."""
        return {name.class_name for name in list(self._modules.values())}

    def tensors_of(
        self, index: int, parts: Container[int] = ()
    ) -> list[tuple[ParameterName, torch.Tensor]]:
        """The parameters and buffers that a root owns now, in order of registration, tied ones once.

        Those of the roots that are `parts` of it become its own.
        """
        root = self.root(index)
        if root is None:
            return []
        fqns: dict[int, list[str]] = {}
        found: dict[int, tuple[str, torch.Tensor, nn.Module, str]] = {}
        for module, fqn in walk(root):
            for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
                for own, tensor in tensors.items():
                    if tensor is not None:
                        fqns.setdefault(id(tensor), []).append(f"{fqn}.{own}" if fqn else own)
                        found.setdefault(id(tensor), (kind, tensor, module, own))
        named = []
        for key, (kind, tensor, module, own) in found.items():
            known = self.tensor(tensor)
            if (
                known is None
                or (known.root == index and known.fqn != fqns[key][0])
                or known.root in parts
            ):
                known = ParameterName(index, fqns[key][0], kind, tuple(fqns[key][1:]))
                self._tensors[key] = _Place(module, own, known)
                self.places_given += 1
            if known.root == index:
                named.append((known, tensor))
        return named

    def tensor(self, tensor: torch.Tensor) -> ParameterName | None:
        """The name of a parameter or buffer, None for one that no root is known to own."""
        place = self._tensors.get(id(tensor))
        module = place.module() if place is not None else None
        if place is None or module is None:
            return None
        held = module._parameters if place.name.kind == "parameter" else module._buffers
        return place.name if _entry(held, place.own) is tensor else None

    @property
    def places(self) -> dict[int, _Place]:
        """Where each tensor is held, by identity: `tensor` checks what it finds there, and so must any other reader."""
        return self._tensors

    def orphan(self, tensor: torch.Tensor, used_by: int) -> ParameterName | None:
        """The name of a parameter whose module is gone.

        A Node of the calling thread leads to it: one older than the module's end. So the tensor is the parameter,
        and no later one in the same place: it has lived since then.
        """
        place = self._tensors.get(id(tensor))
        if place is None or place.gone is None or place.gone[0] != threading.get_ident():
            return None
        return place.name if used_by < place.gone[1] else None

    def stand_ins(self) -> dict[int, ParameterName]:
        """By identity, the tensors that stand in for sharded parameters while they are gathered."""
        found = {}
        for ref in self.sharded:
            record = ref()
            tensor = getattr(record, "_unsharded_param", None)
            if record is not None and tensor is not None:
                place = self._tensors.get(id(record.sharded_param))
                if place is not None and place.module() is not None:
                    found[id(tensor)] = place.name
        return found

    def _forget_the_dead(self) -> None:
        """A job that makes a model for every step must not fill our memory."""
        self._modules = {k: name for k, name in self._modules.items() if name.ref() is not None}
        self._by_hooks = {name.hooks: name for name in self._modules.values()}
        self._tensors = {k: p for k, p in self._tensors.items() if p.module() is not None}
        self.places_given += 1

    def _scan(self, root: nn.Module, index: int, parts: Container[int] = ()) -> None:
        for module, fqn in walk(root):
            name = self.module(module)
            if name is None or name.root in parts or (name.root == index and name.fqn != fqn):
                wraps = _inner_attribute(module) is not None
                name = self._modules[id(module)] = ModuleName(module, index, fqn, wraps)
                self._by_hooks[name.hooks] = name
        self.tensors_of(index, parts)


def unwrapped(module: nn.Module) -> nn.Module:
    """The model inside any wrappers."""
    attribute = _inner_attribute(module)
    while attribute is not None:
        inner = module._modules[attribute]
        assert inner is not None
        module = inner
        attribute = _inner_attribute(module)
    return module


def holds_parameters(module: nn.Module) -> bool:
    """Whether the module or one inside it has a parameter. Neither hashes nor compares modules, as
    `module.parameters()` does: a class of the job's may allow neither."""
    return any(
        parameter is not None
        for inner, _ in walk(module)
        for parameter in inner._parameters.values()
    )


def _entry(held: Any, name: str) -> Any:
    """What a module holds under a name, or None. A ScriptModule's tables have no `get`."""
    return held[name] if name in held else None  # noqa: SIM401


def _inner_attribute(module: nn.Module) -> str | None:
    for base in type(module).__mro__:
        attribute = _WRAPPER_ATTRIBUTES.get(base.__name__)
        if attribute is not None and _entry(module._modules, attribute) is not None:
            return attribute
    return None


def walk(root: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Every module once, parents first, with its FQN relative to the root."""
    seen: set[int] = set()
    waiting: list[tuple[nn.Module, str]] = [(root, "")]
    while waiting:
        module, fqn = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield module, fqn
        inner = _inner_attribute(module)
        for name, child in reversed(list(module._modules.items())):
            if child is not None:
                own = fqn if name == inner else f"{fqn}.{name}" if fqn else name
                waiting.append((child, own))
