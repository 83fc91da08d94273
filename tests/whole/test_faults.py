"""Faults, one at a time, in real two-rank jobs: each is found at its step, rank, link, module and Node."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.answers.commands import asked
from support.launching.jobs_ahead import Ahead, chosen_items, parameters_of
from support.launching.launcher import run_job

JOB = Path(__file__).resolve().parents[1] / "support" / "jobs" / "training.py"


@dataclass(frozen=True)
class Fault:
    """A fault and the right answer. `node` is True where the job itself prints which Node it is."""

    model: str
    kind: str
    target: str
    link: str
    module: str | None = None
    parameter: str | None = None
    step: int = 1
    rank: int = 1
    node: bool = False
    ranks: tuple[int, ...] | None = None
    slow: bool = True


def backward(model: str, kind: str, target: str, **more: Any) -> Fault:
    return Fault(model, kind, target, "backward", module=target, node=True, **more)


def forward(model: str, kind: str, target: str, **more: Any) -> Fault:
    return Fault(model, kind, target, "forward", module=target, **more)


def state(model: str, kind: str, target: str, link: str, **more: Any) -> Fault:
    return Fault(model, kind, target, link, parameter=target, **more)


FAULTS = [
    state("gpt", "parameter", "tok.weight", "parameters", slow=False),
    state("gpt", "parameter", "blocks.0.mlp.up.bias", "parameters"),
    state("gpt", "parameter", "head.weight", "parameters", step=2),
    state("cnn", "buffer", "norm.running_mean", "parameters", slow=False),
    state("cnn", "buffer", "body.1.running_var", "parameters", step=2),
    Fault("gpt", "input", "", "inputs", slow=False),
    Fault("lists", "input", "", "inputs", step=0, rank=0),
    forward("gpt", "forward", "pos"),
    forward("gpt", "forward", "blocks.1.attn.qkv", slow=False),
    forward("gpt", "forward", "head", step=2, rank=0),
    forward("lists", "forward", "branches.right"),
    forward("cnn", "forward", "body.0", step=0),
    backward("gpt", "derivative", "tok", rank=0),
    backward("gpt", "derivative", "blocks.0.ln2", slow=False),
    backward("gpt", "derivative", "head", step=2),
    backward("rnn", "derivative", "lstm"),
    backward("cnn", "derivative", "body.1"),
    backward("lists", "derivative", "layers.0", step=0),
    backward("gpt", "nan", "blocks.1.mlp.out", slow=False),
    backward("rnn", "nan", "embed"),
    backward("cnn", "nan", "head", step=2),
    state("gpt", "gradient-zeroed", "blocks.0.attn.proj.weight", "clip", slow=False),
    state("rnn", "gradient-zeroed", "head.bias", "clip", step=2),
    state("gpt", "gradient-hook", "pos.weight", "local_gradient", slow=False),
    state("lists", "gradient-hook", "branches.left.weight", "local_gradient"),
    Fault("gpt", "learning-rate", "", "optimizer", ranks=(0, 1), slow=False),
    Fault("cnn", "learning-rate", "", "optimizer", ranks=(0, 1), step=2),
    forward("gpt", "dropout", "drop", slow=False),
    forward("lists", "dropout", "drop", step=2, rank=0),
    Fault("gpt", "seed", "", "rng", module="drop"),
    Fault("gpt", "functional", "", "forward", module="", slow=False),
    Fault("lists", "functional", "", "forward", module=""),
    Fault("cnn", "functional", "", "forward", module="", step=2),
    Fault("rnn", "functional", "", "forward", module=""),
    Fault("gpt", "loss", "", "loss", slow=False),
    Fault("rnn", "label", "", "loss", step=0),
]


def named(fault: Fault) -> str:
    return "-".join(part for part in (fault.model, fault.kind, fault.target) if part)


Job = tuple[str, ...]
Recorded = Ahead[Job, tuple[Path, str]]


def good_job(fault: Fault) -> Job:
    # Hooks on the target are there in the good run too: the fault alone tells the runs apart.
    return ("--model", fault.model, "--fault-target", fault.target)


def bad_job(fault: Fault) -> Job:
    place = ("--fault-step", str(fault.step), "--fault-rank", str(fault.rank))
    return ("--model", fault.model, "--fault", fault.kind, *place, "--fault-target", fault.target)


@pytest.fixture(scope="module")
def recorded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Recorded]:
    """Run and output of each job, by its arguments."""
    folder = tmp_path_factory.mktemp("faults")

    def job(arguments: Job) -> tuple[Path, str]:
        run = folder / "".join(arguments).replace("--", "-")
        return run, record(run, *arguments)

    given = [parameters_of(item).get("fault") for item in chosen_items(request)]
    wanted = [j for f in given if isinstance(f, Fault) for j in (good_job(f), bad_job(f))]
    ahead = Ahead({arguments: functools.partial(job, arguments) for arguments in wanted})
    yield ahead
    ahead.close()


def record(directory: Path, *arguments: object) -> str:
    return run_job(JOB, *arguments, ranks=2, recorded=directory, forked=True).must_succeed().stdout


def diff(baseline: Path, candidate: Path, *options: str) -> tuple[int, dict[str, Any]]:
    return asked("diff", "--format", "json", *options, baseline, candidate, is_quiet=True)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, id=named(f), marks=[pytest.mark.slow] if f.slow else []) for f in FAULTS],
)
def test_fault_is_found_at_its_exact_place(fault: Fault, recorded: Recorded) -> None:
    (good, _), (bad, printed) = recorded[good_job(fault)], recorded[bad_job(fault)]
    for baseline, candidate in ((good, bad), (bad, good)):
        code, answer = diff(baseline, candidate)
        assert (code, answer["verdict"]) == (1, "different")
        first = answer["first_divergence"]
        print(answer["explanation"])
        assert first["step"] == fault.step, answer["explanation"]
        assert tuple(first["ranks"]) == (fault.ranks or (fault.rank,))
        assert first["link"] == fault.link
        if fault.module is not None:
            assert first["module_fqn"] == fault.module
        if fault.parameter is not None:
            assert first["parameter_fqn"] == fault.parameter
        if fault.node:
            assert f"NODE {first['node_name']}" in printed.replace("torch::autograd::", "")
        assert len(answer["origins"]) == 1


@pytest.mark.parametrize(
    ("model", "pairs"), [("gpt", 2), pytest.param("gpt", 18, marks=pytest.mark.slow)]
)
def test_equal_runs_raise_no_alarm(model: str, pairs: int, tmp_path: Path) -> None:
    """Pairs of equal runs, over all models and both kinds of reduction."""
    names = [("gpt", "cnn", "rnn", "lists")[n % 4] if pairs > 2 else model for n in range(pairs)]
    jobs = {
        tmp_path / name: functools.partial(record, tmp_path / name, "--model", name)
        for name in dict.fromkeys(names)
    }
    again = [tmp_path / f"{name}-{number}" for number, name in enumerate(names)]
    for run, name in zip(again, names, strict=True):
        jobs[run] = functools.partial(record, run, "--model", name)
    ahead = Ahead(jobs)
    for run, name in zip(again, names, strict=True):
        assert (ahead[tmp_path / name], ahead[run]) == (
            "",
            "",
        )  # both have ended, and printed nothing
        code, answer = diff(tmp_path / name, run, "--exact")
        assert (code, answer["verdict"]) == (0, "identical"), answer["explanation"]
        assert answer["cover"]["ranks"] == [0, 1] and answer["cover"]["steps"] == [0, 1, 2]
    ahead.close()
