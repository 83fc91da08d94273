"""A saved tensor that was modified in place: which Node holds it, and who changed it; null where it cannot be told."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.recordings.in_process import recording, rows

COLUMNS = (
    "node_name, module_fqn, changed_module_fqn, changed_call_index, changed_between, grad_outputs"
)


class Shortcut(nn.Module):
    """Adds its shortcut in place to the activation that sigmoid saved."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.fc(x).sigmoid()
        h += x
        return h


class Fills(nn.Module):
    """Changes what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class Squares(nn.Module):
    """Saves what it is given, which was changed before, and then changes it."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * x
        x.add_(1)
        return y


class Outer(nn.Module):
    """Two modules, and code between them that changes what the first gave, if asked to."""

    def __init__(self, *, between: bool) -> None:
        super().__init__()
        self.between = between
        self.first, self.second = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.first(x)
        if self.between:
            h.add_(1)
        out: Tensor = self.second(h)
        return out


def failure(folder: Path, model: nn.Module, *, steps: bool = False) -> tuple[Any, ...]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if steps else None
    with recording(folder):
        loss = model(torch.randn(3, 4)).square().mean()
        if optimizer is not None:
            loss.backward(retain_graph=True)
            optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    [row] = rows(folder, f"SELECT {COLUMNS} FROM failures")
    return row


def test_module_that_changes_what_it_made_itself_is_named(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4), Shortcut(), nn.Linear(4, 4))
    assert failure(tmp_path / "run", net) == (
        "SigmoidBackward0",
        "1",
        "1",
        0,
        "after SigmoidBackward0 had saved it, before it left 1",
        ["float32[3, 4]"],
    )


def test_module_that_changes_its_argument_is_named_and_not_the_one_that_made_it(
    tmp_path: Path,
) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), Fills(), nn.Linear(4, 4))
    assert failure(tmp_path / "run", net)[:5] == (
        "SigmoidBackward0",
        "1",
        "2",
        0,
        "after it went into 2, before it left 2",
    )


def test_changes_before_the_tensor_was_saved_are_none_of_it(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4), Fills(), Squares())
    assert failure(tmp_path / "run", net)[:5] == (
        "MulBackward0",
        "2",
        "2",
        0,
        "after MulBackward0 had saved it, before the call of 2 that it went into was over",
    )


def test_code_between_two_modules_is_the_module_around_them(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4), Outer(between=True))
    assert failure(tmp_path / "run", net)[:5] == (
        "SigmoidBackward0",
        "1.first.1",
        "1",
        0,
        "after it left 1.first, before it went into 1.second",
    )


def test_step_of_the_optimizer_between_forward_and_backward_is_named(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    name, fqn, changed, _, between, _ = failure(tmp_path / "run", net, steps=True)
    assert (name, fqn, changed) == ("AddmmBackward0", "2", None)
    assert between == "by a step of SGD, after a step of SGD"


def test_change_that_no_module_saw_is_between_the_last_sighting_and_the_backward_pass(
    tmp_path: Path,
) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    with recording(tmp_path / "run"):
        out = net(torch.randn(3, 4))
        loss = out.sum()
        out.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    [row] = rows(tmp_path / "run", f"SELECT {COLUMNS} FROM failures")
    assert row[2:5] == (
        None,
        None,
        "after it left the root module, before the backward pass came to it",
    )


def test_what_cannot_be_told_is_null(tmp_path: Path) -> None:
    """Two saved tensors at the version that torch names: either may be the stale one."""
    with recording(tmp_path / "run"), contextlib.suppress(RuntimeError):
        a, b = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
        x, y = a.sigmoid(), b.tanh()
        with torch.no_grad():
            y.add_(1)
        loss = (x * y).sum()
        with torch.no_grad():
            x.add_(1)
        loss.backward()
    [row] = rows(tmp_path / "run", f"SELECT {COLUMNS} FROM failures")
    assert row[0] == "MulBackward0" and row[2:5] == (None, None, None)
