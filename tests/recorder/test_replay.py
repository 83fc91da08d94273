"""Nodes that are run a second time: the same bits, the job unchanged, and what disagrees with itself is named."""

from __future__ import annotations

import json
import random
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from gradtrace_analyzer.check.check import check
from gradtrace_analyzer.diff.compare import compare
from gradtrace_analyzer.reports.check import as_object as check_object
from gradtrace_analyzer.reports.diff.json_object import as_object as diff_object
from gradtrace_analyzer.runs.opening import open_run
from support.recordings.in_process import recording, rows
from support.recordings.known_modules import equal_bits

SAYS_ITS_HOOKS = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")


def called(function: Any, x: torch.Tensor) -> torch.Tensor:
    """A Function's result."""
    result: torch.Tensor = function.apply(x)
    return result


class Faulty(torch.autograd.Function):
    """Doubles. Its device flips the least bit of one number of the `when`-th gradient that leaves it."""

    when, count = 0, 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Faulty.count += 1
        given = gradient * 2
        if Faulty.count == Faulty.when:
            given.view(torch.int32).view(-1)[0] ^= 1
        return given


class Asks(torch.autograd.Function):
    """Draws a number, and asks autograd for another gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.detach())
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.requires_grad_()
            (inner,) = torch.autograd.grad((x * x).sum(), x)
        given: torch.Tensor = gradient + 0 * inner
        return given


class Draws(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.rand(()) * random.random() * float(numpy.random.rand())


class Model(nn.Module):
    """Many kinds of Nodes: random, recurrent, sparse, complex, views changed in place, both checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rare = nn.Embedding(20, 16), nn.Embedding(20, 16, sparse=True)
        self.lstm, self.gru = nn.LSTM(16, 16), nn.GRU(16, 16, dropout=0.3, num_layers=2)
        self.conv, self.batch, self.layer = (
            nn.Conv1d(16, 16, 3),
            nn.BatchNorm1d(16),
            nn.LayerNorm(16),
        )
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.4)
        self.linear, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x) + self.rare(x)
        h = self.gru(self.lstm(h)[0])[0]
        h = self.layer(self.batch(self.conv(h.permute(1, 2, 0))).permute(2, 0, 1))
        h = self.block(F.gelu(self.linear(h)))
        h = checkpoint(self.linear, h, use_reentrant=False)
        h = h + checkpoint(self.linear, h, use_reentrant=True)
        h = h.clone()
        h[0] = h[1] * 2
        h[2:].mul_(0.5)
        h = called(Draws, torch.index_add(h, 0, torch.tensor([0, 0, 1]), h[:3]))
        z = torch.fft.fft(h.cumsum(0).sort(0).values)
        scores: torch.Tensor = self.head(F.softmax((z * z.conj()).real, -1))
        return scores


def trained(place: Path | None, replay: str = "*", model: type[nn.Module] = Model) -> list[Any]:
    """Losses, parameters and the generators' states after two steps, one of them under autocast."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    net, losses = model(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x, labels = torch.randint(0, 20, (6, 5)), torch.zeros(20, dtype=torch.long)

    def steps() -> None:
        for step in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=step == 1):
                loss = F.cross_entropy(net(x).flatten(0, 1).float(), labels)
                loss.backward()  # under autocast too: torch's engine takes it over
            losses.append(loss.detach())
            optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if place is None:
            steps()
        else:
            with recording(place, replay=replay):
                steps()
    others = (random.getstate(), numpy.random.get_state(legacy=False)["state"]["key"].tolist())
    return [losses, list(net.parameters()), torch.get_rng_state(), *others]


def skipped(place: Path) -> dict[str, int]:
    """What was chosen and not run again, by reason."""
    ((text,),) = rows(place, "SELECT replay_skipped FROM ranks")
    found: dict[str, int] = json.loads(text)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bare` training is equal to what was recorded with replays of C++ Nodes, and with those of Functions too."""
    place = tmp_path_factory.mktemp("replays")
    bare = trained(None)
    for name, replay in (("nodes", "*"), ("functions", "*,python:*")):
        assert equal_bits(bare, trained(place / name, replay)), f"{name}: training was changed"
    return place


def test_nodes_of_many_kinds_give_the_same_bits_again_and_training_is_unchanged(runs: Path) -> None:
    counts = dict(rows(runs / "nodes", "SELECT replay_equal, count(*) FROM node_events GROUP BY 1"))
    assert set(counts) == {True, None} and counts[True] > 250
    reasons = skipped(runs / "nodes")
    assert sum(reasons.values()) == counts[None]
    # Where a saved tensor does not say that it has hooks, the run again calls them.
    hooked = {"saved tensors with hooks": 2} if SAYS_ITS_HOOKS else {}
    assert {
        "uses up what it saved": 2,
        **hooked,
        "a Function of the job's (ask for it with python:)": 4,
    }.items() <= reasons.items()
    assert "accumulates a gradient" in reasons


