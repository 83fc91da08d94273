"""Torch's three backward functions of a stage, called directly, and stages of a job's own pipeline."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import _backward, stage

# Imported by name before any recording begins, as a job would that is recorded by `start`.
from torch.distributed.pipelining._backward import (
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)

import gradtrace_recorder
from gradtrace_recorder import bootstrap
from gradtrace_recorder.sources.pipeline import PipelineSource
from gradtrace_recorder.summaries.summariser import Summariser
from gradtrace_recorder.torch_internals.imports import AfterImport
from support.recordings.in_process import recording, rows
from support.recordings.with_and_without import both


class TwoOutputs(torch.autograd.Function):
    """A Node with two outputs, whose gradients may be None."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)
        return x * w, x + w

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, w = ctx.saved_tensors
        first, second = gradients
        dx, dw = torch.zeros_like(x), torch.zeros_like(w)
        if first is not None:
            dx, dw = dx + first * w, dw + (first * x).sum(0)
        if second is not None:
            dx, dw = dx + second, dw + second.sum(0)
        return dx, dw


class Branches(nn.Module):
    """`used` of the two outputs of a Node that a parameter hangs on, a tied layer, and a parameter nobody uses."""

    def __init__(self, used: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.tied = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)  # two of its Node's three outputs get no gradient
        self.idle = nn.Parameter(torch.ones(4))
        self.used = used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = TwoOutputs.apply(x, self.weight)  # type: ignore[no-untyped-call]
        mixed = first + second if self.used == 2 else first
        return self.norm(self.tied(self.tied(mixed).tanh()))  # type: ignore[no-any-return]


