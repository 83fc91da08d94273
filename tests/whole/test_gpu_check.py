"""The script for machines with a device: what it says without one, and its own logic with the host in its place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
    assert [line[:4] for line in checks if not line.startswith("said: ")] == ["ok  "] * 4


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device")
def test_its_checks_pass_on_a_device() -> None:
    done = run("--no-times")
    assert done.returncode == 0, done.stdout + done.stderr
