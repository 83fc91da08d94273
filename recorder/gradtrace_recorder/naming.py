"""Modules and parameters to FQNs: roots numbered by first call, wrappers' prefixes stripped.

Only weak references are kept: what we held would be memory that the job loses.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

# A wrapper owns the model under this attribute, and its name is no part of an FQN.
_WRAPPER_ATTRIBUTES = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "AveragedModel": "module",
}


class ModuleName:
    """A module's place: its root and its FQN there. `wraps` is true of a wrapper, which has its inner's FQN."""

    __slots__ = ("class_name", "fqn", "fqn_number", "ref", "root", "wanted", "wraps")

    def __init__(self, module: nn.Module, root: int, fqn: str, wraps: bool) -> None:
        self.ref = weakref.ref(module)
        self.root = root
        self.fqn = fqn
        self.wraps = wraps
        self.class_name = type(module).__name__
        self.fqn_number = -1
        self.wanted = True


@dataclass(frozen=True)
class ParameterName:
    """A parameter's or buffer's place; `others` are its other names where it is tied."""

    root: int
    fqn: str
    kind: str
    others: tuple[str, ...]


class Names:
    """All names that the recording has given out. Called on the job's threads, under the GIL."""

    def __init__(self) -> None:
        self._modules: dict[int, ModuleName] = {}
        self._roots: list[weakref.ref[nn.Module]] = []
        # No weak reference to a tensor: `torch.utils.swap_tensors` refuses one that has any.
        self._tensors: dict[int, tuple[weakref.ref[nn.Module], str, ParameterName]] = {}

    def module(self, module: nn.Module) -> ModuleName | None:
        """The module's place, None for one that no root is known to hold."""
        name = self._modules.get(id(module))
        return name if name is not None and name.ref() is module else None

    def adopt(self, module: nn.Module, inside: int | None = None) -> ModuleName:
        """The place of a module called for the first time: in the root it is called in, if that holds it
        by now (a module injected later), else as a root of its own."""
        if inside is not None:
            root = self._roots[inside]()
            if root is not None:
                self._scan(root, inside)
                name = self.module(module)
                if name is not None:
                    return name
        self._roots.append(weakref.ref(module))
        self._scan(module, len(self._roots) - 1)
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

    def tensors_of(self, index: int) -> list[tuple[ParameterName, torch.Tensor]]:
        """The parameters and buffers that a root owns now, in order of registration, tied ones once."""
        root = self.root(index)
        if root is None:
            return []
        fqns: dict[int, list[str]] = {}
        found: dict[int, tuple[str, torch.Tensor, nn.Module, str]] = {}
        for module, fqn in _walk(root):
            for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
                for own, tensor in tensors.items():
                    if tensor is not None:
                        fqns.setdefault(id(tensor), []).append(f"{fqn}.{own}" if fqn else own)
                        found.setdefault(id(tensor), (kind, tensor, module, own))
        named = []
        for key, (kind, tensor, module, own) in found.items():
            known = self.tensor(tensor)
            if known is None or (known.root == index and known.fqn != fqns[key][0]):
                known = ParameterName(index, fqns[key][0], kind, tuple(fqns[key][1:]))
                self._tensors[key] = (weakref.ref(module), own, known)
            if known.root == index:
                named.append((known, tensor))
        return named

    def tensor(self, tensor: torch.Tensor) -> ParameterName | None:
        """The name of a parameter or buffer, None for one that no root is known to own."""
        known = self._tensors.get(id(tensor))
        if known is None:
            return None
        module, own, name = known[0](), known[1], known[2]
        if module is None:
            return None
        held = module._parameters.get(own) if name.kind == "parameter" else module._buffers.get(own)
        return name if held is tensor else None

    def _scan(self, root: nn.Module, index: int) -> None:
        for module, fqn in _walk(root):
            if self.module(module) is None:
                wraps = _inner_attribute(module) is not None
                self._modules[id(module)] = ModuleName(module, index, fqn, wraps)
        self.tensors_of(index)


def unwrapped(module: nn.Module) -> nn.Module:
    """The model inside any wrappers."""
    attribute = _inner_attribute(module)
    while attribute is not None:
        inner = module._modules[attribute]
        assert inner is not None
        module = inner
        attribute = _inner_attribute(module)
    return module


def _inner_attribute(module: nn.Module) -> str | None:
    for base in type(module).__mro__:
        attribute = _WRAPPER_ATTRIBUTES.get(base.__name__)
        if attribute is not None and module._modules.get(attribute) is not None:
            return attribute
    return None


def _walk(root: nn.Module) -> Iterator[tuple[nn.Module, str]]:
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
