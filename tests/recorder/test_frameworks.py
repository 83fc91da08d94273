"""The framework's own counter: found among the frames around a step's first forward, and held weakly.

torchtitan is no package that can be installed everywhere: its trainer is imitated. The real ones that can are in
`tests/whole/test_steps_frameworks.py`.
"""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.recordings.in_process import rank_of, recording, rows


class Trainer:
    """As torchtitan's: `train` adds one to `step` before each `train_step`."""

    def __init__(self, step: int = 0) -> None:
        self.step = step

    def train(self, step: Callable[[], None], count: int) -> None:
        for _ in range(count):
            self.step += 1
            self.train_step(step)

    def train_step(self, step: Callable[[], None]) -> None:
        step()


@pytest.fixture
def titan(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("torchtitan.train")
    module.Trainer = Trainer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchtitan.train", module)


def step_of() -> Callable[[], None]:
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        net(torch.randn(5, 3)).sum().backward()
        optimizer.step()

    return step


COUNTS = "SELECT step, framework, framework_step FROM steps ORDER BY step"


def test_counter_of_torchtitan_is_recorded_as_it_stands(titan: None, tmp_path: Path) -> None:
    with recording(tmp_path / "run"):
        Trainer().train(step_of(), 3)
    assert rows(tmp_path / "run", COUNTS) == [(step, "torchtitan", step + 1) for step in range(3)]
    assert rank_of(tmp_path / "run")["first_step_from"] == "0"


def test_resumed_job_goes_on_counting_where_it_stopped(titan: None, tmp_path: Path) -> None:
    with recording(tmp_path / "run", steps="41:"):
        Trainer(40).train(step_of(), 3)
    assert rows(tmp_path / "run", COUNTS) == [(step, "torchtitan", step + 1) for step in (41, 42)]
    assert rank_of(tmp_path / "run")["first_step_from"] == "framework"


def test_number_that_the_job_gave_comes_first(titan: None, tmp_path: Path) -> None:
    with recording(tmp_path / "run", step_offset=7):
        Trainer(40).train(step_of(), 1)
    assert rows(tmp_path / "run", COUNTS) == [(7, "torchtitan", 41)]
    assert rank_of(tmp_path / "run")["first_step_from"] == "offset"


def test_trainer_is_not_kept_and_another_takes_over(titan: None, tmp_path: Path) -> None:
    step = step_of()
    with recording(tmp_path / "run"):
        first, second = Trainer(), Trainer(9)
        first.train(step, 2)
        second.train(step, 2)
        kept = weakref.ref(second)
        del second
        gc.collect()
        assert kept() is None
        step()
    assert rows(tmp_path / "run", COUNTS) == [
        (0, "torchtitan", 1), (1, "torchtitan", 2), (2, "torchtitan", 10), (3, "torchtitan", 11), (4, None, None),
    ]  # fmt: skip


def test_class_that_is_only_called_so_is_no_framework(tmp_path: Path) -> None:
    with recording(tmp_path / "run"):
        Trainer(5).train(step_of(), 1)
    assert rows(tmp_path / "run", COUNTS) == [(0, None, None)]


def test_counter_that_cannot_be_read_is_no_counter(titan: None, tmp_path: Path) -> None:
    trainer: Any = Trainer()
    trainer.step = "unknown"
    step = step_of()
    with recording(tmp_path / "run"):
        trainer.train_step(step)
    assert rows(tmp_path / "run", COUNTS) == [(0, None, None)]
    assert rows(tmp_path / "run", "SELECT problems FROM ranks") == [("[]",)]
