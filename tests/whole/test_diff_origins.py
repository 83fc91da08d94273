"""Origins in real jobs, recorded in this process: how many there are, and how a person is told of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.answers.commands import asked, told
from support.recordings.in_process import recording


class Two(nn.Module):
    """A trunk and two heads, whose derivatives can be made wrong one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.left = nn.Linear(8, 4)
        self.right = nn.Linear(8, 4)
        self.wrong: set[str] = set()
        self.saved = torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.saved = h = self.trunk(x).tanh()
        outputs = []
        for name in ("left", "right"):
            y = getattr(self, name)(h)
            y.grad_fn.register_hook(
                lambda left, came, name=name: (
                    tuple(None if g is None else g * 1.01 for g in left)
                    if name in self.wrong
                    else None
                )
            )
            outputs.append(y.square().mean())
        loss: torch.Tensor = outputs[0] + outputs[1]
        return loss


Change = Callable[[int, Two], None]


def job(directory: Path, change: Change, between: Change | None = None) -> Path:
    """Four steps; `change` acts before a step's forward, `between` before its backward."""
    torch.manual_seed(0)
    net = Two()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    draw = torch.Generator().manual_seed(1)
    with recording(directory):
        for step in range(4):
            change(step, net)
            optimizer.zero_grad()
            loss = net(torch.randn(5, 6, generator=draw))
            if between is not None:
                between(step, net)
            loss.backward()
            optimizer.step()
    return directory


def nothing(step: int, net: Two) -> None:
    """No fault."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return job(tmp_path_factory.mktemp("good") / "good", nothing)


def places(answer: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Of each origin: step, link, module."""
    return [(o["step"], o["link"], o["module_fqn"]) for o in answer["origins"]]


def test_faults_in_two_heads_are_two_origins_and_one_fault_is_one(
    good: Path, tmp_path: Path
) -> None:
    def both(step: int, net: Two) -> None:
        net.wrong = {"left", "right"} if step == 2 else set()

    def one(step: int, net: Two) -> None:
        net.wrong = {"left"} if step == 2 else set()

    _, answer = asked("diff", good, job(tmp_path / "both", both), "--format", "json")
    # The right head comes last in the forward, and first in the backward pass.
    assert places(answer) == [(2, "backward", "right"), (2, "backward", "left")]
    assert (
        "A second origin in this step does not follow from it: rank 0, left ("
        in (answer["explanation"])
    )
    _, alone = asked("diff", good, job(tmp_path / "one", one), "--format", "json")
    assert places(alone) == [(2, "backward", "left")]
    assert "right" in alone["equal"]["modules"] and "trunk" not in alone["equal"]["modules"]
    assert alone["equal"]["links"][:3] == ["parameters", "inputs", "forward"]


def test_weight_changed_through_data_after_the_forward_is_not_called_a_wrong_derivative_alone(
    good: Path, tmp_path: Path
) -> None:
    def swapped(step: int, net: Two) -> None:
        if step == 1:
            net.left.weight.data.mul_(1.5)

    _, answer = asked("diff", good, job(tmp_path / "bad", nothing, swapped), "--format", "json")
    assert places(answer) == [(1, "backward", "left")]
    said = answer["explanation"]
    assert "although the others, and everything recorded that it reads, are equal" in said
    assert "left.weight was changed after the forward and before the step's end" in said
    assert answer["origins"][0]["rewritten"] == "left.weight"


def test_activation_changed_through_data_is_said_to_be_possible(good: Path, tmp_path: Path) -> None:
    def shrinks(step: int, net: Two) -> None:
        if step == 1:
            net.saved.data.mul_(0.5)

    _, answer = asked("diff", good, job(tmp_path / "bad", nothing, shrinks), "--format", "json")
    # Both heads saved it, and so did the tanh of the root.
    assert places(answer) == [(1, "backward", m) for m in ("right", "left", "")]
    assert "one change of it after the forward would explain both" in answer["explanation"]
    assert "an activation or a weight was changed after the forward" in answer["explanation"]


def test_frozen_parameter_is_called_frozen(good: Path, tmp_path: Path) -> None:
    def freezes(step: int, net: Two) -> None:
        net.left.weight.requires_grad_(step < 2)

    bad = job(tmp_path / "bad", freezes)
    for runs, side in (((good, bad), "candidate"), ((bad, good), "baseline")):
        _, answer = asked("diff", *runs, "--format", "json")
        assert answer["explanation"].startswith(
            f"Step 2, rank 0: left.weight is frozen in the {side}: requires_grad is False there"
        )
        assert places(answer)[0] == (2, "parameters", "left")


