"""Compiles the kernels to machine code for two generations of devices; needs Triton, and no device."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import create_function_from_signature

from gradtrace_recorder.summaries.device import kernel
from gradtrace_recorder.summaries.device.triton_rows import KINDS, OPTIONS

TAIL = {
    "partials": "*i64", "length": "i64", "counters": "*i32", "weights": "*i32", "places": "*i32",
    "constants": "*i64",
}  # fmt: skip
NAMES = {tl.float16: "fp16", tl.bfloat16: "bf16", tl.float32: "fp32", tl.float64: "fp64"}


def source(kind: Any, form: str) -> ASTSource:
    """A kernel with the types that a launch gives it."""
    constants: dict[str, Any] = {"EXPONENT": kind.exponent, "MANTISSA": kind.mantissa}
    if form == "many":
        signature = {"table": "*i64", "owners": "*i64", "rows": "*i64", **TAIL}
        constants["DTYPE"] = kind.dtype
        function = kernel.summarise_many
    else:
        integers = {n: "i64" for n in ("numel", "n1", "n2", "n3", "s0", "s1", "s2", "s3")}
        values = {"values": "*" + NAMES[kind.dtype]}
        signature = {**values, **integers, "rows": "*i64", "slot": "i64", "ticket": "i64", **TAIL}
        constants["STRIDED"] = form == "strided"
        function = kernel.summarise_one
    return ASTSource(function, {**signature, **dict.fromkeys(constants, "constexpr")}, constants)


def check_order(ptx: str) -> None:
    """What all threads of a program have left is stored, then there is a barrier, then the atomic operation."""
    lines = [
        line
        for line in ptx.splitlines()
        if any(w in line for w in ("st.global", "bar.sync", "atom."))
    ]
    at = next(place for place, line in enumerate(lines) if "atom." in line)
    assert (
        "st.global" in lines[at - 3] and "bar.sync" in lines[at - 2] and "bar.sync" in lines[at - 1]
    )


def check_nothing_is_compared(function: Any) -> None:
    """No name of a module is used: Triton compares each of them at every launch, which costs as much as the rest."""
    assert function.cache_key
    assert not function.used_global_vals, function.used_global_vals


def check_one_kernel(function: Any) -> None:
    """Whatever numbers and addresses it is launched with, it is the same kernel: none is compiled in between."""
    bind = create_function_from_signature(
        function.signature, function.params, CUDABackend(GPUTarget("cuda", 90, 32))
    )
    found = set()
    for number in (0, 1, 16, 2**31, 2**40):
        for start in (0, 1):
            words, integers = (torch.zeros(64, dtype=d)[start:] for d in (torch.int64, torch.int32))
            values: dict[str, Any] = {"values": torch.zeros(64, dtype=torch.float16)[start:]}
            values |= dict.fromkeys(("counters", "weights", "places"), integers)
            values |= dict.fromkeys(("rows", "partials", "constants", "table", "owners"), words)
            given = {
                p.name: values.get(p.name, 5 if p.is_constexpr else number) for p in function.params
            }
            found.add(str(bind(**given)[1]))
    assert len(found) == 1, found


def main() -> None:
    """A line for each."""
    for function in (kernel.summarise_one, kernel.summarise_many):
        check_one_kernel(function)
        check_nothing_is_compared(function)
    kinds = list(KINDS.values())
    chosen = [(80, kinds[0], "one"), (80, kinds[3], "strided")]
    chosen += [(90, kinds[1], "many"), (90, kinds[2], "one")]
    for generation, kind, form in chosen:
        target = GPUTarget("cuda", generation, 32)
        made = triton.compile(source(kind, form), target=target, options=OPTIONS)
        check_order(made.asm["ptx"])
        atomics = [line.split()[1] for line in made.asm["ptx"].splitlines() if "atom." in line]
        print(generation, kind.dtype, form, atomics, len(made.asm["cubin"]), "bytes")


if __name__ == "__main__":
    main()
