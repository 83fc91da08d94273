"""What a recording holds of ordinary and of odd training loops, and that it holds nothing else alive."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradtrace_recorder
from gradtrace_recorder import bootstrap
from gradtrace_schemas.journal_reader import read_journal
from support.recordings.in_process import recording, rows


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def train(net: nn.Module, steps: int, accumulate: int = 1) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulate):
            net(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
    return optimizer


def test_steps_and_microbatches_follow_the_rule(tmp_path: Path) -> None:
    with recording(tmp_path / "run"):
        train(small(), 3, accumulate=2)
    assert rows(
        tmp_path / "run", "SELECT step, backward_count, skipped, abandoned_forwards FROM steps"
    ) == [(step, 2, False, 0) for step in range(3)]
    assert rows(
        tmp_path / "run", "SELECT DISTINCT step, microbatch FROM module_calls ORDER BY ALL"
    ) == [(step, part) for step in range(3) for part in range(2)]


def test_gradients_are_there_at_every_point_that_applies(tmp_path: Path) -> None:
    net = small()
    with recording(tmp_path / "run"):
        optimizer = train(net, 1)
        net(torch.randn(5, 3)).sum().backward()  # adds to what was left in .grad
        optimizer.step()
    found = rows(
        tmp_path / "run", "SELECT step, point, count(*) FROM gradients GROUP BY ALL ORDER BY ALL"
    )
    assert found == [
        (0, "final", 4),
        (0, "local", 4),
        (1, "carried", 4),
        (1, "final", 4),
        (1, "local", 4),
    ]


def test_gan_counts_two_steps_and_two_roots(tmp_path: Path) -> None:
    generator, critic = small(), nn.Linear(1, 1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, critic)]
    with recording(tmp_path / "run"):
        for _ in range(2):
            for optimizer in optimizers:
                optimizer.zero_grad()
                critic(generator(torch.randn(5, 3))).sum().backward()
                optimizer.step()
    assert rows(tmp_path / "run", "SELECT count(*), max(step) FROM steps") == [(4, 3)]
    assert rows(tmp_path / "run", "SELECT DISTINCT root, module_class FROM module_calls "
                "WHERE depth = 0 ORDER BY 1") == [(0, "Sequential"), (1, "Linear")]  # fmt: skip
    assert rows(tmp_path / "run", "SELECT step, optimizer_index FROM optimizer_groups ORDER BY 1"
                ) == [(0, 0), (1, 1), (2, 0), (3, 1)]  # fmt: skip


def test_step_that_the_scaler_skips_is_a_step(tmp_path: Path) -> None:
    net = small()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with recording(tmp_path / "run"):
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(1e4 * net(torch.randn(5, 3)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    skipped = rows(tmp_path / "run", "SELECT step, skipped FROM steps ORDER BY 1")
    assert [step for step, _ in skipped] == [0, 1, 2] and skipped[0] == (0, True)


def test_step_that_raised_hides_no_step_of_another_optimizer(tmp_path: Path) -> None:
    net = small()
    first, second = (torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(2))

    def closure() -> float:
        raise ValueError

    with recording(tmp_path / "run"):
        net(torch.randn(5, 3)).sum().backward()
        with pytest.raises(ValueError):
            first.step(closure)
        for _ in range(2):
            net(torch.randn(5, 3)).sum().backward()
            second.step()
    steps = rows(tmp_path / "run", "SELECT step, backward_count FROM steps ORDER BY 1")
    assert steps == [(0, 2), (1, 1)]


def test_abandoned_forward_is_counted(tmp_path: Path) -> None:
    net = small()
    with recording(tmp_path / "run"):
        net(torch.randn(5, 3))
        train(net, 1)
    assert rows(tmp_path / "run", "SELECT abandoned_forwards FROM steps") == [(1,)]


def test_forward_without_gradients_is_a_phase_and_no_step(tmp_path: Path) -> None:
    net = small()
    with recording(tmp_path / "run"):
        train(net, 1)
        with torch.no_grad():
            net(torch.randn(5, 3))
        train(net, 1)
    assert rows(
        tmp_path / "run",
        "SELECT step, phase, count(*) FROM module_calls WHERE depth = 0 GROUP BY ALL ORDER BY ALL",
    ) == [(0, "forward", 1), (0, "no_grad", 1), (1, "forward", 1)]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_a_phase_with_its_modules(reentrant: bool, tmp_path: Path) -> None:
    net = small()
    x = torch.randn(5, 3, requires_grad=True)
    with recording(tmp_path / "run"):
        checkpoint(net, x, use_reentrant=reentrant).sum().backward()
    phases = rows(
        tmp_path / "run", "SELECT phase, count(*) FROM module_calls GROUP BY ALL ORDER BY 1"
    )
    # Without reentrance it stops early, inside the last module: when all that was saved is there.
    assert phases == [("no_grad" if reentrant else "forward", 4), ("recompute", 4)]
    nested = rows(tmp_path / "run", "SELECT backward_index, parent_backward_index "
                  "FROM backward_passes ORDER BY 1")  # fmt: skip
    assert nested == ([(0, None), (1, 0)] if reentrant else [(0, None)])
    assert rows(
        tmp_path / "run",
        "SELECT count(*) FROM node_events WHERE node_name = 'AddmmBackward0' AND module_fqn = '0'",
    ) == [(1,)]


def test_exception_in_backward_is_a_failure_with_its_node(tmp_path: Path) -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            raise ValueError("broken on purpose")

    class Breaks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Broken.apply(x)  # type: ignore[no-any-return, no-untyped-call]

    net = nn.Sequential(nn.Linear(3, 3), Breaks())
    with (
        recording(tmp_path / "run"),
        pytest.raises(ValueError, match="broken on purpose"),
    ):
        net(torch.randn(2, 3)).sum().backward()
    assert rows(
        tmp_path / "run",
        "SELECT node_name, module_fqn, exception_type, exception_text FROM failures",
    ) == [("BrokenBackward", "1", "ValueError", "broken on purpose")]
    assert rows(tmp_path / "run", "SELECT node_name FROM node_events WHERE outcome = 'failed'") == [
        ("BrokenBackward",)
    ]


def test_filters_leave_out_steps_modules_and_details(tmp_path: Path) -> None:
    with recording(tmp_path / "steps", steps="1:3"):
        train(small(), 4)
    assert rows(tmp_path / "steps", "SELECT DISTINCT step FROM node_events ORDER BY 1") == [
        (1,),
        (2,),
    ]
    assert rows(tmp_path / "steps", "SELECT step FROM steps ORDER BY 1") == [(1,), (2,)]
    with recording(tmp_path / "modules", modules="2"):
        train(small(), 1)
    for table in ("node_events", "module_calls"):
        assert rows(tmp_path / "modules", f"SELECT DISTINCT module_fqn FROM {table}") == [("2",)]
    for detail, present in (
        ("steps", {"steps", "backward_passes", "inputs", "optimizer_groups"}),
        ("params", {"parameters", "gradients"}),
        ("modules", {"module_calls"}),
        ("nodes", {"node_events", "node_tensors"}),
    ):
        with recording(tmp_path / f"detail-{detail}", detail=detail):
            train(small(), 1)
        tables = {
            p.name for p in (tmp_path / f"detail-{detail}").iterdir() if (p / "rank=00000").exists()
        }
        assert present <= tables
        if detail != "steps":
            points = rows(
                tmp_path / f"detail-{detail}",
                "SELECT point, count(*) FROM gradients GROUP BY 1 ORDER BY 1",
            )
            assert points == [("final", 4), ("local", 4)], detail


def test_pause_and_given_steps_are_obeyed(tmp_path: Path) -> None:
    net = small()
    with recording(tmp_path / "run"):
        gradtrace_recorder.step(100)
        train(net, 1)
        with gradtrace_recorder.pause():
            train(net, 1)
        gradtrace_recorder.step(200)
        gradtrace_recorder.note("labels", torch.arange(4))
        train(net, 1)
    assert rows(tmp_path / "run", "SELECT step, count(*) FROM backward_passes GROUP BY 1 ORDER BY 1"
                ) == [(100, 1), (200, 1)]  # fmt: skip
    assert rows(tmp_path / "run", "SELECT step, name, numel FROM inputs WHERE root IS NULL"
                ) == [(200, "labels", 4)]  # fmt: skip


def test_inputs_are_named_by_the_parameters_of_forward(tmp_path: Path) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: torch.Tensor, batch: dict[str, Any], *, mask: torch.Tensor) -> Any:
            return self.layer(x * batch["scale"] * mask)

    with recording(tmp_path / "run"):
        Takes()(torch.ones(2, 3), {"scale": torch.ones(3)}, mask=torch.ones(3)).sum().backward()
    assert rows(tmp_path / "run", "SELECT name, shape FROM inputs ORDER BY 1") == [
        ("batch.scale", [3]),
        ("mask", [3]),
        ("x", [2, 3]),
    ]


def test_graph_thrown_away_is_freed_and_nothing_is_kept_alive(tmp_path: Path) -> None:
    net = small()
    with recording(tmp_path / "run"):
        kept = []
        for turn in range(6):
            x = torch.randn(5, 3, requires_grad=True)
            y = net(x)
            loss = y.square().sum()
            if turn % 2:
                loss.backward()
            kept += [weakref.ref(t) for t in (x, y, loss)]
            del x, y, loss
        gc.collect()
        assert [ref for ref in kept if ref() is not None] == []
        module = weakref.ref(net)
        del net
        gc.collect()
        assert module() is None


def test_models_are_copied_saved_and_loaded_as_without_us(tmp_path: Path) -> None:
    net = small()
    with recording(tmp_path / "run"):
        train(net, 2)
        twin = copy.deepcopy(net)
        again = pickle.loads(pickle.dumps(net))
        torch.save(net, io.BytesIO())
        train(twin, 1)
        train(again, 1)
    for parameter in net.parameters():
        assert not parameter._post_accumulate_grad_hooks
        assert not parameter._backward_hooks
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert rows(tmp_path / "run", "SELECT DISTINCT root FROM module_calls ORDER BY 1"
                ) == [(0,), (1,), (2,)]  # fmt: skip


def test_hooks_of_the_job_keep_their_order_and_their_effect(tmp_path: Path) -> None:
    def job() -> tuple[list[str], list[torch.Tensor]]:
        net: Any = small()
        log: list[str] = []

        def logged(what: str, factor: float | None) -> Any:
            def hook(*args: Any) -> Any:
                log.append(what)
                return None if factor is None else factor * args[-1]

            return hook

        net[0].weight.register_hook(logged("tensor", 2.0))
        net[0].weight.register_post_accumulate_grad_hook(logged("accumulated", None))
        net[2].register_forward_hook(logged("forward", 3.0))
        net[2].register_full_backward_hook(logged("backward", None))
        net(torch.ones(5, 3)).sum().backward()
        return log, [p.grad.clone() for p in net.parameters() if p.grad is not None]

    bare = job()
    with recording(tmp_path / "run"):
        seen = job()
    assert seen[0] == bare[0]
    assert all(torch.equal(a, b) for a, b in zip(bare[1], seen[1], strict=True))


def test_modes_of_the_job_see_none_of_our_operations(tmp_path: Path) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counts(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.seen: list[str] = []

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen.append(str(function))
            return function(*args, **(kwargs or {}))

    def job() -> list[str]:
        net, x = small(), torch.randn(5, 3)
        with Counts() as counts:
            net(x).square().mean().backward()
        return list(counts.seen)

    bare = job()
    with recording(tmp_path / "run"):
        assert job() == bare
    assert rows(tmp_path / "run", "SELECT count(*) > 5 FROM node_events") == [(True,)]


def _computes_inside_transforms() -> bool:
    plain = torch.ones(2, 2)

    def reads(x: torch.Tensor) -> torch.Tensor:
        (plain @ plain).tolist()
        return x

    try:
        torch.func.vmap(torch.func.grad(reads))(torch.ones(2))
    except RuntimeError:
        return False
    return True


def test_functorch_and_compiled_code_run_as_without_us(tmp_path: Path) -> None:
    net = small()
    parameters: dict[str, torch.Tensor] = dict(net.named_parameters())

    def loss(values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.func.functional_call(net, values, (x,)).square().mean()
        return out

    x = torch.randn(4, 5, 3)
    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    bare = per_sample(parameters, x)
    # Inside a transform torch 2.6 computes nothing with plain tensors: what we cannot summarise there is counted.
    with recording(tmp_path / "run", strict=_computes_inside_transforms()):
        seen = per_sample(parameters, x)
    assert all(torch.equal(bare[name], seen[name]) for name in bare)


def test_our_own_failure_closes_its_source_and_the_job_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradtrace_recorder.summaries.summariser import Summariser

    def fails(self: Summariser, gradient: torch.Tensor) -> None:
        raise RuntimeError("ours")

    with recording(tmp_path / "run", strict=False, observer="python"):
        net = small()
        train(net, 1)
        monkeypatch.setattr(Summariser, "of_gradient", fails)
        train(net, 2)
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "the recorder's backward source failed and records no more" in said
    assert rows(tmp_path / "run", "SELECT max(step) FROM module_calls") == [(2,)]
    ((problems,),) = rows(tmp_path / "run", "SELECT problems FROM ranks")
    assert "RuntimeError: ours" in problems


def test_nothing_of_a_session_outlives_stop(tmp_path: Path) -> None:
    with recording(tmp_path / "run"):
        train(small(), 1)
        session = bootstrap.current_session()
        assert session is not None and session.gate.recording is not None
        held = [weakref.ref(part) for part in (session, session.modules, session.gate.recording)]
        del session
    gc.collect()
    assert [ref() for ref in held] == [None] * 3


def test_recording_says_once_a_second_that_it_lives_and_its_journal_goes_with_it(
    tmp_path: Path,
) -> None:
    with recording(tmp_path / "run"):
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
        [journal] = (tmp_path / "run" / "journals").iterdir()
        began = read_journal(journal.read_bytes()).header["heartbeat_ns"]
        deadline = time.monotonic() + 10
        while (header := read_journal(journal.read_bytes()).header)["heartbeat_ns"] == began:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert 0.5e9 < header["heartbeat_ns"] - began < 11e9
    assert list((tmp_path / "run" / "journals").iterdir()) == []
