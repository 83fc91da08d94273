"""The declared keys of JSON answers against answers: what is given is declared, and what is declared is given."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import gradtrace_recorder
from gradtrace_analyzer.cli import analyzer
from gradtrace_analyzer.doctor.trials import Trial
from gradtrace_analyzer.reports.doctor import job_object
from gradtrace_analyzer.reports.json_keys import ANSWERS
from support.answers.json_answers import declared_places, mismatches, seen_places
from support.recordings.in_process import recording
from support.synthetic_runs.bucket_times import MS, TimedJob
from support.synthetic_runs.builder import build_run
from support.synthetic_runs.data_parallel import Job, edit, remove
from support.synthetic_runs.stage_times import USUAL, StagedJob

STEPS = 3
CASES = Path(__file__).resolve().parents[1] / "cases"


class Wrong(torch.autograd.Function):
    """Hands on what came in, times a factor; raises where that is None."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float | None) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.factor is None:
            raise ValueError("no luck")
        return gradient * ctx.factor, None


class Net(nn.Module):
    """Two layers, and what a fault may do between them."""

    def __init__(self, adapter: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.adapter = nn.Linear(4, 4) if adapter else None
        self.idle = nn.Identity()
        self.factor: float | None = 1.0
        self.calls = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.calls):
            self.idle(x.detach())
        h = Wrong.apply(self.first(x), self.factor)  # type: ignore[no-untyped-call]
        if self.adapter is not None:
            h = self.adapter(h)
        return self.last(h.tanh())  # type: ignore[no-any-return]


def quiet(step: int, net: Net) -> None:
    """Nothing is changed."""


def trained(
    directory: Path,
    before: Callable[[int, Net], None] = quiet,
    *,
    passes: int = 1,
    scale: float = 1.0,
    loss_factor: float = 1.0,
    adapter: bool = False,
    calls: int = 1,
    shrinks: float = 1.0,
    **settings: Any,
) -> Path:
    """Three steps, of `passes` each, and what may be wrong with them.

    `before` is called before a step's forward. The loss is multiplied by `scale`, and the gradients divided by it; by
    `loss_factor` it is multiplied for good. In step 2 there are so many `calls` to no effect. After the first pass of
    step 0 `.grad` `shrinks` by that factor.
    """
    torch.manual_seed(0)
    net = Net(adapter)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(1)
    with recording(directory, **settings):
        for step in range(STEPS):
            optimizer.zero_grad()
            before(step, net)
            for number, rows in enumerate(torch.randn(8, 4, generator=draw).chunk(passes)):
                if (number, step) == (1, 0):
                    for parameter in net.parameters():
                        assert parameter.grad is not None
                        parameter.grad.mul_(shrinks)
                net.calls = calls if step == 2 else 1
                loss = net(rows).square().mean() / passes * scale * loss_factor
                try:
                    loss.backward()
                except ValueError:
                    continue
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(scale)
            optimizer.step()
    return directory


def at_step_1(factor: float | None) -> Callable[[int, Net], None]:
    """The gradient is multiplied by that in step 1; None: it raises."""

    def change(step: int, net: Net) -> None:
        net.factor = factor if step == 1 else 1.0

    return change


def staged(directory: Path, *, in_turn: bool, factor: float) -> Path:
    """Two stages of a pipeline on one rank, with two microbatches; `in_turn`, each goes back before the next comes,
    else the last goes back first."""
    torch.manual_seed(0)
    stages = nn.Linear(4, 4), nn.Linear(4, 2)
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.parameters()], lr=0.1)
    draw = torch.Generator().manual_seed(1)
    kept: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def forward(microbatch: int, x: torch.Tensor) -> None:
        with gradtrace_recorder.stage(0, microbatch, "forward"):
            left = stages[0](x)
        came = left.detach().requires_grad_()
        with gradtrace_recorder.stage(1, microbatch, "forward"):
            kept[microbatch] = left, came, stages[1](came).square().mean()

    def backward(microbatch: int, times: float) -> None:
        left, came, loss = kept[microbatch]
        with gradtrace_recorder.stage(1, microbatch, "backward_full"):
            loss.backward()
        with gradtrace_recorder.stage(0, microbatch, "backward_full"):
            assert came.grad is not None
            left.backward(came.grad * times)

    with recording(directory):
        for step in range(STEPS):
            optimizer.zero_grad()
            halves = torch.randn(8, 4, generator=draw).chunk(2)
            wrong = factor if step == 1 else 1.0
            actions = ("F0", "B0", "F1", "B1") if in_turn else ("F0", "F1", "B1", "B0")
            for action in actions:
                microbatch = int(action[1])
                if action[0] == "F":
                    forward(microbatch, halves[microbatch])
                else:
                    backward(microbatch, wrong)
            optimizer.step()
    return directory


