"""What others that look at a step of training cost, with ours in the same run. Part `peers` of scripts/bench."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import gradtrace_recorder


def peers(
    step_of: Callable[..., Callable[[], object]],
    observers: tuple[str, ...],
    rounds: int = 5,
    sizes: int = 2,
) -> None:
    """What others that look at a step cost, with ours in the same run; what each captures differs. Of the sizes of a
    model the first so many."""
    from torch.profiler import ExecutionTraceObserver, profile
    from torch.utils._debug_mode import DebugMode

    folder = Path(tempfile.mkdtemp(prefix="gradtrace-bench-"))

    @contextlib.contextmanager
    def recorded(observer: str, summary: str) -> Iterator[None]:
        gradtrace_recorder.start(
            tempfile.mkdtemp(dir=folder), observer=observer, summary=summary, quiet=True
        )
        try:
            yield
        finally:
            gradtrace_recorder.stop()

    @contextlib.contextmanager
    def execution_trace() -> Iterator[None]:
        observer = ExecutionTraceObserver().register_callback(str(folder / "trace.json"))
        observer.start()
        try:
            yield
        finally:
            observer.stop()
            observer.unregister_callback()

    @contextlib.contextmanager
    def hashed() -> Iterator[None]:
        with DebugMode(), DebugMode.log_tensor_hashes(hash_inputs=True):
            yield

    ways: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
        "nothing": contextlib.nullcontext
    }
    for observer in observers:
        ways[f"gradtrace, {observer}, off"] = functools.partial(recorded, observer, "off")
        ways[f"gradtrace, {observer}, full"] = functools.partial(recorded, observer, "full")
    ways["torch.profiler (CPU)"] = lambda: profile(activities=[torch.profiler.ProfilerActivity.CPU])
    ways["ExecutionTraceObserver"] = execution_trace
    ways["DebugMode, tensor hashes"] = hashed
    ways["anomaly mode"] = torch.autograd.detect_anomaly
    for name, shape, steps in (
        ("tiny tensors", (2, 32, 4, 32, 4), 10),
        ("d=256, 8 x 128", (6, 256, 8, 128, 8), 2),
    )[:sizes]:
        step = step_of(*shape)
        took: dict[str, list[float]] = {}
        for _ in range(rounds):
            for way, around in ways.items():
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    with around():
                        step()
                        began = time.perf_counter()
                        for _ in range(steps):
                            step()
                        took.setdefault(way, []).append((time.perf_counter() - began) / steps)
        print(f"others, GPT of {name}: ratio of a step to one that nothing looks at")
        bare = statistics.median(took["nothing"])
        for way, seconds in took.items():
            print(f"  {way:<28} {statistics.median(seconds) / bare:7.3f}", flush=True)
        for level in ("L0", "L1", "mix"):
            print(f"  mindstudio-probe, {level:<10} {probe(level, shape)}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)


def probe(level: str, shape: tuple[int, ...]) -> str:
    """The ratio of a step under mindstudio-probe, which has an environment of its own; why there is none."""
    python = os.environ.get("GRADTRACE_BENCH_PROBE", "")
    if not python:
        return "not measured: GRADTRACE_BENCH_PROBE names no Python that has it"
    command = [python, str(Path(__file__).resolve().parent / "bench_probe.py"), level]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [*command, *map(str, shape)], capture_output=True, text=True, env=environment, check=False
    )
    ratios = [line for line in done.stdout.splitlines() if line.startswith("ratio ")]
    return f"{float(ratios[-1][6:]):7.3f}" if ratios else f"failed with {done.returncode}"
