"""Whatever raises inside backward reaches the job as it is, and `failures` has the Node in which it was."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.recordings.in_process import recording, rows


class Broken(torch.autograd.Function):
    """Gives back a gradient of the wrong shape, or raises."""

    raises = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if Broken.raises:
            return no_luck()
        return torch.ones(7)


class Holds(nn.Module):
    """Calls it."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Broken.apply(x)  # type: ignore[no-untyped-call]
        return out


def no_luck(*_: object) -> Any:
    raise ValueError("no luck")


def plain() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    return net, net(torch.ones(3, 4))


def total(out: Tensor) -> Tensor:
    return out.sum()


def function_raises() -> Tensor:
    Broken.raises = True
    return total(nn.Sequential(nn.Linear(4, 4), Holds())(torch.ones(3, 4)))


def wrong_shape() -> Tensor:
    Broken.raises = False
    return total(nn.Sequential(nn.Linear(4, 4), Holds())(torch.ones(3, 4)))


def hook_of_a_node() -> Tensor:
    _, out = plain()
    out.grad_fn.next_functions[1][0].register_hook(no_luck)  # type: ignore[union-attr]
    return out.sum()


def hook_after_accumulation() -> Tensor:
    net, out = plain()
    net.get_parameter("0.weight").register_post_accumulate_grad_hook(no_luck)
    return out.sum()


def hook_of_a_tensor() -> Tensor:
    _, out = plain()
    out.register_hook(no_luck)
    return out.sum()


@pytest.mark.parametrize(
    ("make", "node"),
    [
        (function_raises, ("BrokenBackward", "1", None, ["float32[3, 4]"], "forward")),
        (wrong_shape, ("BrokenBackward", "1", None, ["float32[3, 4]"], "forward")),
        (hook_of_a_node, ("TanhBackward0", "1", None, ["float32[3, 4]"], "forward")),
        (hook_after_accumulation, ("AccumulateGrad", "0", "0.weight", ["float32[4, 4]"], None)),
        # A hook of a tensor runs before any of a Node's, ours too: no Node ran, and none is guessed.
        (hook_of_a_tensor, (None, None, None, None, None)),
    ],
)
def test_node_in_which_it_was_raised_is_told(
    make: Callable[[], Tensor], node: tuple[Any, ...], tmp_path: Path
) -> None:
    with pytest.raises(Exception) as alone:
        make().backward()
    with recording(tmp_path / "run"), pytest.raises(Exception) as raised:
        make().backward()
    assert type(raised.value) is type(alone.value) and str(raised.value) == str(alone.value)
    frames = [
        (f.filename, f.lineno, f.name)
        for f in traceback.extract_tb(raised.tb)
        if "gradtrace" not in f.filename
    ]
    # The engine is called from torch's own line, which so stands there twice (`call_sites.py`).
    once = [name for (_, _, name), _ in itertools.groupby(frames)]
    assert once == [f.name for f in traceback.extract_tb(alone.tb)]
    columns = "node_name, module_fqn, parameter_fqn, grad_outputs, call_phase"
    [row] = rows(
        tmp_path / "run", f"SELECT {columns}, exception_type, exception_text FROM failures"
    )
    assert row == (*node, type(alone.value).__name__, str(alone.value))