def gan(directory: Path, wrong: bool) -> Path:
    """Two roots of one shape, so that their modules and parameters have the same names."""

    class Generator(nn.Sequential):
        """The first root."""

    class Discriminator(nn.Sequential):
        """The second."""

    torch.manual_seed(0)
    g, d = Generator(nn.Linear(4, 4), nn.Tanh()), Discriminator(nn.Linear(4, 4), nn.Tanh())
    draw = torch.Generator().manual_seed(1)
    both = torch.optim.SGD([*g.parameters(), *d.parameters()], lr=0.1)
    with recording(directory):
        for step in range(3):
            both.zero_grad()
            g(torch.randn(3, 4, generator=draw)).mean().backward()
            y = d(torch.randn(3, 4, generator=draw))
            if wrong and step == 1:
                y.grad_fn.register_hook(lambda left, came: tuple(2 * gradient for gradient in left))
            y.square().mean().backward()
            both.step()
    return directory


def test_root_is_named_where_there_are_several(tmp_path: Path) -> None:
    good, bad = gan(tmp_path / "good", False), gan(tmp_path / "bad", True)
    _, answer = asked("diff", good, bad, "--format", "json")
    assert (
        "the gradient leaving module 1 of root 1 (Discriminator) (TanhBackward0)"
        in (answer["explanation"])
    )
    assert answer["origins"][0]["root_name"] == "root 1 (Discriminator)"
    assert any(name.endswith("of root 0 (Generator)") or name == "root 0 (Generator)"
               for name in answer["equal"]["modules"])  # fmt: skip


def test_options_restrict_what_is_compared_and_the_answer_says_so(
    good: Path, tmp_path: Path
) -> None:
    def one(step: int, net: Two) -> None:
        net.wrong = {"left"} if step == 2 else set()

    bad = job(tmp_path / "bad", one)
    code, answer = asked("diff", good, bad, "--at", 1, "--format", "json")
    assert (code, answer["verdict"], answer["cover"]["steps"]) == (0, "identical", [1])
    assert answer["cover"]["asked_for"] == "step 1"
    assert "anything but what was asked for (step 1)" in answer["explanation"]
    code, answer = asked("diff", good, bad, "--link", "forward", "--format", "json")
    assert (answer["first_divergence"]["step"], answer["first_divergence"]["link"]) == (
        3,
        "forward",
    )
    assert {name for name, count in answer["cover"]["rows"].items() if count} == {"module_calls"}
    assert "were not compared" in answer["explanation"]
    code, answer = asked("diff", good, bad, "--module", "r*", "--at", 2, "--format", "json")
    assert (code, answer["verdict"]) == (0, "identical")
    code, said = told("diff", good, bad, "-v", "--top", 2)
    lines = said.splitlines()
    [heading] = [n for n, line in enumerate(lines) if line.startswith("The chain around")]
    marked = [line for line in lines[heading:] if line.startswith(">")]
    assert ["arrives" in line for line in marked] == [True, False]
    assert "equal" in marked[0] and "left (AddmmBackward0) leaves" in marked[1]
    assert sum(line.startswith("   0  ") for line in lines) == 2  # of what differs, by rank


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--rank", "1-"), "--rank is '1-', of which '1-' is no rank; write 3 or 0,4-7"),
        (("--module", ""), "--module is empty; give a module's dotted name or a glob"),
    ],
)
def test_option_that_cannot_be_read_is_a_sentence(
    options: tuple[str, ...], said: str, good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gradtrace_analyzer.cli import analyzer

    with pytest.raises(SystemExit) as left:
        analyzer(["diff", str(good), str(good), *options])
    assert left.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"analyzer: {said}") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--at", "9"), "Cannot tell: step 9 was not recorded on both sides."),
        (("--rank", "7"), "Cannot tell: rank 7 was not recorded on both sides: "),
        (("--module", "no"), "Cannot tell: nothing that both recorded is of module no."),
    ],
)
def test_what_was_not_recorded_cannot_be_asked_for(
    options: tuple[str, ...], said: str, good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gradtrace_analyzer.cli import analyzer

    with pytest.raises(SystemExit) as left:
        analyzer(["diff", str(good), str(good), *options])
    assert left.value.code == 2 and said in capsys.readouterr().out
