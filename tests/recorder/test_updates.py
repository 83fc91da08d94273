"""Where no torch optimizer is seen, a step ends where parameters have changed between two passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.answers.commands import told
from support.recordings.in_process import rank_of, recording, rows
from support.recordings.with_and_without import both


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def loss_of(net: Any) -> torch.Tensor:
    loss: torch.Tensor = net(torch.randn(5, 3)).square().mean()
    return loss


def in_place(net: Any) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.sub_(parameter.grad, alpha=0.1)


def through_data(net: Any) -> None:
    for parameter in net.parameters():
        parameter.data.sub_(0.1 * parameter.grad.data)


def other_data(net: Any) -> None:
    for parameter in net.parameters():
        parameter.data = parameter.data - 0.1 * parameter.grad


def new_parameters(net: Any) -> None:
    for module in net:
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach() - 0.1 * parameter.grad))


class Own:
    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            parameter.add_(parameter.grad, alpha=-0.1)


ENDS = "SELECT step, backward_count, ended_by FROM steps ORDER BY step"


@pytest.mark.parametrize("update", [in_place, through_data, other_data, new_parameters])
def test_update_by_hand_ends_a_step_and_accumulating_ends_none(
    update: Callable[[Any], None], tmp_path: Path
) -> None:
    def job(net: Any, watch: Any) -> Any:
        losses = []
        for _ in range(3):
            for _ in range(2):
                losses.append(loss_of(net))
                losses[-1].backward()
            update(net)
            net.zero_grad()
        return [loss.detach() for loss in losses]

    both(small, job, tmp_path / "run", watched=False)
    # The network is gone before the recording ends: of the last step nothing more can be seen.
    assert rows(tmp_path / "run", ENDS) == [
        (0, 2, "parameters"),
        (1, 2, "parameters"),
        (2, 2, None),
    ]
    rank = rank_of(tmp_path / "run")
    assert (rank["step_rule"], rank["first_step_from"]) == ("parameters", "0")
    assert rows(tmp_path / "run", "SELECT step_rule, first_step_from FROM ranks") == [
        ("parameters", "0")
    ]


def test_class_of_the_jobs_own_is_an_update(tmp_path: Path) -> None:
    net = small()
    optimizer = Own(net.parameters())
    with recording(tmp_path / "run"):
        for _ in range(3):
            net.zero_grad()
            loss_of(net).backward()
            optimizer.step()
    assert rows(tmp_path / "run", ENDS) == [(step, 1, "parameters") for step in range(3)]
    assert (
        "by changes of parameters (no torch optimizer was seen)"
        in told("info", tmp_path / "run")[1]
    )


def test_gradients_that_are_asked_for_count_as_a_pass(tmp_path: Path) -> None:
    net = small()
    with recording(tmp_path / "run"):
        for _ in range(3):
            gradients = torch.autograd.grad(loss_of(net), list(net.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                    parameter.sub_(gradient, alpha=0.1)
    assert rows(tmp_path / "run", ENDS) == [(step, 0, "parameters") for step in range(3)]


def test_one_of_two_networks_that_changes_ends_the_step(tmp_path: Path) -> None:
    """A GAN without optimizers: the discriminator has changed when the generator is called next."""
    first, second = small(), small()
    with recording(tmp_path / "run"):
        for _ in range(2):
            for one in (first, second):
                loss_of(one).backward()
                in_place(one)
                one.zero_grad()
    found = rows(
        tmp_path / "run", "SELECT step, list(DISTINCT root) FROM module_calls GROUP BY 1 ORDER BY 1"
    )
    assert found == [(0, [0]), (1, [1]), (2, [0]), (3, [1])]


def test_job_without_modules_is_known_by_the_leaves_of_its_graph(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 2, requires_grad=True)
    with recording(tmp_path / "run"):
        for _ in range(3):
            for _ in range(2):
                (torch.randn(4, 3) @ weight).square().mean().backward()
            with torch.no_grad():
                weight.sub_(weight.grad, alpha=0.1)  # type: ignore[arg-type]
            weight.grad = None
    assert [row[:2] for row in rows(tmp_path / "run", ENDS)] == [(step, 2) for step in range(3)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*")
def test_compiled_step_of_an_optimizer_is_seen_by_what_it_changes(tmp_path: Path) -> None:
    """Dynamo calls no hook of an optimizer whose step it has compiled."""
    net = small()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    with recording(tmp_path / "run"):
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(net).backward()
            step()
    assert rows(tmp_path / "run", ENDS) == [(step, 1, "parameters") for step in range(3)]


def test_nothing_is_looked_at_once_an_optimizer_was_seen(tmp_path: Path) -> None:
    net = small()
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    with recording(tmp_path / "run"):
        for _ in range(2):
            for _ in range(2):
                loss_of(net).backward()
                in_place(
                    net[2]
                )  # what the job changes besides is no step's end from the first optimizer on
            optimizer.step()
    found = rows(tmp_path / "run", ENDS)
    assert found == [(0, 1, "parameters"), (1, 1, "optimizer"), (2, 2, "optimizer")]
    assert rank_of(tmp_path / "run")["step_rule"] == "optimizers"


def test_step_that_the_job_names_is_ended_by_the_job(tmp_path: Path) -> None:
    import gradtrace_recorder

    net = small()
    with recording(tmp_path / "run"):
        for step in (3, 5):
            gradtrace_recorder.step(step)
            for _ in range(2):
                loss_of(net).backward()
                in_place(net)
    assert rows(tmp_path / "run", ENDS) == [(3, 2, "job"), (5, 2, None)]
    assert rank_of(tmp_path / "run")["step_rule"] == "job"
    assert "as the job numbered them" in told("info", tmp_path / "run")[1]
