"""The script for machines with a device: what it says without one, and its own logic with the host in its place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

KINDS = ("ok  ", "FAIL", "left")
SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu-check"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=250
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_so_and_ends_with_2() -> None:
    done = run()
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        "gpu-check: there is no CUDA device here; --cpu runs its logic on the host\n"
    )


@pytest.mark.slow
def test_its_checks_pass_with_the_host_in_the_devices_place() -> None:
    done = run("--cpu", "--no-times")
    assert done.returncode == 0, done.stdout + done.stderr
    said, *checks = done.stdout.splitlines()
    assert "nothing here speaks of a device" in said
    names = {line.split(":")[0].split()[1]: line[:4] for line in checks if line[:4] in KINDS}
    on_cuda_alone = {"entering", "no-wait", "capture", "elsewhere", "memory", "reducers"}
    assert {name for name, kind in names.items() if kind == "left"} == on_cuda_alone
    assert len(names) == len(on_cuda_alone) + 7 and "FAIL" not in names.values()


def test_what_each_check_saw_is_written_and_one_that_breaks_off_ends_no_other(
    tmp_path: Path,
) -> None:
    """Each in a process of its own, as on a device."""
    file = tmp_path / "seen.json"
    chosen = "broken,arrival"
    script = f"""
import importlib.machinery, importlib.util, os, sys
loader = importlib.machinery.SourceFileLoader("gpu_check", {str(SCRIPT)!r})
spec = importlib.util.spec_from_loader("gpu_check", loader)
module = importlib.util.module_from_spec(spec)
sys.argv = ["gpu-check", "--cpu", "--apart", "--only", {chosen!r}, "--json", {str(file)!r}]
loader.exec_module(module)
module.CHECKS["broken"] = (lambda place: "not known to its own process", 60)
sys.exit(module.main())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1, done.stdout + done.stderr
    seen = json.loads(file.read_text())["checks"]
    results = {check["name"]: check["result"] for check in seen}
    assert results == {"broken": "failed", "arrival": "ok"}
    broken = seen[0]
    assert broken["said"] == "its process ended with 2" and "no check is called" in broken["output"]
    told = [line[:4] for line in done.stdout.splitlines() if line[:4] in KINDS]
    assert told == ["FAIL", "ok  "]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device")
def test_its_checks_pass_on_a_device() -> None:
    done = run("--no-times")
    assert done.returncode == 0, done.stdout + done.stderr
