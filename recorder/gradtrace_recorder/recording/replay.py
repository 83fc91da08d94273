"""Runs a Node a second time, with the gradients that came in, and says whether it gives the same bits.

A Node's saved tensors live until its post-hooks have run (torch 2.13, `Engine::evaluate_function`), so the place is
our own post-hook. A direct call takes no part in the pass: nothing is accumulated, handed on or freed. It differs
from the engine's own in that the engine reduces and casts what comes out to what the receiver expects; that is done
here too. What cannot be run twice without a guess is skipped, and counted by reason.

Telling whether the bits agree waits for the device where the gradients lie on one: who asks for a replay asks for it.
"""

from __future__ import annotations

import collections
import contextlib
import math
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gradtrace_recorder.guard import is_of_a_signal_handler
from gradtrace_recorder.summaries.handed_on import Gradients
from gradtrace_recorder.torch_internals.autograd import FUNCTION_NODE, current_node, sequence_nr
from gradtrace_recorder.torch_internals.dynamo import never_compiled
from gradtrace_recorder.torch_internals.modes import (
    dispatch_modes,
    enable_record_function,
    profiler_enabled,
    unseen,
)
from gradtrace_recorder.torch_internals.tensors import is_functorch_wrapped, is_legacy_batched
from gradtrace_schemas.journal import NULL_BOOL, NULL_FLOAT

# Whether both runs agree, and how far they are apart, as a record holds them.
Verdict = tuple[int, float]
NOT_REPLAYED: Verdict = (NULL_BOOL, NULL_FLOAT)

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 20

# Told that the graph is freed after them, they use up what they saved (`retain_variables` in derivatives.yaml, 2.13).
_USES_UP = ("CudnnRnn", "MiopenRnn", "MkldnnRnn")


class _Running(threading.local):
    """Whether this thread runs a Node again: what that calls leaves no rows."""

    now = False


RUNNING = _Running()


class Replays:
    """What a recording has run again, and what it has not, by reason."""

    def __init__(self) -> None:
        self.skipped: collections.Counter[str] = collections.Counter()

    def prepared(self, node: Any, *, by_request: bool, is_leaf: bool = False) -> NodeReplay:
        """What to do with a chosen Node. `by_request`: a Function of the job's was asked for as such."""
        # An extension's Functions have no class of their own in Python (`CppNode`).
        own = isinstance(node, FUNCTION_NODE)
        kind = type(node).__name__
        is_function = own or kind == "CppFunction"
        is_copy = kind == "CopySlices"
        never = None
        if is_leaf:
            never = "accumulates a gradient"
        elif not by_request and is_function:
            never = "a Function of the job's (ask for it with python:)"
        elif not by_request and is_copy:
            # The Node that it holds cannot be looked at: a Function of the job's, or one with saved-tensor hooks.
            never = "changes a view in place (ask for it with python:)"
        elif type(node).name(node).rpartition("::")[2].startswith(_USES_UP):
            never = "uses up what it saved"
        return NodeReplay(self, own, never, may_draw=is_function or is_copy)


class NodeReplay:
    """The replay of one Node in one pass. Keeps no Node and no tensor."""

    __slots__ = (
        "_calls", "_came", "_may_draw", "_never", "_number", "_own", "_replays", "is_first",
    )  # fmt: skip

    def __init__(self, replays: Replays, own: bool, never: str | None, *, may_draw: bool) -> None:
        self._replays = replays
        self._own = own
        self._never = never
        self._may_draw = may_draw
        self._came: tuple[tuple[int, int] | None, ...] = ()
        self._number = self._calls = 0
        self.is_first = True

    def before(self, grad_outputs: Gradients, engine_calls: int) -> None:
        """The Node is about to run. `engine_calls`: how often this step has entered the engine."""
        self._came = _versions(grad_outputs)
        self._number = sequence_nr()
        self._calls = engine_calls

    def again(
        self, grad_inputs: Gradients, grad_outputs: Gradients, engine_calls: int, *, mutated: bool
    ) -> Verdict:
        """Run it again. Called in our post-hook: `grad_inputs` is what the first run gave."""
        if self._never is not None:
            self._replays.skipped[self._never] += 1
            return NOT_REPLAYED
        node = current_node()
        reason = "no Node is running" if node is None else None
        if reason is None and self._calls != engine_calls:
            reason = "ran a backward pass inside"
        elif reason is None and mutated:
            reason = "changed what came in"
        reason = reason or self._why_not(node, grad_inputs, grad_outputs)
        if reason is None:
            RUNNING.now = True
            try:
                with (
                    unrecorded(),
                    kept_generators() if self._may_draw else contextlib.nullcontext(),
                ):
                    second = self._called(node, grad_outputs)
                with unseen():
                    return _verdict(grad_inputs, second)
            except Exception as error:
                if is_of_a_signal_handler(error):
                    raise
                reason = f"raised {type(error).__name__}"
            finally:
                RUNNING.now = False
        self._replays.skipped[reason] += 1
        return NOT_REPLAYED

    def _why_not(self, node: Any, grad_inputs: Gradients, grad_outputs: Gradients) -> str | None:
        """Why this run cannot be repeated, or would prove nothing."""
        if torch.is_grad_enabled():
            # Formulas differ when they must be differentiable, and a second run would number Nodes.
            return "under create_graph"
        if dispatch_modes():
            return "a mode of the job's is on"
        if not self.is_first:
            return "a hook of the job's may have replaced what it gave"
        if _has_hooks(node):
            return "saved tensors with hooks"
        if sequence_nr() != self._number:
            return "made Nodes"
        if _versions(grad_outputs) != self._came:
            return "changed what came in"
        if self._own and None in grad_outputs:
            return "a Function of the job's to which not all gradients came"
        for gradient in (*grad_outputs, *grad_inputs):
            reason = None if gradient is None else _why_not_comparable(gradient)
            if reason is not None:
                return reason
        return None

    def _called(self, node: Any, grad_outputs: Gradients) -> Sequence[torch.Tensor | None]:
        if self._own:
            given = node.apply(*grad_outputs)
        else:
            given = node(*grad_outputs)
        return given if isinstance(given, tuple) else (given,)


