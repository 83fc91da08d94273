"""Damaged files are read as far as they go, or refused in words."""

from __future__ import annotations

from pathlib import Path

from support.stress.fuzzing import fuzz


def test_damage_is_never_an_exception_nor_an_invented_row(tmp_path: Path) -> None:
    done = fuzz(tmp_path, seconds=3, seed=20)
    assert done.read > 10 and done.unreadable > 1