def test_functions_are_run_again_on_request_and_draw_nothing_from_the_job(runs: Path) -> None:
    found = rows(runs / "functions", "SELECT node_name, replay_equal FROM node_events WHERE "
        "node_name IN ('DrawsBackward', 'CheckpointFunctionBackward') ORDER BY ALL")  # fmt: skip
    # A Function that draws gives another result: the generators are the job's afterwards, not before.
    assert found == [("CheckpointFunctionBackward", None)] * 2 + [("DrawsBackward", False)] * 2
    assert skipped(runs / "functions")["ran a backward pass inside"] == 2


@pytest.fixture
def several_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_nondeterministic_kernel_is_named(tmp_path: Path, several_threads: None) -> None:
    """On several threads the backward of indexing adds with atomics, in whatever order they come."""
    torch.manual_seed(0)
    table = nn.Embedding(64, 64)
    index, weight = torch.randint(0, 4, (20_000,)), torch.randn(20_000, 64)
    with recording(tmp_path, replay="IndexBackward*,MulBackward0"):
        for _ in range(3):
            (table.weight[index] * weight).sum().backward()
    answer = check_object(check(open_run(tmp_path)))
    (found,) = [v for v in answer["violations"] if v["law"] == "replays_equal"]
    assert (answer["verdict"], found["node_name"], found["severity"]) == (
        "violated",
        "IndexBackward0",
        "error",
    )
    assert 0 < found["relative_error"] < 1e-4
    assert rows(tmp_path, "SELECT DISTINCT replay_equal, replay_error FROM node_events "
        "WHERE node_name = 'MulBackward0'") == [(True, None)]  # fmt: skip


class Flipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(called(Faulty, self.words(x)))[:4]
        return scores


def test_flipped_bit_is_found_and_diff_says_that_the_node_disagrees_with_itself(
    tmp_path: Path,
) -> None:
    for name, when in (("sound", 0), ("faulty", 3)):  # the third: the second step's first run
        Faulty.when, Faulty.count = when, 0
        trained(tmp_path / name, "python:FaultyBackward", Flipping)
    answer = check_object(check(open_run(tmp_path / "faulty")))
    (found,) = [v for v in answer["violations"] if v["law"] == "replays_equal"]
    assert (found["step"], found["rank"], found["node_name"], found["count"]) == (
        1,
        0,
        "FaultyBackward",
        1,
    )
    assert answer["judged"]["replays_equal"] == 2 and 0 < found["relative_error"] < 1e-6
    told = diff_object(compare(open_run(tmp_path / "sound"), open_run(tmp_path / "faulty")))
    first = told["first_divergence"]
    assert (first["step"], first["node_name"]) == (1, "FaultyBackward")
    sound, faulty = first["replays"]
    assert (sound["side"], sound["equal"], sound["apart_count"]) == ("baseline", True, 0)
    assert (faulty["equal"], faulty["run_count"], faulty["apart_count"]) == (False, 2, 1)
    assert "The Node disagrees with itself" in told["explanation"]
    assert "in 1 of 2 runs of the candidate, here (by " in told["explanation"]