def gradients_of(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def plain(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    """The gradients of the input and of the parameters that a plain backward gives."""
    model, x = copy.deepcopy(model), x.detach().clone().requires_grad_()
    model.zero_grad()
    model(x).square().mean().backward()
    return [x.grad, *gradients_of(model)]


def close(got: list[torch.Tensor | None], wanted: list[torch.Tensor | None]) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


@pytest.mark.parametrize(
    "make",
    [mlp, lambda: Branches(1), lambda: Branches(2)],
    ids=["one gradient each", "partly None", "several"],
)
def test_split_backward_gives_what_a_plain_one_gives_ten_times(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    def job(model: nn.Module, watch: Any) -> Any:
        given = []
        for _ in range(10):
            x = torch.randn(3, 4, requires_grad=True)
            wanted = plain(model, x)
            model.zero_grad()
            loss = model(x).square().mean()
            dinputs, groups = stage_backward_input([loss], None, [x], model.parameters())
            assert all(p.grad is None for p in model.parameters())
            assert dinputs[0] is x.grad
            stage_backward_weight(model.parameters(), groups)
            close([x.grad, *gradients_of(model)], wanted)
            given.append([x.grad, *gradients_of(model)])
        return given

    both(make, job, tmp_path, watched=False)
    assert rows(
        tmp_path,
        "SELECT kind, count(*), count(stage_index), count(DISTINCT microbatch), count(received_norm), count(sent_norm) "
        "FROM stage_events WHERE kind <> 'backward_full' GROUP BY 1 ORDER BY 1",
    ) == [("backward_input", 10, 0, 10, 0, 10), ("backward_weight", 10, 0, 10, 0, 0)]


def test_accumulated_gradients_of_weight_halves_have_rows(tmp_path: Path) -> None:
    def job(model: nn.Module, watch: Any) -> Any:
        for _ in range(3):
            x = torch.randn(3, 4, requires_grad=True)
            _, groups = _backward.stage_backward_input(
                [model(x).sum()], None, [x], model.parameters()
            )
            _backward.stage_backward_weight(model.parameters(), groups)

    both(lambda: Branches(2), job, tmp_path, watched=False)
    found = rows(
        tmp_path,
        "SELECT parameter_fqn, count(*), count(DISTINCT fingerprint) FROM gradients WHERE point = 'local' "
        "GROUP BY 1 ORDER BY 1",
    )
    assert [row[:2] for row in found] == [
        ("norm.bias", 3), ("norm.weight", 3), ("tied.bias", 3), ("tied.weight", 3), ("weight", 3),
    ]  # fmt: skip
    assert rows(tmp_path, "SELECT DISTINCT phase FROM node_events ORDER BY 1") == [
        ("input",), ("weight",),
    ]  # fmt: skip
    # The tied layer's two Nodes are one group: what lies between them runs in the weight half too.
    assert rows(
        tmp_path,
        "SELECT string_agg(DISTINCT phase ORDER BY phase) FROM node_events WHERE node_name = 'TanhBackward0'",
    ) == [("input,weight",)]


def test_full_backward_called_directly_has_a_row(tmp_path: Path) -> None:
    def job(model: nn.Module, watch: Any) -> Any:
        x = torch.randn(3, 4, requires_grad=True)
        output = model(x)
        stage_backward({"out": output}, {"out": torch.ones_like(output)}, [x, None])
        vars(stage)["stage_backward"](model(x).sum(), None, [x])

    both(mlp, job, tmp_path, watched=False)
    assert rows(
        tmp_path,
        "SELECT stage_index, microbatch, kind, received_numel, sent_numel FROM stage_events ORDER BY record_index",
    ) == [(None, 0, "backward_full", 12, 12), (None, 1, "backward_full", None, 12)]


def own_pipeline(model: nn.Module, watch: Any) -> Any:
    """Two microbatches through one stage, as a job would that calls the engine itself."""
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for microbatch in range(2):
        with gradtrace_recorder.stage(3, microbatch, "forward") as action:
            x = torch.randn(3, 4, requires_grad=True)
            action.received(x)
            kept[microbatch] = x, model(x)
            action.sent([kept[microbatch][1]])
    parameters = list(model.parameters())
    for microbatch, (x, output) in kept.items():
        with gradtrace_recorder.stage(3, microbatch, "backward_input"):
            torch.autograd.grad(output, x, torch.ones_like(output), retain_graph=True)
        with gradtrace_recorder.stage(3, microbatch, "backward_weight"):
            torch.autograd.backward(output, torch.ones_like(output), inputs=parameters)


def test_stages_of_an_own_pipeline_have_rows(tmp_path: Path) -> None:
    both(mlp, own_pipeline, tmp_path, watched=False)
    assert rows(
        tmp_path,
        "SELECT stage_index, microbatch, kind, occurrence FROM stage_events ORDER BY record_index",
    ) == [
        (3, 0, "forward", 0), (3, 1, "forward", 0),
        (3, 0, "backward_input", 0), (3, 0, "backward_weight", 0),
        (3, 1, "backward_input", 0), (3, 1, "backward_weight", 0),
    ]  # fmt: skip
    assert rows(
        tmp_path,
        "SELECT DISTINCT stage_index, microbatch, phase FROM node_events ORDER BY ALL",
    ) == [(3, 0, "input"), (3, 0, "weight"), (3, 1, "input"), (3, 1, "weight")]
    # The job's weight half runs from the output again: what it runs is there, whatever the input half ran before.
    halves = {
        phase: sorted(name for (name,) in rows(
            tmp_path, f"SELECT node_name FROM node_events WHERE phase = '{phase}' AND microbatch = 0"
        )) for phase in ("input", "weight")
    }  # fmt: skip
    assert set(halves["input"]) < set(halves["weight"])
    assert halves["weight"].count("AddmmBackward0") == halves["input"].count("AddmmBackward0") > 1
    assert halves["weight"].count("AccumulateGrad") == 2 * halves["weight"].count("AddmmBackward0")
    handed = "SELECT DISTINCT kind, received_numel, sent_numel, sent_norm > 0 FROM stage_events ORDER BY 1"
    assert rows(tmp_path, handed) == [
        ("backward_input", None, None, None),
        ("backward_weight", None, None, None),
        ("forward", 12, 12, True),
    ]
    assert rows(
        tmp_path,
        "SELECT microbatch, count(*), max(call_index) FROM module_calls GROUP BY 1 ORDER BY 1",
    ) == [(0, 4, 0), (1, 4, 0)]
    assert rows(
        tmp_path, "SELECT DISTINCT microbatch, point FROM gradients ORDER BY ALL"
    ) == [(0, "local"), (1, "local")]  # fmt: skip


def test_microbatches_of_uneven_size_are_told_apart_by_their_rows(tmp_path: Path) -> None:
    """Torch's `PipelineStage` receives all into buffers of the first one's size (2.13); a job's own stages may not."""

    def job(model: nn.Module, watch: Any) -> Any:
        last, batch = mlp(), torch.randn(6, 4)
        sent = [part.detach() for part in batch.split([3, 2, 1])]
        for microbatch, x in enumerate(sent):
            x.requires_grad_()
            with gradtrace_recorder.stage(0, microbatch, "forward"):
                first = model(x)
            between = first.detach().requires_grad_()
            with gradtrace_recorder.stage(1, microbatch, "forward"):
                loss = last(between).square().sum()
            for stage_index, outputs, given, of, gradients in (
                (1, [loss], between, last, None),
                (0, [first], x, model, [between]),
            ):
                came = None if gradients is None else [gradients[0].grad]
                with gradtrace_recorder.stage(stage_index, microbatch, "backward_input"):
                    _, groups = stage_backward_input(outputs, came, [given], of.parameters())
                with gradtrace_recorder.stage(stage_index, microbatch, "backward_weight"):
                    stage_backward_weight(of.parameters(), groups)
        x = batch.requires_grad_()
        whole = plain_of_both(model, last, x)
        close([torch.cat([part.grad for part in sent]), *gradients_of(model)], whole)

    def plain_of_both(model: nn.Module, last: nn.Module, x: torch.Tensor) -> Any:
        model, last = copy.deepcopy(model), copy.deepcopy(last)
        model.zero_grad()
        last(model(x)).square().sum().backward()
        return [x.grad, *gradients_of(model)]

    both(mlp, job, tmp_path, watched=False)
    assert rows(
        tmp_path,
        "SELECT stage_index, microbatch, received_numel, sent_numel FROM stage_events WHERE kind = 'backward_input' "
        "ORDER BY 1, 2",
    ) == [
        (0, 0, 12, 12), (0, 1, 8, 8), (0, 2, 4, 4), (1, 0, None, 12), (1, 1, None, 8), (1, 2, None, 4),
    ]  # fmt: skip
    assert rows(
        tmp_path,
        "SELECT stage_index, microbatch, count(*) FROM node_events WHERE phase = 'weight' GROUP BY ALL ORDER BY ALL",
    ) == [(stage, microbatch, 4) for stage in range(2) for microbatch in range(3)]


def test_exception_leaves_the_stage_as_it_was_raised_and_the_row_says_so(tmp_path: Path) -> None:
    with (
        recording(tmp_path),
        pytest.raises(KeyError, match="mine"),
        gradtrace_recorder.stage(0, 5, "forward"),
    ):
        raise KeyError("mine")
    with recording(tmp_path / "b"):
        with pytest.raises(RuntimeError, match="Failed to run stage backward"):
            stage_backward(torch.ones(2, requires_grad=True) * 2, torch.ones(3), [])
        mlp()(torch.ones(1, 4)).sum().backward()
    assert rows(tmp_path, "SELECT microbatch, kind, error FROM stage_events") == [
        (5, "forward", "KeyError: 'mine'")
    ]
    (found,) = rows(tmp_path / "b", "SELECT kind, error FROM stage_events")
    assert found[0] == "backward_full" and found[1].startswith("RuntimeError: \n")
    # Nothing of the action stays.
    assert rows(tmp_path / "b", "SELECT DISTINCT stage_index, phase FROM node_events") == [
        (None, "backward")
    ]


class Fails(torch.autograd.Function):
    """Its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ValueError("here")


def test_failed_pass_says_in_which_stage_and_microbatch(tmp_path: Path) -> None:
    with recording(tmp_path):
        output = Fails.apply(mlp()(torch.ones(1, 4)))  # type: ignore[no-untyped-call]
        with (
            pytest.raises(ValueError, match="here"),
            gradtrace_recorder.stage(2, 1, "backward_full"),
        ):
            output.sum().backward()
    assert rows(
        tmp_path, "SELECT stage_index, microbatch, exception_type, node_name FROM failures"
    ) == [(2, 1, "ValueError", "FailsBackward")]
    assert rows(tmp_path, "SELECT stage_index, microbatch, error FROM stage_events") == [
        (2, 1, "ValueError: here")
    ]


def test_kind_of_a_stage_is_checked_recorded_or_not(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="backward_full"), gradtrace_recorder.stage(0, 0, "back"):
        pass
    with gradtrace_recorder.stage(0, 0, "forward"):
        pass


@pytest.mark.parametrize("wrong", [2**31, 1.5, "a", None])
def test_numbers_that_no_record_can_hold_are_refused_recorded_or_not(
    wrong: Any, tmp_path: Path
) -> None:
    def ask() -> None:
        calls: tuple[Callable[[], Any], ...] = (
            lambda: gradtrace_recorder.stage(wrong, 0, "forward").__enter__(),
            lambda: gradtrace_recorder.stage(0, wrong, "forward").__enter__(),
            lambda: gradtrace_recorder.microbatch(wrong),
            lambda: gradtrace_recorder.step(wrong if wrong != 2**31 else 2**63),
        )
        for call in calls:
            with pytest.raises((TypeError, ValueError)):
                call()

    ask()
    with recording(tmp_path):
        ask()
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    assert rows(tmp_path, "SELECT count(*) > 0 FROM node_events") == [(True,)]


def test_forward_of_a_stage_without_parameters_is_of_the_step_that_it_begins(
    tmp_path: Path,
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'met'}", rank=0, world_size=1)
    try:
        with recording(tmp_path / "run"):
            second = nn.Linear(4, 4)
            stages: list[Any] = [
                pipelining.PipelineStage(module, index, 2, torch.device("cpu"))
                for index, module in enumerate((nn.Tanh(), second))
            ]
            schedule = pipelining.ScheduleInterleaved1F1B(stages, 2, loss_fn=nn.functional.mse_loss)
            optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
            for _ in range(3):
                schedule.step(torch.ones(4, 4), target=torch.zeros(4, 4))
                optimizer.step()
    finally:
        dist.destroy_process_group()
    forwards = "FROM stage_events WHERE kind = 'forward' GROUP BY ALL ORDER BY ALL"
    assert rows(tmp_path / "run", f"SELECT step, stage_index, count(*) {forwards}") == [
        (step, index, 2) for step in range(3) for index in range(2)
    ]


def test_stop_leaves_every_function_as_it_was(tmp_path: Path) -> None:
    from torch.distributed.pipelining import schedules

    functions: list[Any] = [
        stage_backward, stage_backward_input, stage_backward_weight,
        stage._PipelineStageBase.forward_one_chunk, stage._PipelineStageBase.get_fwd_send_ops,
        schedules._wait_batch_p2p,
    ]  # fmt: skip
    before = [(f.__code__, dict(f.__dict__), inspect.signature(f)) for f in functions]
    finders = list(sys.meta_path)
    with recording(tmp_path):
        assert all(
            f.__code__ is not code for f, (code, _, _) in zip(functions, before, strict=True)
        )
        assert [inspect.signature(f) for f in functions] == [s for _, _, s in before]
    assert [(f.__code__, dict(f.__dict__), inspect.signature(f)) for f in functions] == before
    assert sys.meta_path == finders


def test_failure_of_ours_is_no_failure_of_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(PipelineSource, "_enter", fails)
    with recording(tmp_path, strict=False):
        model = mlp()
        own_pipeline(model, None)
        stage_backward(model(torch.ones(1, 4)).sum(), None, [])
    ((problems,),) = rows(tmp_path, "SELECT problems FROM ranks")
    assert problems.count("pipeline source failed") == 1
    assert rows(tmp_path, "SELECT count(*) FROM stage_events") == [(0,)]
    assert rows(tmp_path, "SELECT count(*) FROM backward_passes") == [(5,)]


def test_recording_loads_no_pipelines(tmp_path: Path) -> None:
    code = (
        "import gradtrace_recorder, torch, sys; gradtrace_recorder.start(sys.argv[1], strict=True);"
        "torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward();"
        "assert not [m for m in sys.modules if 'pipelining' in m];"
        "from torch.distributed.pipelining._backward import stage_backward;"
        "x = torch.ones(2, requires_grad=True); stage_backward(x.sum(), None, [x]); gradtrace_recorder.stop();"
        "assert 'gradtrace' not in str(sys.meta_path)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert rows(tmp_path, "SELECT kind FROM stage_events") == [("backward_full",)]


def test_import_is_told_once_when_the_module_has_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "awaited_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    values: list[int] = []
    awaited = AfterImport(
        "awaited_module", lambda: values.append(vars(sys.modules["awaited_module"])["value"])
    )
    awaited.arm()
    awaited.arm()
    assert sys.meta_path.count(awaited) == 1
    try:
        import awaited_module  # type: ignore[import-not-found]

        assert values == [1] and awaited not in sys.meta_path
        assert "exec_module" not in vars(awaited_module.__spec__.loader)
        awaited.arm()
        assert values == [1, 1] and awaited not in sys.meta_path
    finally:
        sys.modules.pop("awaited_module", None)


def test_failure_of_ours_inside_a_stage_spoils_no_other_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError("ours")

    with recording(tmp_path, strict=False):
        with gradtrace_recorder.stage(1, 7, "forward") as action, monkeypatch.context() as broken:
            broken.setattr(Summariser, "of_all", fails)
            action.received(torch.ones(3))
        mlp()(torch.ones(1, 4)).sum().backward()
        session = bootstrap.current_session()
        assert session is not None and session.gate.recording is not None
        # The row's place was given back once: else two rows would come to share it.
        free = session.gate.recording.journal._free_places
        assert len(free) == len(set(free))
    assert rows(tmp_path, "SELECT kind FROM stage_events") == []
    assert rows(tmp_path, "SELECT DISTINCT stage_index, microbatch FROM node_events") == [(None, 0)]
    ((problems,),) = rows(tmp_path, "SELECT problems FROM ranks")
    assert "pipeline source" in problems and "ours" in problems
