"""What the analyzer costs on large runs, as whole processes: wall time, processor time and peak memory.

Part `diff` of scripts/bench. The runs are built under the system's temporary folder and removed at the end;
GRADTRACE_BENCH_RUNS names a folder to keep them in instead.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from support.synthetic_runs.large import Change, Sizes, build_large

CORES = 2


def diff(smallest: bool = False) -> None:
    """Build the runs, and ask of them; the smallest only show that this works."""
    kept = os.environ.get("GRADTRACE_BENCH_RUNS")
    folder = Path(kept) if kept else Path(tempfile.mkdtemp(prefix="gradtrace-bench-runs-"))
    try:
        large = Sizes(ranks=2, steps=4, nodes=60, modules=10) if smallest else Sizes()
        base = built(folder, large)
        print(f"{large.ranks} ranks x {large.steps} steps x {large.nodes:,} Nodes: "
              f"{large.node_rows:,} rows of node_events a side, {CORES} cores", flush=True)  # fmt: skip
        processes = 1 if smallest else 3
        asked("info", [base], "at most 0.3 s", processes)
        for change, limit in (("one event", "1.0 s, 250 MB"), ("noise", "6 s, 500 MB")):
            pair = [base, built(folder, large, change, base)]
            asked(f"diff, {change}", pair, f"at most {limit}", processes)
        if smallest:
            return
        for steps in (50, 100, 200):
            sizes = Sizes(ranks=8, steps=steps)
            less = built(folder, sizes)
            asked(
                f"diff, noise, 8 ranks, {steps} steps", [less, built(folder, sizes, "noise", less)]
            )
        many = Sizes(ranks=1000, steps=2, nodes=60, modules=10)
        base = built(folder, many)
        files = sum(1 for _ in base.glob("*/*/*.parquet"))
        print(f"{many.ranks:,} ranks, {files:,} small files a side")
        asked("info", [base])
        for change in ("one event", "noise"):
            asked(f"diff, {change}", [base, built(folder, many, change, base)])
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


def built(folder: Path, sizes: Sizes, change: Change = "nothing", like: Path | None = None) -> Path:
    """A run, named by everything that it is made of."""
    size = f"{sizes.ranks}-{sizes.steps}-{sizes.nodes}-{sizes.modules}-{sizes.parts}"
    return build_large(folder / f"{size}-{change.replace(' ', '-')}", sizes, change, like=like)


# A process counts the memory of the one that it was forked from: between them goes a small one.
MEASURED = """
import os, sys, time
began = time.perf_counter()
null = os.open(os.devnull, os.O_RDWR)
files = [(os.POSIX_SPAWN_DUP2, null, number) for number in (1, 2)]
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=files)
_, status, used = os.wait4(pid, 0)
wall = time.perf_counter() - began
print(os.waitstatus_to_exitcode(status), wall, used.ru_utime + used.ru_stime, used.ru_maxrss)
"""


def asked(name: str, runs: list[Path], limit: str = "", processes: int = 3) -> None:
    """The best of three processes: the machine may have other things to do."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:CORES]))
    analyzer = [sys.executable, "-m", "gradtrace_analyzer", name.split(",")[0], *map(str, runs)]
    command = ["taskset", "-c", cores, sys.executable, "-S", "-c", MEASURED, *analyzer]
    # An installed package has its bytecode; compiling it each time is a tenth of a second of nobody's.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    found = []
    for _ in range(processes):
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        code, *used = map(float, done.stdout.split())
        if code not in (0, 1):
            raise SystemExit(f"{' '.join(analyzer)} left with {code:.0f}")
        found.append(used)
    wall, processor, peak = min(found)
    print(
        f"  {name:<34} {wall:6.2f} s wall, {processor:6.2f} s of processors, {peak / 1024:5.0f} MB"
        + (f"   ({limit})" if limit else ""),
        flush=True,
    )
