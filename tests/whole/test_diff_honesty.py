"""What `diff` says is true, and it says what it did not see: small jobs, recorded in this process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradtrace_analyzer.diff.compare import compare
from gradtrace_analyzer.reports.diff.json_object import as_object
from gradtrace_analyzer.runs.opening import open_run
from support.models.wrong_derivative import Scale
from support.recordings.in_process import recording
from support.synthetic_runs.builder import build_run, summary_columns


class Act(nn.Module):
    factor = gain = 1.0

    def forward(self, x: torch.Tensor) -> Any:
        return Scale.apply(x.tanh() * self.gain, self.factor)  # type: ignore[no-untyped-call]


Change = Callable[[int, Any, torch.optim.Optimizer], None]


def nothing(step: int, net: Any, optimizer: torch.optim.Optimizer) -> None:
    """No fault."""


def job(
    directory: Path,
    change: Change = nothing,
    *,
    steps: int = 4,
    seed: int = 0,
    set_to_none: bool = True,
    zero: bool = True,
    **settings: Any,
) -> Path:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), Act(), nn.Dropout(0.0), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    draw = torch.Generator().manual_seed(1)
    torch.manual_seed(seed)
    with recording(directory, **settings):
        for step in range(steps):
            change(step, net, optimizer)
            if zero:
                optimizer.zero_grad(set_to_none=set_to_none)
            net(torch.randn(5, 6, generator=draw)).square().mean().backward()
            optimizer.step()
    return directory


def wrong_derivative(step: int, net: Any, optimizer: torch.optim.Optimizer) -> None:
    net[1].factor = 1.01 if step == 2 else 1.0


def diff(a: Path, b: Path, **options: Any) -> dict[str, Any]:
    return as_object(compare(open_run(a), open_run(b), **options))


@pytest.mark.parametrize("detail", ["steps", "params", "modules"])
def test_cause_is_not_invented_where_nodes_were_not_recorded(detail: str, tmp_path: Path) -> None:
    good = job(tmp_path / "good", detail=detail)
    answer = diff(good, job(tmp_path / "bad", wrong_derivative, detail=detail))
    assert answer["verdict"] == "different"
    assert "hook" not in answer["explanation"] and "although" not in answer["explanation"]
    assert "not compared" in answer["explanation"]


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ({"detail": "nodes"}, {"detail": "params"}),
        ({"summary": "full"}, {"summary": "norms"}),
        ({"modules": "0"}, {}),
    ],
)
def test_recording_less_on_one_side_is_no_difference(
    mine: dict[str, Any], theirs: dict[str, Any], tmp_path: Path
) -> None:
    a, b = job(tmp_path / "a", **mine), job(tmp_path / "b", **theirs)
    for answer in (diff(a, b), diff(b, a)):
        assert answer["verdict"] == "identical"
    if "summary" in mine:
        assert "bit for bit" not in diff(a, b)["explanation"]


def test_side_without_summaries_cannot_be_judged_from_either_side(tmp_path: Path) -> None:
    a, b = job(tmp_path / "a"), job(tmp_path / "b", summary="off")
    assert diff(a, b)["verdict"] == diff(b, a)["verdict"] == "incomparable"


def test_zeros_that_are_carried_are_no_gradient(tmp_path: Path) -> None:
    a, b = job(tmp_path / "a"), job(tmp_path / "b", set_to_none=False)
    assert diff(a, b)["verdict"] == diff(b, a)["verdict"] == "identical"


def test_gradient_left_in_grad_is_a_carried_gradient(tmp_path: Path) -> None:
    first = diff(job(tmp_path / "a"), job(tmp_path / "b", zero=False))["first_divergence"]
    assert (first["step"], first["link"], first["parameter_fqn"]) == (
        1,
        "carried_gradient",
        "0.weight",
    )


def test_generator_that_differed_before_without_effect_is_not_blamed(tmp_path: Path) -> None:
    def bigger(step: int, net: Any, optimizer: torch.optim.Optimizer) -> None:
        if step == 2:
            net[1].register_forward_hook(lambda m, i, o: o * 1.5)

    answer = diff(job(tmp_path / "a"), job(tmp_path / "b", bigger, seed=7))
    first = answer["first_divergence"]
    assert (first["step"], first["link"], first["module_fqn"]) == (2, "forward", "1")
    assert diff(job(tmp_path / "c"), job(tmp_path / "d", seed=7))["verdict"] == "identical"


def test_changed_hyperparameter_is_named_alone(tmp_path: Path) -> None:
    def decays(step: int, net: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.2 if step >= 2 else 0.1

    answer = diff(job(tmp_path / "a"), job(tmp_path / "b", decays))
    assert answer["explanation"].startswith(
        "Step 2, rank 0: group 0 of optimizer 0 was set otherwise: weight_decay is 0.2 instead of 0.1."
    )


def test_flipped_sign_is_called_that(tmp_path: Path) -> None:
    def flips(step: int, net: Any, optimizer: torch.optim.Optimizer) -> None:
        net[1].factor = -1.0 if step == 1 else 1.0

    answer = diff(job(tmp_path / "a"), job(tmp_path / "b", flips))
    assert (
        "the gradient leaving module 1 (ScaleBackward) has its sign flipped"
        in answer["explanation"]
    )
    assert answer["factor"] == pytest.approx(-1)


def test_recorder_that_gave_up_is_no_difference_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradtrace_recorder.summaries.summariser import Summariser

    good = job(tmp_path / "good")

    def breaks(step: int, net: Any, optimizer: torch.optim.Optimizer) -> None:
        def fails(self: Any, gradient: Any) -> None:
            raise RuntimeError("ours")

        if step == 2:
            monkeypatch.setattr(Summariser, "of_gradient", fails)

    answer = diff(good, job(tmp_path / "bad", breaks, strict=False))
    assert answer["verdict"] == "incomparable"
    assert "gave up in part" in answer["explanation"] and "ours" in answer["explanation"]


def test_rounding_alone_is_within_tolerance_and_a_fault_in_it_is_not(tmp_path: Path) -> None:
    """Another configuration (here said to be one) takes the witness away: bits alone prove nothing."""

    def runs(name: str, change: Change) -> Path:
        directory = job(tmp_path / name, change)
        path = directory / "ranks" / "rank=00000-0.json"
        path.write_text(path.read_text().replace('"num_threads": ', '"num_threads": 1'))
        return directory

    def last_bit(step: int, net: Any, optimizer: torch.optim.Optimizer) -> None:
        net[1].gain = 1 + 2.0**-22

    def both(step: int, net: Any, optimizer: torch.optim.Optimizer) -> None:
        last_bit(step, net, optimizer)
        wrong_derivative(step, net, optimizer)

    good = job(tmp_path / "good")
    assert diff(good, runs("rounded", last_bit))["verdict"] == "within_tolerance"
    assert diff(good, runs("again", last_bit), exact=True)["verdict"] == "different"
    answer = diff(good, runs("faulty", both))
    first = answer["first_divergence"]
    assert (first["step"], first["module_fqn"], first["node_name"]) == (2, "1", "ScaleBackward")
    assert "equal within rounding" in answer["explanation"]
    assert "The first bits differ in step 0" in answer["explanation"]


def step_rows(rank: int, steps: int) -> list[dict[str, Any]]:
    return [
        {"rank": rank, "step": s, "root": 0, "parameter_fqn": "w", "point": "before"}
        | summary_columns([1.0, 2.0])
        for s in range(steps)
    ]


def test_steps_of_one_rank_that_were_not_seen_are_named(tmp_path: Path) -> None:
    whole = {"parameters": step_rows(0, 4) + step_rows(1, 4)}
    short = {"parameters": step_rows(0, 4) + step_rows(1, 2)}
    a = build_run(tmp_path / "a", whole, world_size=2)
    b = build_run(tmp_path / "b", short, world_size=2)
    for answer in (diff(a, b), diff(b, a)):
        assert answer["verdict"] == "incomparable"
        assert "steps 2-3 of rank 1" in answer["explanation"]
    assert diff(a, a)["verdict"] == "identical"


def test_shorter_run_is_identical_as_far_as_it_goes_and_says_so(tmp_path: Path) -> None:
    answer = diff(job(tmp_path / "a"), job(tmp_path / "b", steps=2))
    assert answer["verdict"] == "identical"
    assert "steps 0-1." in answer["explanation"]
    assert "the candidate lacks steps 2-3 of rank 0" in answer["explanation"]


def test_killed_run_is_not_called_identical_and_its_torn_end_is_no_difference(
    tmp_path: Path,
) -> None:
    good = job(tmp_path / "good")
    killed = tmp_path / "killed"
    source = (
        f"import os, sys; sys.path[:0] = {[p for p in sys.path if p]!r}\n"
        "from pathlib import Path\n"
        "from whole.test_diff_honesty import job\n"
        "def dies(step, net, optimizer):\n"
        "    if step == 2:\n"
        "        net[3].register_full_backward_pre_hook(lambda m, g: os._exit(9))\n"
        f"job(Path({str(killed)!r}), dies)\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 9, done.stderr
    for answer in (diff(good, killed), diff(killed, good)):
        assert answer["verdict"] == "incomparable"
        assert "lacks step 3 of rank 0" in answer["explanation"]
        assert answer["first_divergence"] is None
