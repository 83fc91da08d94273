"""The first promise: the job's bits, its errors and its exit code are the same with and without recording."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from support.launching.launcher import run_job
from support.recordings.in_process import rows

JOBS = Path(__file__).resolve().parents[1] / "support" / "jobs"

WAYS: list[Any] = [
    pytest.param(1, ("--model", "gpt"), id="1-gpt"),
    pytest.param(1, ("--model", "cnn", "--optimizer", "sgd", "--scaler"), id="1-cnn-scaler"),
    pytest.param(1, ("--model", "rnn", "--accumulate", "2"), id="1-rnn-accumulate"),
    pytest.param(2, ("--model", "gpt", "--accumulate", "2"), id="2-gpt-accumulate"),
    pytest.param(
        2,
        (
            "--model",
            "lists",
        ),
        id="2-lists",
        marks=pytest.mark.slow,
    ),
    pytest.param(2, ("--model", "cnn"), id="2-cnn", marks=pytest.mark.slow),
    pytest.param(3, ("--model", "gpt"), id="3-gpt", marks=pytest.mark.slow),
    pytest.param(3, ("--model", "rnn", "--no-ddp"), id="3-rnn-alone", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("ranks", "arguments"), WAYS)
def test_training_is_equal_bit_for_bit(
    ranks: int, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    for name in ("bare", "recorded"):
        (tmp_path / name).mkdir()
    # Under torch's own launcher the whole way is gone once; what is compared is what comes behind the start.
    run = functools.partial(run_job, JOBS / "training.py", *arguments, "--out", ranks=ranks)
    forked = "gpt" not in arguments
    bare = run(tmp_path / "bare", forked=forked).must_succeed()
    seen = run(tmp_path / "recorded", recorded=tmp_path / "run", forked=forked).must_succeed()
    assert bare.stdout == seen.stdout
    for rank in range(ranks):
        a, b = (torch.load(tmp_path / n / f"rank{rank}.pt") for n in ("bare", "recorded"))
        assert same(a, b), f"rank {rank} was changed by recording"
    assert len(list((tmp_path / "run" / "node_events").iterdir())) == ranks


def test_training_is_equal_bit_for_bit_with_every_node_run_again(tmp_path: Path) -> None:
    arguments = ("--model", "gpt", "--out")
    for name in ("bare", "replayed"):
        (tmp_path / name).mkdir()
    job, env = JOBS / "training.py", {"GRADTRACE_REPLAY": "*,python:*"}
    run = functools.partial(run_job, job, *arguments, ranks=2, forked=True)
    bare = run(tmp_path / "bare").must_succeed()
    seen = run(tmp_path / "replayed", recorded=tmp_path / "run", env=env).must_succeed()
    assert bare.stdout == seen.stdout
    for rank in range(2):
        a, b = (torch.load(tmp_path / n / f"rank{rank}.pt") for n in ("bare", "replayed"))
        assert same(a, b), f"rank {rank} was changed by running Nodes again"
    found = rows(tmp_path / "run", "SELECT rank, replay_equal, count(*) FROM node_events WHERE "
        "node_name <> 'AccumulateGrad' GROUP BY ALL ORDER BY ALL")  # fmt: skip
    assert [row[:2] for row in found] == [(0, True), (1, True)], found


def same(a: Any, b: Any) -> bool:
    """Equal in every bit, tensors by their bytes."""
    if isinstance(a, torch.Tensor):
        return bool(a.dtype == b.dtype and as_bytes(a) == as_bytes(b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def as_bytes(tensor: torch.Tensor) -> bytes:
    """Its values as they lie in memory; numpy knows no bfloat16."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_comparison_of_states_sees_one_bit() -> None:
    a = torch.ones(3)
    b = a.clone()
    b.view(torch.int32)[1] ^= 1
    assert same({"x": [a]}, {"x": [a.clone()]}) and not same({"x": [a]}, {"x": [b]})
    assert not same(torch.tensor([0.0]), torch.tensor([-0.0]))


RAISES = """
import torch
net = torch.nn.Linear(3, 3)
class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1
    @staticmethod
    def backward(ctx, g):
        raise ValueError("from the job's own backward")
Broken.apply(net(torch.ones(2, 3))).sum().backward()
"""
EXITS = """
import sys, torch
torch.nn.Linear(3, 3)(torch.ones(2, 3)).sum().backward()
sys.exit(37)
"""
DIES = """
import os, signal, torch
torch.nn.Linear(3, 3)(torch.ones(2, 3)).sum().backward()
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("source", [RAISES, EXITS, DIES], ids=["raises", "exits", "dies"])
def test_end_of_a_job_is_its_own(source: str, tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(source)
    bare = run_job(job)
    seen = run_job(job, recorded=tmp_path / "run", env={"GRADTRACE_STRICT": "0"})
    assert (bare.returncode, bare.stdout) == (seen.returncode, seen.stdout)
    assert last_line(bare.stderr) == last_line(seen.stderr)
    assert "gradtrace:" not in seen.stderr


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]
