"""A real file system of a few kB, so that a disk really is full."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A tmpfs of that size (`200k`) at a new folder, gone afterwards. Skips the test where mounting is not allowed."""
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)])
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system needs privileges that are not here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)