def raises_in_a_parameter(step: int, net: Net) -> None:
    def no_luck(gradient: torch.Tensor) -> None:
        raise ValueError("no luck")

    if step == 1:
        net.first.weight.register_hook(no_luck)


def answer_of(command: str, *arguments: object) -> tuple[str, Any]:
    """The command and its answer, whatever it says."""
    words = [command, *map(str, arguments), "--format", "json"]
    done = CliRunner().invoke(analyzer, words)
    assert done.exit_code in (0, 1, 2) and done.stdout, done.output
    return command, json.loads(done.stdout)


def case(directory: Path, variant: str) -> Path:
    """One of the jobs that were rebuilt from public reports."""
    with pytest.MonkeyPatch.context() as environment, recording(directory):
        environment.setenv("VARIANT", variant.partition("-")[0])
        runpy.run_path(str(CASES / "21-split-backward-tied-weight.py"))
    return directory


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, dict[str, Any]]]:
    """(command, answer) of recordings that between them show every key."""
    place = tmp_path_factory.mktemp("answers")
    return [
        *diffs(place / "diff"),
        *of_one_run(place / "one"),
        *timings(place / "timing"),
        *(("laws", law) for law in answer_of("laws")[1]),
        answer_of("laws", "gradients_equal"),
        answer_of("doctor", place / "one" / "replicas"),
        ("doctor", job_object("python", [], Trial("a model", "native", 9, 2, 3))),
    ]


