"""Gradients and losses that refuse to be looked at: both observers say the same of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.environment import native_observer
from support.recordings.in_process import recording, rows


class Marked(torch.Tensor):
    """A class of the job's, which computes as any tensor does."""


def nested_gradients() -> None:
    layer = nn.Linear(4, 4)
    ragged = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
    sum(part.sum() for part in layer(ragged).unbind()).backward()


def loss_of_an_own_class() -> None:
    (nn.Linear(4, 1, bias=False)(torch.ones(1, 4).as_subclass(Marked)) * 0 + 3).sum().backward()


def freed_gradient() -> None:
    """A hook of the job's frees what its Node got, once that was used."""
    out = nn.Linear(4, 4)(torch.ones(2, 4))
    loss = out.mul(torch.full((2, 4), 2.0)).mul(3.0).sum()

    def free(went: Any, came: Any) -> None:
        came[0].untyped_storage().resize_(0)

    inner: Any = loss.grad_fn
    inner.next_functions[0][0].next_functions[0][0].register_hook(free)
    loss.backward()


@pytest.fixture(params=["python", "native"])
def observer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("GRADTRACE_NATIVE_CACHE", str(native_observer.NOWHERE))
    chosen: str = request.param
    if chosen == "native":
        native_observer.build_or_skip()
    return chosen


def asked(run: Path, observer: str, job: Callable[[], None], query: str) -> list[Any]:
    torch.manual_seed(0)
    with recording(run, observer=observer):
        job()
    return rows(run, query)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_gradient_without_sizes_is_a_gradient(tmp_path: Path, observer: str) -> None:
    query = """
        SELECT parameter_fqn, round(grad_output_norm, 2) FROM node_events
        WHERE node_name IN ('LinearBackward0', 'AccumulateGrad') ORDER BY event_index"""
    found = asked(tmp_path / "run", observer, nested_gradients, query)
    assert found == [(None, 4.47), ("weight", 20.0), ("bias", 10.0)]


def test_loss_of_an_own_class_has_its_value(tmp_path: Path, observer: str) -> None:
    query = "SELECT loss FROM backward_passes"
    assert asked(tmp_path / "run", observer, loss_of_an_own_class, query) == [(3.0,)]


def test_gradient_that_is_freed_meanwhile_keeps_its_summary(tmp_path: Path, observer: str) -> None:
    query = """
        SELECT occurrence, round(grad_output_abs_max, 3) FROM node_events
        WHERE node_name = 'MulBackward0' ORDER BY occurrence"""
    found = asked(tmp_path / "run", observer, freed_gradient, query)
    assert found == [(0, 3.0), (1, 1.0)]
