"""Trains a family for a few steps under a legal change, with or without a fault, and records it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.accuracy.changes import PRODUCTS, Products
from support.accuracy.families import BATCH, Family
from support.accuracy.faults import Place, make_faulty
from support.recordings.in_process import recording

# Changes within one process; those of the number of ranks are in `divided.py`.
CHANGES = (
    "none",
    "another thread count",
    *PRODUCTS,
    "bf16",
    "fp16 with a scaler",
    "accumulation",
    "activation checkpointing",
    "compiled",
    "fused optimizer",
)

# The dtype of autocast, and what a change is compared with where that is not the job as it was.
DTYPES = {
    "bf16": torch.bfloat16,
    "bf16, another order of summation": torch.bfloat16,
    "fp16 with a scaler": torch.float16,
}
BASELINES = {"bf16, another order of summation": "bf16"}


def train(
    directory: Path,
    family: Family,
    change: str = "none",
    *,
    fqn: str,
    kind: str | None = None,
    fault_step: int = 1,
    steps: int = 3,
    seed: int = 0,
) -> Path:
    """A recorded run, at the faulty or sound place `fqn`; model and data are drawn from the seed."""
    threads = torch.get_num_threads()
    torch.manual_seed(seed)
    model = family.build()
    place = make_faulty(model, fqn, kind, fault_step)
    if change == "activation checkpointing":
        _checkpointed(model)
    called: Any = model
    if change == "compiled":
        called = torch.compile(model, backend="aot_eager")
    with contextlib.ExitStack() as stack:
        if change == "another thread count":
            torch.set_num_threads(2)
            stack.callback(torch.set_num_threads, threads)
        if change.startswith("tf32"):  # what a job says that wants it; this CPU has none
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("high")
        stack.enter_context(recording(directory))
        if change in PRODUCTS:
            stack.enter_context(Products(PRODUCTS[change]))
        _steps(family, model, called, place, change, steps, seed)
    return directory


def _steps(
    family: Family,
    model: nn.Module,
    called: Any,
    place: Place,
    change: str,
    steps: int,
    seed: int,
) -> None:
    draw = torch.Generator().manual_seed(seed + 7)
    updates = updates_of(model, family.optimizer, fused=change == "fused optimizer")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024, enabled=change.startswith("fp16"))
    dtype = DTYPES.get(change)
    parts = 4 if change == "accumulation" else 1
    for step in range(steps):
        place.step = step
        x, target = family.batch(draw)
        updates.zero_grad()
        for part in range(parts):
            rows = slice(part * BATCH // parts, (part + 1) * BATCH // parts)
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                outputs = called(x[rows])
            scaler.scale(family.loss(outputs, target[rows]) / parts).backward()
        scaler.step(updates)
        scaler.update()


def updates_of(model: nn.Module, name: str, *, fused: bool = False) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=fused)
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)


def _checkpointed(model: nn.Module) -> None:
    """The model's larger children recompute their forward in the backward pass."""
    for child in model.children():
        for part in child if isinstance(child, nn.ModuleList) else (child,):
            if not isinstance(part, nn.BatchNorm2d):
                _checkpoint(part)


def _checkpoint(module: nn.Module) -> None:
    inner = module.forward

    def forward(*arguments: Any) -> Any:
        return checkpoint(inner, *arguments, use_reentrant=False)

    module.forward = forward