def _versions(gradients: Gradients) -> tuple[tuple[int, int] | None, ...]:
    return tuple(
        None if g is None else (id(g), -1 if g.is_inference() else g._version) for g in gradients
    )


def _why_not_comparable(gradient: torch.Tensor) -> str | None:
    if type(gradient) not in _PLAIN:
        return f"subclass {type(gradient).__name__}"
    if is_functorch_wrapped(gradient) or is_legacy_batched(gradient):
        return "functorch wrapper"
    if gradient.layout not in (torch.strided, torch.sparse_coo) or gradient.is_nested:
        return f"layout {str(gradient.layout).removeprefix('torch.')}"
    if gradient.device.type == "meta":
        return "on meta"
    if gradient.is_cuda and torch.cuda.is_current_stream_capturing():
        return "CUDA graph capture"
    return None


_raw_names: dict[type, tuple[str, ...]] = {}


def _has_hooks(node: Any) -> bool:
    """Whether reading what the Node saved calls hooks: non-reentrant checkpointing's refuse a second time.

    Before `SavedTensor` said so (`unpack_hook`) they are called, and what they raise is counted.
    """
    kind = type(node)
    names = _raw_names.get(kind)
    if names is None:
        names = tuple(name for name in dir(node) if name.startswith("_raw_saved"))
        _raw_names[kind] = names
    for name in names:
        saved = getattr(node, name)
        for one in saved if isinstance(saved, tuple | list) else (saved,):
            if getattr(one, "unpack_hook", None) is not None:
                return True
    return False


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """A profiler of the job's sees no second run."""
    if not profiler_enabled():
        yield
        return
    enable_record_function(False)
    try:
        yield
    finally:
        enable_record_function(True)


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """The job's generators stand afterwards where they stood, for a Function that may draw from any of them.

    Torch's own derivatives draw nothing (derivatives.yaml, 2.13), and are run without this: what another thread of
    the job draws meanwhile (one that loads data) would be drawn twice.
    """
    state = torch.default_generator.get_state()
    more: list[tuple[Any, Any]] = [(random.setstate, random.getstate())]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        more.append((numpy.random.set_state, numpy.random.get_state()))
    if torch.cuda.is_initialized():
        more.append((torch.cuda.set_rng_state, torch.cuda.get_rng_state()))
    try:
        yield
    finally:
        if not torch.equal(torch.default_generator.get_state(), state):
            torch.default_generator.set_state(state)
        for restore, before in more:
            restore(before)


def _verdict(first: Gradients, second: Sequence[torch.Tensor | None]) -> Verdict:
    """Bit for bit; where not, |second - first| over the larger of their norms, null where that is no number."""
    given = (*second, *(None for _ in range(len(first) - len(second))))
    pairs = [(a, _as_received(a, b)) for a, b in zip(first, given, strict=False)]
    if all(_equal_bits(a, b) for a, b in pairs):
        return 1, NULL_FLOAT
    gap = before = after = 0.0
    for a, b in pairs:
        if a is None or b is None or a.shape != b.shape:
            return 0, NULL_FLOAT
        for x, y in zip(_wide_pieces(a), _wide_pieces(b), strict=True):
            gap += float((y - x).square().sum())
            before += float(x.square().sum())
            after += float(y.square().sum())
    larger = max(before, after)
    error = math.sqrt(gap / larger) if larger else 0.0
    return 0, error if math.isfinite(error) and math.isfinite(gap) else NULL_FLOAT


def _as_received(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    """What the engine makes of a gradient that leaves a Node: the receiver's shape and dtype, which the first has.

    Source: torch/csrc/autograd/engine.cpp, `validate_outputs` (2.13).
    """
    if first is None or second is None or second.layout != first.layout:
        return second
    if second.shape != first.shape:
        second = second.sum_to_size(first.shape)
    if second.is_complex() and not first.is_complex():
        second = torch.real(second)
    if second.dtype != first.dtype or second.device != first.device:
        second = second.to(device=first.device, dtype=first.dtype)
    return second


def _equal_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.layout != b.layout or a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.layout == torch.sparse_coo:
        if a._values().shape != b._values().shape:
            return False
        return torch.equal(a._indices(), b._indices()) and _equal_bits(a._values(), b._values())
    return torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers: a NaN equals itself, and -0.0 is not 0.0."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_SAME_SIZE[tensor.itemsize])


def _wide_pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    dense = tensor.detach().to_dense() if tensor.layout == torch.sparse_coo else tensor.detach()
    plain = dense.resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    for piece in plain.reshape(-1).split(_PIECE):
        yield piece.double()


never_compiled(Replays, NodeReplay)
