"""Mistakes in a training loop, around the passes: settings, .grad between passes, groups, buffers, steps asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradtrace_analyzer.diff.pairing.step_index as step_index
from gradtrace_analyzer.diff.compare import compare
from gradtrace_analyzer.diff.scope.selection import chosen
from gradtrace_analyzer.reports.diff.json_object import as_object
from gradtrace_analyzer.runs.opening import open_run
from support.recordings.in_process import recording


class Net(nn.Module):
    """Ten layers, and two buffers that nothing reads."""

    seen: torch.Tensor
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 2)
        self.second = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
        self.extra = nn.Identity()
        self.gain, self.noise, self.extra_count = 1.0, 0.0, 1
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> Any:
        h = self.second(self.first(x).tanh()).tanh() * (1 + self.noise)
        for _ in range(self.extra_count):
            self.extra(h.detach())
        return self.head(h) * self.gain


def job(
    directory: Path,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    decay: float = 0.0,
    cleared_between: int | None = None,
    kept: int | None = None,
    left_out: bool = False,
    noise: float = 0.0,
    change: Callable[[int, Net], None] = lambda step, net: None,
) -> Path:
    """Two passes a step. .grad is cleared between the passes of one step, or not before another."""
    torch.manual_seed(0)
    net = Net()
    trained = [p for name, p in net.named_parameters() if not (left_out and "second" in name)]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=betas, weight_decay=decay)
    draw = torch.Generator().manual_seed(1)
    net.noise = noise
    with recording(directory):
        for step in range(4):
            change(step, net)
            if step != kept:
                net.zero_grad()
            for microbatch in range(2):
                if microbatch and step == cleared_between:
                    net.zero_grad()
                net(torch.randn(5, 6, generator=draw)).square().mean().backward()
            optimizer.step()
    return directory


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return job(tmp_path_factory.mktemp("good") / "run")


def diff(a: Path, b: Path, at: int | None = None) -> dict[str, Any]:
    return as_object(compare(open_run(a), open_run(b), chosen=chosen(at)))


def test_setting_is_told_from_the_first_step_on(good: Path, tmp_path: Path) -> None:
    for noise in (0.0, 1.2e-7):  # bit for bit until then, and within rounding
        answer = diff(good, job(tmp_path / f"{noise}", betas=(0.9, 0.99), noise=noise))
        assert answer["verdict"] == "different"
        said = "group 0 of optimizer 0 was set otherwise: betas is [0.9, 0.99] instead"
        assert f"Step 0, rank 0: {said}" in answer["explanation"]


def test_setting_is_an_origin_beside_a_fault_in_the_forward(good: Path, tmp_path: Path) -> None:
    def gain(step: int, net: Net) -> None:
        net.gain = 1.01

    answer = diff(good, job(tmp_path / "b", decay=0.1, change=gain))
    assert [o["link"] for o in answer["origins"]] == ["forward", "optimizer"]
    assert "group 0 of optimizer 0 was set otherwise: weight_decay is 0.1" in answer["explanation"]


def test_gradients_that_were_cleared_between_two_passes_are_one_origin(
    good: Path, tmp_path: Path
) -> None:
    answer = diff(good, job(tmp_path / "b", cleared_between=2))
    [origin] = answer["origins"]
    assert (origin["step"], origin["link"], origin["backward_index"]) == (2, "local_gradient", 1)
    said = ".grad was changed or cleared between passes 0 and 1"
    assert said in answer["explanation"] and "(and 19 more)" in answer["explanation"]


def test_gradients_that_were_left_from_the_step_before_are_one_origin(
    good: Path, tmp_path: Path
) -> None:
    answer = diff(good, job(tmp_path / "b", kept=2))
    [origin] = answer["origins"]
    assert (origin["step"], origin["link"]) == (2, "carried_gradient")


def test_parameters_that_no_optimizer_holds_are_told(good: Path, tmp_path: Path) -> None:
    answer = diff(good, job(tmp_path / "b", left_out=True))
    said = (
        "group 0 of optimizer 0 was set otherwise: it lacks second.0.weight and 15 more parameters"
    )
    assert said in answer["explanation"]


def test_step_that_was_given_other_parameters_accuses_nothing_in_it(
    good: Path, tmp_path: Path
) -> None:
    def wrong_start(step: int, net: Net) -> None:
        if step == 0:
            with torch.no_grad():
                next(net.second.parameters()).mul_(1.5)

    answer = diff(good, job(tmp_path / "b", change=wrong_start), at=2)
    first = answer["first_divergence"]
    assert (first["step"], first["link"]) == (2, "parameters")
    assert (
        "what came before may be its cause, since step 1 was not compared" in answer["explanation"]
    )


def test_buffer_that_differs_hides_no_fault(good: Path, tmp_path: Path) -> None:
    def counted(step: int, net: Net) -> None:
        if step == 1:
            net.seen[1] = 77

    def scaled(step: int, net: Net) -> None:
        if step == 1:
            net.scale.fill_(5)
        net.gain = 1.5 if step == 2 else 1.0

    for change, link, name in ((counted, "parameters", "seen"), (scaled, "parameters", "scale")):
        answer = diff(good, job(tmp_path / name, noise=1.2e-7, change=change))
        first = answer["first_divergence"]
        assert answer["verdict"] == "different", answer["explanation"]
        assert (first["link"], first["parameter_fqn"]) == (link, name)


def test_call_without_effect_is_told_however_little_is_opened(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def extra(step: int, net: Net) -> None:
        net.extra_count = 1 + (step == 2)

    other = job(tmp_path / "b", change=extra)
    opened = diff(good, other)
    monkeypatch.setattr(step_index, "MOST_ROWS", 0)
    sieved = diff(good, other)
    assert opened["verdict"] == sieved["verdict"] == "within_tolerance"
    assert [(a["kind"], a["name"], a["first_step"]) for a in sieved["set_aside"]] == [
        ("call", "extra", 2)
    ]


class Skipping(nn.Module):
    """Leaves out a layer of three in turn, and in one step another."""

    def __init__(self, skips: int | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.skips, self.step = skips, -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        for number, layer in enumerate(self.layers):
            if (self.step + number) % 3 != 2 and (self.step, number) != (self.skips, 1):
                x = torch.tanh(layer(x))
        return x


def test_call_of_one_side_is_the_origin_whichever_side_that_is(tmp_path: Path) -> None:
    for name, skips in (("whole", None), ("skips", 2)):
        torch.manual_seed(0)
        net = Skipping(skips)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        draw = torch.Generator().manual_seed(1)
        with recording(tmp_path / name):
            for _ in range(4):
                optimizer.zero_grad()
                net(torch.randn(3, 4, generator=draw)).square().sum().backward()
                optimizer.step()
    for a, b, alone in (("whole", "skips", "baseline"), ("skips", "whole", "candidate")):
        answer = diff(tmp_path / a, tmp_path / b)
        [origin] = answer["origins"]
        said = f"Step 2, rank 0: the forward call of layers.1 is in the {alone} alone"
        assert (origin["module_fqn"], said in answer["explanation"]) == ("layers.1", True)


class Gain(nn.Sequential):
    """A block whose output is a hundredth too large where it is told so."""

    gain = 1.0

    def forward(self, x: torch.Tensor) -> Any:
        given = x + super().forward(x)  # type: ignore[no-untyped-call]
        return given if self.gain == 1.0 else given * self.gain


def test_output_that_is_too_long_is_found_in_half_precision_and_drift(tmp_path: Path) -> None:
    """Adam makes parameters drift apart by far more than a hundredth would show; lengths do not drift."""
    for name, is_half, wrong in (
        ("single", False, None),
        ("half", True, None),
        ("wrong", True, 2),
    ):
        torch.manual_seed(0)
        blocks = [Gain(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(6)]
        net = nn.Sequential(nn.Linear(16, 64), *blocks, nn.Linear(64, 8))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        draw = torch.Generator().manual_seed(1)
        with recording(tmp_path / name):
            for step in range(4):
                blocks[4].gain = 1.01 if step == wrong else 1.0
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
                    given = net(torch.randn(256, 16, generator=draw))
                given.float().square().mean().backward()
                optimizer.step()
    assert diff(tmp_path / "single", tmp_path / "half")["verdict"] == "within_tolerance"
    first = diff(tmp_path / "single", tmp_path / "wrong")["first_divergence"]
    assert (first["step"], first["link"], first["module_fqn"]) == (2, "forward", "5")


class Spoilt(torch.autograd.Function):
    """Hands x on; its gradient is NaN where it is told so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wrong: bool) -> torch.Tensor:
        ctx.wrong = wrong
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * (float("nan") if ctx.wrong else 1.0), None


def test_step_that_a_scaler_skips_is_compared_without_its_scale(tmp_path: Path) -> None:
    """No optimizer sees the gradients of that step, so that none shows by itself that they were scaled."""
    for name, scale, wrong in (("plain", 1.0, None), ("scaled", 1024.0, 2)):
        torch.manual_seed(0)
        first, last = nn.Linear(6, 8), nn.Linear(8, 2)
        optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.1)
        draw = torch.Generator().manual_seed(1)
        with recording(tmp_path / name):
            for step in range(4):
                optimizer.zero_grad()
                h = first(torch.randn(5, 6, generator=draw))
                h = Spoilt.apply(h, step == wrong)  # type: ignore[no-untyped-call]
                (last(h).square().mean() * scale).backward()
                for parameter in (*first.parameters(), *last.parameters()):
                    assert parameter.grad is not None
                    parameter.grad.div_(scale)
                if step != wrong:
                    optimizer.step()
    answer = diff(tmp_path / "plain", tmp_path / "scaled")
    first_divergence = answer["first_divergence"]
    assert (first_divergence["step"], first_divergence["node_name"]) == (2, "SpoiltBackward")
    assert answer["loss_scales"][0]["factor"] == 1024
