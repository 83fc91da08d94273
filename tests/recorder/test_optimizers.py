"""What is recorded of optimizers: of closures, of several in a step, of those that hold others, of skipped ones."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.recordings.in_process import recording, rows
from support.recordings.with_and_without import both


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def loss_of(net: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = net(torch.randn(5, 3)).square().mean()
    return loss


def closure_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(net)
        loss.backward()
        return loss

    return closure


class Watched(torch.optim.SGD):
    """Says with which gradients it was left after its closure."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.saw: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        first = self.param_groups[0]["params"][0]
        self.saw.append(float(first.grad.norm()))
        super().step()
        return result


FINAL = (
    "SELECT step, backward_index, norm FROM gradients WHERE point = 'final' AND "
    "parameter_fqn = '0.weight' ORDER BY ALL"
)
GROUPS = (
    "SELECT step, optimizer_index, optimizer_class, wrapper_class, learning_rate FROM optimizer_groups "
    "ORDER BY ALL"
)
ENDS = "SELECT step, backward_count, ended_by, skipped FROM steps ORDER BY step"


@pytest.mark.parametrize("passes_before", [0, 2])
def test_gradients_that_a_closure_leaves_are_what_the_optimizer_saw(
    passes_before: int, tmp_path: Path
) -> None:
    """Also in the first step, where the optimizer's step is the first event of all."""
    net = small()
    optimizer = Watched(net.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        loss = loss_of(net)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        return loss

    with recording(tmp_path / "run"):
        for _ in range(2):
            for _ in range(passes_before):
                loss_of(net).backward()
            optimizer.step(closure)
            optimizer.zero_grad()
    last = passes_before
    assert rows(tmp_path / "run", FINAL) == [
        (step, last, pytest.approx(saw)) for step, saw in enumerate(optimizer.saw)
    ]
    assert rows(tmp_path / "run", GROUPS) == [(s, 0, "Watched", None, 0.1) for s in (0, 1)]
    assert rows(tmp_path / "run", ENDS) == [
        (step, passes_before + 1, "optimizer", False) for step in (0, 1)
    ]


def test_forward_and_backward_of_a_closure_are_no_time_of_the_optimizer(tmp_path: Path) -> None:
    net = small()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with recording(tmp_path / "run"):
        for _ in range(3):
            optimizer.step(closure_of(net, optimizer))
    found = rows(
        tmp_path / "run",
        "SELECT optimizer_ns, forward_ns + backward_ns, end_ns - start_ns FROM steps",
    )
    assert all(min(own, passes) > 0 and own + passes <= whole for own, passes, whole in found)


def test_closure_is_the_jobs_own_in_all_that_an_optimizer_sees(tmp_path: Path) -> None:
    """Its name, signature, attributes, what it returns and raises; and nothing of it is kept."""
    seen: dict[str, Any] = {}

    class Curious(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen["name"], seen["signature"] = closure.__qualname__, inspect.signature(closure)
            seen["mark"] = closure.mark
            return closure(scale=2)

    net = small()
    optimizer = Curious(net.parameters(), lr=0.1)

    def closure(scale: int = 1) -> object:
        if seen.get("raise"):
            raise KeyError("mine")
        return given

    closure.mark = "a mark"  # type: ignore[attr-defined]
    expected = closure.__qualname__, inspect.signature(closure)
    given = object()
    with recording(tmp_path / "run"):
        loss_of(net).backward()
        assert optimizer.step(closure) is given
        assert (seen["name"], seen["signature"], seen["mark"]) == (*expected, "a mark")
        seen["raise"] = True
        with pytest.raises(KeyError, match="mine"):
            optimizer.step(closure=closure)
        kept = weakref.ref(closure)
        seen["signature"] = None
        del closure, expected
        gc.collect()
        assert kept() is None
        optimizer.zero_grad()
        loss_of(net).backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert rows(tmp_path / "run", "SELECT problems FROM ranks") == [("[]",)]


def test_lbfgs_is_one_step_of_many_passes_each_of_which_it_saw(tmp_path: Path) -> None:
    net = small()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    with recording(tmp_path / "run"):
        for _ in range(2):
            optimizer.step(closure_of(net, optimizer))
    assert rows(tmp_path / "run", ENDS) == [(step, 3, "optimizer", False) for step in (0, 1)]
    assert [row[:2] for row in rows(tmp_path / "run", FINAL)] == [
        (step, call) for step in (0, 1) for call in range(3)
    ]
    assert [row[:3] for row in rows(tmp_path / "run", GROUPS)] == [(0, 0, "LBFGS"), (1, 0, "LBFGS")]


@pytest.mark.parametrize("kind", ["lbfgs", "closure", "two"])
def test_bits_are_equal(kind: str, tmp_path: Path) -> None:
    def job(net: Any, watch: Any) -> Any:
        kinds: dict[str, Any] = {
            "lbfgs": lambda: [torch.optim.LBFGS(net.parameters(), lr=0.1, line_search_fn="strong_wolfe")],
            "closure": lambda: [torch.optim.Adam(net.parameters(), lr=0.1)],
            "two": lambda: [
                torch.optim.SGD([p for p in net.parameters() if p.ndim == 2], lr=0.1),
                torch.optim.AdamW([p for p in net.parameters() if p.ndim == 1], lr=0.1),
            ],
        }  # fmt: skip
        optimizers = kinds[kind]()
        losses = []
        with watch:
            for _ in range(3):
                if kind == "two":
                    losses.append(loss_of(net))
                    losses[-1].backward()
                    for optimizer in optimizers:
                        optimizer.step()
                else:
                    losses.append(optimizers[0].step(closure_of(net, optimizers[0])))
        return [loss.detach() for loss in losses]

    both(small, job, tmp_path / "run", watched=False)


def test_every_optimizer_of_a_step_has_its_groups_and_gradients(tmp_path: Path) -> None:
    net = small()
    first = torch.optim.SGD(net[0].parameters(), lr=0.1)
    second = torch.optim.AdamW(net[2].parameters(), lr=0.01)
    with recording(tmp_path / "run"):
        for _ in range(2):
            loss_of(net).backward()
            first.step()
            second.step()
    assert rows(tmp_path / "run", GROUPS) == [
        (step, *one) for step in (0, 1) for one in ((0, "SGD", None, 0.1), (1, "AdamW", None, 0.01))
    ]
    for table in ("gradients WHERE point = 'final'", "parameters WHERE point = 'after'"):
        found = rows(
            tmp_path / "run", f"SELECT step, count(*) FROM {table} GROUP BY ALL ORDER BY ALL"
        )
        assert found == [(0, 4), (1, 4)]


class Container(torch.optim.Optimizer):
    """Many in one, as torchtitan has it: its own groups say nothing."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], steps: bool = True) -> None:
        self.optimizers = optimizers
        self.steps = steps
        super().__init__(
            [p for one in optimizers for g in one.param_groups for p in g["params"]], {}
        )

    def step(self, closure: Any = None) -> Any:
        for one in self.optimizers if self.steps else ():
            one.step()


class Lookahead(torch.optim.Optimizer):
    """Shares the groups of what it wraps, and moves the parameters once more."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner = optimizer
        super().__init__(optimizer.param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.5)
        return loss


class Known(torch.optim.SGD):
    """Knows what wraps it."""

    around: Any = None


class Mutual(Lookahead):
    """Is known by what it wraps."""

    def __init__(self, optimizer: Known) -> None:
        super().__init__(optimizer)
        optimizer.around = self


class Plain:
    """No optimizer of torch's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()


def test_of_a_wrapper_what_it_holds_is_recorded(tmp_path: Path) -> None:
    def sgd(net: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), lr=0.1)

    ways: dict[str, Callable[[Any], Any]] = {
        "Container": lambda net: Container([sgd(net[0]), sgd(net[2])]),
        "Lookahead": lambda net: Lookahead(sgd(net)),
        "Mutual": lambda net: Mutual(Known(net.parameters(), lr=0.1)),
        "Plain": lambda net: Plain(sgd(net)),
    }
    for name, make in ways.items():
        net = small()
        optimizer = make(net)
        with recording(tmp_path / name):
            for _ in range(2):
                loss_of(net).backward()
                optimizer.step()
        inner = range(2 if name == "Container" else 1)
        assert rows(tmp_path / name, GROUPS) == [
            (step, index, "Known" if name == "Mutual" else "SGD", name, 0.1)
            for step in (0, 1)
            for index in inner
        ], name
        finals = rows(
            tmp_path / name,
            "SELECT step, count(*) FROM gradients WHERE point = 'final' GROUP BY 1 ORDER BY 1",
        )
        assert finals == [(0, 4), (1, 4)], name
        left = rows(
            tmp_path / name,
            "SELECT a.norm = b.norm FROM parameters a JOIN parameters b ON b.step = a.step + 1 AND "
            "a.parameter_fqn = b.parameter_fqn AND a.point = 'after' AND b.point = 'before'",
        )
        assert left == [(True,)] * 4, f"{name}: after is what the outermost left"


def test_container_whose_optimizers_step_in_backward_adds_nothing(tmp_path: Path) -> None:
    net = small()
    each = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: each[p].step())
    container = Container(list(each.values()), steps=False)
    with recording(tmp_path / "run"):
        for _ in range(2):
            loss_of(net).backward()
            container.step()
    found = rows(
        tmp_path / "run",
        "SELECT step, optimizer_class, count(*), count(DISTINCT optimizer_index) FROM optimizer_groups "
        "GROUP BY ALL ORDER BY ALL",
    )
    assert found == [(0, "SGD", 4, 4), (1, "SGD", 4, 4)]
    assert rows(tmp_path / "run", ENDS) == [(step, 1, "optimizer", False) for step in (0, 1)]


def test_subclass_that_calls_its_base_is_one_optimizer(tmp_path: Path) -> None:
    torch.optim.SGD(small().parameters(), lr=1.0)  # from now on SGD.step calls the hooks too
    net = small()
    optimizer = Watched(net.parameters(), lr=0.1)
    with recording(tmp_path / "run"):
        loss_of(net).backward()
        optimizer.step()
    assert rows(tmp_path / "run", GROUPS) == [(0, 0, "Watched", None, 0.1)]
    assert len(rows(tmp_path / "run", FINAL)) == 1


@pytest.mark.parametrize("fused", [False, True])
def test_optimizer_that_the_scaler_left_out_has_groups_and_gradients(
    fused: bool, tmp_path: Path
) -> None:
    """A fused one is called all the same, and leaves the parameters alone by itself."""
    net = small()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with recording(tmp_path / "run"):
        for factor in (1.0, float("inf")):
            optimizer.zero_grad()
            scaler.scale(loss_of(net) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
    ended = "optimizer" if fused else "scaler"
    assert rows(tmp_path / "run", ENDS) == [(0, 1, "optimizer", False), (1, 1, ended, True)]
    assert [row[:3] for row in rows(tmp_path / "run", GROUPS)] == [(0, 0, "AdamW"), (1, 0, "AdamW")]
    bad = "SELECT step, sum(nan_count + inf_count) > 0 FROM gradients WHERE point = 'final' GROUP BY 1 ORDER BY 1"
    assert rows(tmp_path / "run", bad) == [(0, False), (1, True)]


def test_learning_rates_of_each_parameter_are_recorded(tmp_path: Path) -> None:
    net = small()

    class Own(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad)

    optimizer = Own(net.parameters(), {"lr": [0.1, 0.2, 0.3, 0.4]})
    with recording(tmp_path / "run"):
        loss_of(net).backward()
        optimizer.step()
    ((rate, others),) = rows(
        tmp_path / "run", "SELECT learning_rate, hyperparameters FROM optimizer_groups"
    )
    assert rate is None and '"lr": [0.1, 0.2, 0.3, 0.4]' in others