def given(body: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
    """The body, with a leaf that is new each time."""
    return lambda: body(torch.ones(3, requires_grad=True))


def _changing(backward: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], None]:
    """A job whose Function gives on what this makes of the gradient that came in."""

    def body(x: torch.Tensor) -> None:
        class Mutates(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x * 1

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                return backward(gradient)

        (called(Mutates, x) * 1).sum().backward()

    return body


def _tripled_through_numpy(gradient: torch.Tensor) -> torch.Tensor:
    """Through memory that NumPy shares: the gradient's version stays."""
    gradient.numpy()[:] *= 3
    return gradient.clone()


def _hooked(x: torch.Tensor) -> None:
    y = x * 2
    assert y.grad_fn is not None
    y.grad_fn.register_hook(lambda grad_inputs, grad_outputs: (grad_inputs[0] * 5, None))
    y.sum().backward()
    assert x.grad is not None and x.grad[0] == 10


def _mode(x: torch.Tensor) -> None:
    with FlopCounterMode(display=False):
        (x * 2).sum().backward()


def _create_graph(x: torch.Tensor) -> None:
    torch.autograd.grad((x * x).sum(), x, create_graph=True)


def _saved_on_cpu(x: torch.Tensor) -> None:
    with torch.autograd.graph.save_on_cpu():
        y = x.exp()
    y.sum().backward()


def _view(x: torch.Tensor) -> None:
    """A Function that changes a view in place is hidden in another Node."""

    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            counted.append(1)
            return gradient * 2

    counted: list[int] = []
    y = x * 1
    called(Doubles, y[1:])
    y.sum().backward()
    assert len(counted) == 1


def _asks(x: torch.Tensor) -> None:
    called(Asks, x).sum().backward()


def _second(x: torch.Tensor) -> None:
    """The hook of a second pass over a kept graph is none of the job's."""
    y = x.exp().sum()
    y.backward(retain_graph=True)
    y.backward()


@pytest.mark.parametrize(
    ("body", "reason", "count"),
    [
        (_changing(lambda gradient: gradient.mul_(3)), "changed what came in", 1),
        (_changing(_tripled_through_numpy), "changed what came in", 1),
        (_hooked, "a hook of the job's may have replaced what it gave", 1),
        (_mode, "a mode of the job's is on", 2),
        (_create_graph, "under create_graph", 2),
        (_saved_on_cpu, "saved tensors with hooks", 1),
        (_asks, "ran a backward pass inside", 1),
        (_second, "none", 0),
    ],
)
def test_what_cannot_be_run_twice_is_skipped_and_counted(
    body: Callable[[torch.Tensor], None], reason: str, count: int, tmp_path: Path
) -> None:
    with recording(tmp_path, replay="*,python:*"):
        given(body)()
    assert not rows(tmp_path, "SELECT * FROM node_events WHERE NOT replay_equal")
    if reason == "saved tensors with hooks" and not SAYS_ITS_HOOKS:
        pytest.skip("a saved tensor of this torch does not say whether it has hooks")
    found = {k: n for k, n in skipped(tmp_path).items() if k != "accumulates a gradient"}
    assert found == ({reason: count} if count else {})


def test_function_inside_a_changed_view_is_run_again_on_request_alone(tmp_path: Path) -> None:
    with recording(tmp_path, replay="*"):
        given(_view)()
    assert skipped(tmp_path)["changes a view in place (ask for it with python:)"] == 1


def test_what_another_thread_draws_meanwhile_is_drawn_once(tmp_path: Path) -> None:
    net, x, drawn, ends = nn.Linear(300, 300), torch.randn(1000, 300), [], threading.Event()

    def draw() -> None:
        while not ends.is_set():
            drawn.append(torch.randn(4))

    thread = threading.Thread(target=draw)
    with recording(tmp_path, replay="*"):
        thread.start()
        for _ in range(10):
            net(x).sum().backward()
        ends.set()
        thread.join()
    assert len({tuple(one.tolist()) for one in drawn}) == len(drawn)


def test_globs_choose_by_module_and_by_name_and_steps_limit_them(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(net.parameters())
    with recording(tmp_path, replay="2,Relu*@1:"):
        for _ in range(3):
            net(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    found = rows(tmp_path, "SELECT DISTINCT step, module_fqn, node_name FROM node_events "
        "WHERE replay_equal ORDER BY ALL")  # fmt: skip
    names = [("1", "ReluBackward0"), ("2", "AddmmBackward0"), ("2", "TBackward0")]
    assert found == [(step, *name) for step in (1, 2) for name in names]


def test_what_a_function_calls_when_it_is_run_again_leaves_no_rows(tmp_path: Path) -> None:
    inner, asked = nn.Linear(3, 3), []

    class Calls(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            inner(gradient)  # without a graph, as reversible networks do
            asked.append(1)
            if len(asked) == 2:
                leaf = torch.ones(1, requires_grad=True)
                with torch.enable_grad():
                    torch.autograd.grad(leaf.exp(), leaf)
            return gradient * 2

    class Outer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return called(Calls, x)

    with recording(tmp_path, replay="python:*"):
        Outer()(torch.ones(3, requires_grad=True)).sum().backward()
    assert len(asked) == 2
    assert rows(tmp_path, "SELECT count(*) FROM module_calls WHERE module_class = 'Linear'") == [
        (1,)
    ]
    assert rows(tmp_path, "SELECT count(*) FROM backward_passes") == [(1,)]
    assert rows(
        tmp_path, "SELECT replay_equal FROM node_events WHERE node_name = 'CallsBackward'"
    ) == [(True,)]


def test_profiler_of_the_job_sees_no_second_run(tmp_path: Path) -> None:
    def ops() -> list[str]:
        with torch.profiler.profile() as seen:
            torch.ones(3, requires_grad=True).exp().sum().backward()
        return [e.name for e in seen.events() if "ExpBackward0" in e.name]

    bare = ops()
    with recording(tmp_path, replay="*", summary="off"):
        assert ops() == bare
    assert rows(tmp_path, "SELECT count(*) FROM node_events WHERE replay_equal") == [(2,)]
