"""Passes on several threads over the same parameters: none loses its own hooks to the end of another's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support import native
from support.recorded import recording, rows

_THREADS, _TIMES = 4, 150


@pytest.fixture
def impatient() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(2) for _ in range(8))

    def forward(self, x: float) -> Any:
        return sum((w * x).sum() for w in self.weights)


@pytest.mark.parametrize("observer", ["python", "native"])
def test_every_pass_beside_others_is_recorded(
    tmp_path: Path, observer: str, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADTRACE_NATIVE_CACHE", str(native.NOWHERE))
    if observer == "native":
        native.build_or_skip()
    model = Sum()
    with (
        recording(tmp_path / "run", observer=observer),
        ThreadPoolExecutor(_THREADS) as pool,
    ):
        for _ in range(_TIMES):
            losses = [model(1.0) for _ in range(_THREADS)]
            for done in [pool.submit(loss.backward) for loss in losses]:
                done.result()
    assert rows(tmp_path / "run", "SELECT count(*), count(error) FROM backward_passes") == [
        (_THREADS * _TIMES, 0)
    ]
    # Torch (2.13) keeps hooks of a parameter from working after a swap where an empty table is left behind.
    model(1.0).backward()
    with recording(tmp_path / "after", observer=observer):
        model(1.0).backward()
    assert all(w._post_accumulate_grad_hooks is None for w in model.parameters())
