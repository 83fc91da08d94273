"""What DDP's communication hooks promise of a reduced bucket, by the name that the recorder gives them."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gradtrace_analyzer.numerics.tolerance import LANE_EPSILON, epsilon

# How far a bucket may lie from the mean: rounding of its dtype, of the dtype on the wire, a level of a quantized
# range, by as much as the hook likes (measured and told), or nothing is promised at all.
Bound = Literal["rounding", "wire", "level", "none", "no_promise"]

FLOAT16_LARGEST = 65504.0
_LEVELS = 255

# Below these a dtype holds multiples of them alone: what is smaller rounds by half of one, however small it is.
_SUBNORMAL = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149}


@dataclass(frozen=True)
class Promise:
    """`wire` is the dtype that a bucket travels in, where it is not its own.

    `keeps_ranks_equal`: buckets, gradients and parameters are equal on all ranks afterwards.
    """

    bound: Bound
    wire: str | None = None
    keeps_ranks_equal: bool = True

    @property
    def is_compressing(self) -> bool:
        """Whether it loses more than rounding, so that its error is worth telling."""
        return self.bound in ("wire", "level", "none")

    @property
    def is_judged(self) -> bool:
        """Whether a deviation from the mean can break the promise."""
        return self.bound not in ("none", "no_promise")


_MEAN = Promise("rounding")
_BY_NAME = (
    ("*fp16_compress*", Promise("wire", "float16")),
    ("*bf16_compress*", Promise("wire", "bfloat16")),
    ("*FP16_COMPRESS*", Promise("wire", "float16")),
    ("mixed_precision_hooks.*", Promise("rounding", "bfloat16")),
    ("quantization_hooks.*", Promise("level")),
    ("powerSGD_hook.*", Promise("none")),
    ("post_localSGD_hook.*", Promise("no_promise", keeps_ranks_equal=False)),
    ("debugging_hooks.noop_hook", Promise("no_promise", keeps_ranks_equal=False)),
)

# These launch further collectives when the first is done, so that c10d's number, read when the hook returned, is
# by chance that of one or the other.
_TORCHS_MODULES = (
    "BuiltinCommHookType", "ddp_zero_hook", "debugging_hooks", "default_hooks", "mixed_precision_hooks",
    "optimizer_overlap_hooks", "post_localSGD_hook", "powerSGD_hook", "quantization_hooks",
)  # fmt: skip
_CHAINING = ("quantization_hooks.*", "powerSGD_hook.*", "post_localSGD_hook.*", "*noop_hook")


def promise_of(hook_name: str | None, compressing: Sequence[str] = ()) -> Promise:
    """The promise of a hook; None is DDP's own reduction. A user's own hook is held to the mean unless its name
    matches one of `compressing`."""
    if hook_name is None:
        return _MEAN
    if any(fnmatch.fnmatchcase(hook_name, glob) for glob in compressing):
        return Promise("none")
    for glob, promise in _BY_NAME:
        if fnmatch.fnmatchcase(hook_name, glob):
            return promise
    return _MEAN


def chains_collectives(hook_name: str | None) -> bool:
    """Whether c10d's number of the hook's collective cannot be relied on."""
    return hook_name is not None and any(fnmatch.fnmatchcase(hook_name, g) for g in _CHAINING)


def allowed_error(
    promise: Promise, dtype: str | None, rank_count: int, largest: float, numel: int, scale: float
) -> float:
    """The deviation from the mean that a promise allows, relative to `scale`.

    `largest` is the largest magnitude in any rank's bucket. Infinite where nothing is promised.
    """
    spread: float = rank_count**0.5
    held = promise.wire or dtype
    floor = _floor(held, rank_count, numel, scale)
    if promise.bound == "rounding":
        return 4 * max(epsilon(held), LANE_EPSILON) * spread + floor
    if promise.bound == "wire":
        return epsilon(held) * spread + floor
    if promise.bound == "level":
        level: float = 2 * largest / _LEVELS * numel**0.5
        return level / scale if scale else 0.0
    return float("inf")


def _floor(dtype: str | None, rank_count: int, numel: int, scale: float) -> float:
    """What a dtype's smallest numbers lose, relative to `scale`: each rank's share rounds by half of one, and all of
    them may round the same way."""
    subnormal: float = _SUBNORMAL.get(dtype or "", 0.0)
    return float(rank_count * subnormal / 2 * numel**0.5 / scale) if scale else 0.0


def may_compress(hook_name: str | None, error: float, rank_count: int) -> bool:
    """Whether a hook of the user's own may just have cast to fewer bits: bfloat16 loses as much as this."""
    is_torchs = hook_name is None or hook_name.partition(".")[0] in _TORCHS_MODULES
    return not is_torchs and error <= epsilon("bfloat16") * rank_count**0.5


def hook_phrase(hook_name: str | None) -> str:
    """What reduced a bucket, in a sentence: the hook's name, or DDP itself."""
    return hook_name or "DDP's own reduction"