def diffs(place: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    def ask(*arguments: object) -> tuple[str, dict[str, Any]]:
        return answer_of("diff", *arguments)

    good = trained(place / "good", replay="python:*")
    wrong = trained(place / "wrong", at_step_1(1.5), replay="python:*")
    yield ask(good, wrong, "-v", "--at", 1, "--fail-on", "any>=0", "--timing")
    yield ask(good, trained(place / "raises", at_step_1(None)))
    yield ask(good, trained(place / "hook", raises_in_a_parameter))
    yield ask(good, trained(place / "adapter", adapter=True))
    yield ask(good, trained(place / "halves", passes=2))
    yield ask(good, trained(place / "scaled", at_step_1(1.5), scale=1024.0))
    yield ask(place / "good", trained(place / "idle", calls=2))
    halves = place / "halves"
    yield ask(halves, trained(place / "shrunk", passes=2, loss_factor=4.0, shrinks=0.25))
    yield ask(*(case(place / variant, variant) for variant in ("good-21", "bad-21")))
    yield ask(
        staged(place / "in-turn", in_turn=True, factor=1.0),
        staged(place / "all-first", in_turn=False, factor=1.5),
    )
    rows = Job().made()
    one = build_run(place / "replicas", rows, world_size=2)
    edit(rows, "node_events", {"rank": 1, "step": 1, "event_index": 1}, grad_input_fingerprint=17)
    edit(rows, "gradients", {"rank": 1, "step": 1}, fingerprint=18)
    edit(rows, "gradients", {"rank": 0, "step": 1, "point": "reduced"}, fingerprint=18)
    versions = {"versions": {"torch": "2.12.0"}}
    other = build_run(place / "apart", rows, world_size=2, rank_facts=versions)
    part = next((other / "inputs").rglob("*.parquet"), None) or next(
        (other / "parameters").rglob("*.parquet")
    )
    part.write_bytes(part.read_bytes()[:-20])
    yield ask(one, other)
    yield ask(good, trained(place / "infinite", at_step_1(float("inf"))))
    counted = [{"step": n, "framework": "transformers", "framework_step": n} for n in range(3)]
    counting = build_run(place / "counting", {"steps": counted})
    yield ask(counting, counting, "--align-steps", "framework")
    boom = {"uncaught": ["ValueError", "boom"], "last_step": 2}
    crashed = build_run(place / "crashed", Job().made(), world_size=2, rank_facts=boom)
    yield ask(crashed, crashed)
    yield answer_of("check", crashed)


def of_one_run(place: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    hook = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook"
    rows = Job(hook_name=hook).made()
    edit(rows, "gradients", {"rank": 1, "step": 2, "point": "reduced"}, fingerprint=17)
    yield answer_of("check", build_run(place / "replicas", rows, world_size=2))
    thread = {"thread": 1, "doing": "backward", "since_ns": 5, "step": 2, "backward_index": 0}
    seen = {
        "pid": 1, "process_start": 1, "machine": 1, "wall_start_ns": 0, "monotonic_start_ns": 0, "heartbeat_ns": 0,
        "moved_ns": 5, "places": [thread], "dropped": {"node_events": [3, 1, 2]},
    }  # fmt: skip
    rows = Job().made()
    remove(rows, "backward_passes", rank=0, step=2)
    edit(rows, "buckets", {"rank": 0, "step": 2, "bucket_index": 0}, done_ns=None)
    remove(rows, "buckets", rank=0, step=2, bucket_index=1)
    remove(rows, "buckets", rank=1, step=2)
    run = build_run(
        place / "waits", rows, world_size=2, unclosed=(0,), rank_facts={"left_behind": seen}
    )
    yield answer_of("failures", run)
    yield from resumed(run)
    rows = StagedJob(stages=2, steps=2).rows()
    edit(rows, "stage_events", {"rank": 1, "step": 1, "microbatch": 3}, end_ns=None)
    run = StagedJob(stages=2, steps=2).write(
        place / "stage", rows, unclosed=(1,), rank_facts={"left_behind": seen}
    )
    yield answer_of("failures", run)
    yield from resumed(run)
    flight = {"settings": {"mode": "flight", "flight_steps": 2}}
    run = build_run(place / "flight", {"steps": [{"step": 7}, {"step": 8}]}, rank_facts=flight)
    yield answer_of("info", run)


def resumed(run: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same with attempts that go on at step 9, twice, and one that then begins anew."""
    for attempt in (1, 2):
        steps = [{"step": 9, "rank": rank} for rank in range(2)]
        build_run(run, {"steps": steps}, world_size=2, attempt=attempt)
    yield answer_of("failures", run)
    build_run(run, {"steps": [{"step": 0}, {"step": 0, "rank": 1}]}, world_size=2, attempt=3)
    yield answer_of("info", run)


def timings(place: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    def ask(run: Path, *options: str) -> tuple[str, dict[str, Any]]:
        return answer_of("timing", run, *options)

    def late(rank: int, step: int, bucket: int) -> float:
        return 30 + step if (rank, bucket) == (1, 1) else 0

    yield ask(StagedJob().write(place / "summary"))
    job = TimedJob(late=late, hosts=("a", "b"), ahead={"b": 400.0})
    rows = job.rows()
    last = next(row for row in rows["buckets"] if (row["rank"], row["step"]) == (0, 3))
    later = {name: last[name] + 50 * MS for name in ("launched_ns", "done_ns")}
    rows["buckets"].append({**last, **later, "kind": "shadow", "collective_seq": 90})
    rows["node_events"] = [
        {
            "rank": rank, "step": step, "backward_index": 0, "event_index": 0, "node_name": "DragBackward", "root": 0,
            "module_fqn": "body.1", "call_index": 0, "occurrence": 0,
            "start_ns": job.own(rank, 1050 + 100 * step), "end_ns": job.own(rank, 1051 + 100 * step + 29 * rank),
        }
        for rank in range(2)
        for step in range(4)
    ]  # fmt: skip
    yield ask(job.write(place / "late", rows), "--buckets")

    def took(stage: int, step: int, kind: str, microbatch: int) -> float:
        return 20 if (stage, kind) == (1, "forward") else USUAL[kind]

    yield ask(
        StagedJob(
            took=took, transfer=lambda *_: 2, hosts=("a", "a", "b", "b"), ahead={"b": 400.0}
        ).write(place / "slow"),
        "--stages",
    )
    yield ask(
        StagedJob(transfer=lambda a, b, _: 15 if (a, b) == (1, 2) else 0.1).write(place / "link"),
        "--stages",
    )
    usual = StagedJob(steps=12).write(place / "usual")
    for pair in ((place / "slower", usual), (usual, place / "slower")):
        if not (place / "slower").exists():
            StagedJob(steps=12, took=took).write(place / "slower")
        yield answer_of("diff", "--timing", *pair)


def test_answers_are_as_declared(answers: list[tuple[str, dict[str, Any]]]) -> None:
    found = [
        f"{command}{mismatch}"
        for command, answer in answers
        for mismatch in mismatches(answer, ANSWERS[command])
    ]
    assert sorted(set(found)) == []


def test_every_declared_key_is_given_by_some_answer(
    answers: list[tuple[str, dict[str, Any]]],
) -> None:
    declared = {(command, p) for command in ANSWERS for p in declared_places(ANSWERS[command])}
    seen = {
        (command, p) for command, answer in answers for p in seen_places(answer, ANSWERS[command])
    }
    assert not declared - seen, "\n".join(map("".join, sorted(declared - seen)))
