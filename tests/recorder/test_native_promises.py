"""What docs/internals/native.md promises of memory, interrupts and waiting, beyond the rows."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradtrace_recorder.observers.native import build, record_layouts
from gradtrace_recorder.observers.native.build import library
from gradtrace_recorder.state import naming
from gradtrace_recorder.state.attribution import Attribution
from gradtrace_recorder.summaries.summariser import Summariser
from support.recordings.in_process import rank_of, recording, rows

pytestmark = pytest.mark.usefixtures("native_library")


class OutOfTime(Exception):
    """What a job's own handler raises."""


def out_of_time(*_: Any) -> None:
    raise OutOfTime


@pytest.mark.parametrize(
    ("handler", "expected"),
    [(signal.default_int_handler, KeyboardInterrupt), (out_of_time, OutOfTime)],
)
def test_what_a_signal_handler_raises_inside_a_hook_reaches_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: Any, expected: type[BaseException]
) -> None:
    """It comes while Python is asked about a sparse gradient; it ends that pass, and the recording goes on."""
    real, interrupted = Summariser.of_gradient, [False]

    def slow(self: Summariser, gradient: torch.Tensor) -> Any:
        if gradient.is_sparse and not interrupted[0]:
            interrupted[0] = True
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(100):
                pass
        return real(self, gradient)

    table, layer = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4)
    monkeypatch.setattr(Summariser, "of_gradient", slow)
    before = signal.signal(signal.SIGINT, handler)
    try:
        with recording(tmp_path / "run", observer="native"):
            with pytest.raises(expected):
                layer(table(torch.tensor([1]))).sum().backward()
            assert layer.weight.grad is not None and table.weight.grad is None
            layer(table(torch.tensor([1]))).sum().backward()
    finally:
        signal.signal(signal.SIGINT, before)
    found = rows(tmp_path / "run", "SELECT error FROM backward_passes ORDER BY record_index")
    assert str(found[0][0]).startswith(expected.__name__) and found[1] == (None,)
    assert rank_of(tmp_path / "run")["problems"] == []


def test_an_interrupt_while_hooks_are_put_on_leaves_no_pass_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every later pass would seem to run beside it, and be left to Python."""
    layer = nn.Linear(4, 4)
    with recording(tmp_path / "run", observer="native"):
        loss = layer(torch.ones(2, 4)).sum()
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Attribution, "mark_running", _interrupted)
            loss.backward()
        loss.backward()
    assert rank_of(tmp_path / "run")["observer"]["python_passes"] == {}
    assert rows(tmp_path / "run", "SELECT count(*) FROM backward_passes") == [(1,)]


def _interrupted(self: Attribution) -> None:
    raise KeyboardInterrupt


def test_names_of_models_that_are_gone_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def names() -> int:
        return sum(type(one) is naming.ParameterName for one in gc.get_objects())

    monkeypatch.setattr(naming, "_ROOTS_BETWEEN_CLEARINGS", 16)
    gc.collect()
    before = names()  # of models that other tests of this process keep
    with recording(tmp_path / "run", observer="native", summary="off"):
        for _ in range(400):
            nn.Linear(1, 1)(torch.ones(1, 1)).sum().backward()
        held = names() - before
    assert held < 500  # of 800


def test_a_gradient_lives_no_longer_than_without_us(tmp_path: Path) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []
    x = torch.ones(1000, requires_grad=True)
    with recording(tmp_path / "run", observer="native"):
        y = x * 2
        y.register_hook(lambda g: seen.append(weakref.ref(g)))
        loss = (y * torch.arange(1000.0)).sum()
        x.register_hook(lambda g: alive.append(seen[0]() is not None))
        loss.backward()
    assert alive == [False]


def test_memory_of_passes_is_used_again(tmp_path: Path) -> None:
    def own_bytes() -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("RssAnon:")[2].split()[0])  # without the journal's pages

    with recording(tmp_path / "run", observer="native", summary="off"):
        for count in range(300):
            if count == 140:  # both halves of the journal were drained
                before = own_bytes()
            x = torch.ones(1, requires_grad=True)
            for _ in range(500):
                x = x * 2
            x.sum().backward()
        assert own_bytes() - before < 10 << 20  # their states alone are 20 MB


class Saved:
    """What a graph keeps in place of a tensor that it saves."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()

    def unpacked(self) -> torch.Tensor:
        return self.tensor


def test_nodes_that_die_with_hooks_on_them_take_nothing_along(tmp_path: Path) -> None:
    """A pass is over while another one runs: its hooks stay on until later, and its graph dies on a third thread, with
    all that it had saved."""
    layer, saved = nn.Linear(4, 4), list[weakref.ref[Saved]]()
    started, over = threading.Event(), threading.Event()

    def pack(tensor: torch.Tensor) -> Saved:
        one = Saved(tensor)
        saved.append(weakref.ref(one))
        return one

    def wait(_: torch.Tensor) -> None:
        started.set()
        over.wait(60)

    def beside() -> None:
        other = torch.ones(2, requires_grad=True) * 2
        other.register_hook(wait)
        other.sum().backward()

    def begin_another(_: torch.Tensor) -> None:
        thread.start()
        started.wait(60)

    thread = threading.Thread(target=beside)
    with recording(tmp_path / "run", observer="native"):
        with torch.autograd.graph.saved_tensors_hooks(pack, Saved.unpacked):
            hidden = layer(torch.ones(2, 4)).exp()
        hidden.register_hook(begin_another)
        graphs = [hidden.sum()]
        del hidden
        graphs[0].backward(retain_graph=True)
        third = threading.Thread(target=graphs.clear)
        third.start()
        third.join()
        assert saved and not any(one() for one in saved)
        over.set()
        thread.join()
        layer(torch.ones(2, 4)).sum().backward()
    account = rank_of(tmp_path / "run")["observer"]
    assert account["python_passes"] == {"inside or beside another pass": 1}
    assert rows(tmp_path / "run", "SELECT count(*), count(error) FROM backward_passes") == [(3, 0)]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_hooks_of_a_failed_pass_stay_on_where_a_device_may_still_read_them(
    tmp_path: Path, device: str
) -> None:
    """The engine returns when one thread fails, and does not wait for the others. The hooks do nothing."""

    def fails(_: torch.Tensor) -> None:
        raise ValueError("on purpose")

    layer = nn.Linear(4, 4)
    with recording(tmp_path / "run", observer="native"):
        nn.Linear(1, 1, device=device)(
            torch.empty(1, 1, device=device)
        )  # so that is the job's device
        out = layer(torch.ones(2, 4))
        hook = out.register_hook(fails)
        leaf = next(node for node, _ in out.grad_fn.next_functions if node is not None)
        with pytest.raises(ValueError, match="on purpose"):
            out.sum().backward(retain_graph=True)
        assert library().traits(leaf) == (False, True, False, int(device == "meta"))
        hook.remove()
        out.sum().backward()
        del out, leaf
    count = "SELECT backward_index, count(DISTINCT event_index), count(*) FROM node_events GROUP BY 1 ORDER BY 1"
    assert rows(tmp_path / "run", count) == [(0, 1, 1), (1, 5, 5)]


@pytest.mark.skipif(
    not hasattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy"),
    reason="this torch (2.6) refuses compiled autograd inside a pass, and ends the process, also bare",
)
def test_a_compiled_backward_inside_a_pass_is_not_disturbed(tmp_path: Path) -> None:
    """Both share a parameter's Node, and compiled autograd asks every hook there."""
    from torch._dynamo import compiled_autograd

    weight = nn.Parameter(torch.ones(3))

    def compiled(_: torch.Tensor) -> None:
        with torch.enable_grad(), compiled_autograd._enable(torch.compile(backend="eager")):
            (weight * 3).sum().backward()

    with recording(tmp_path / "run", observer="native"):
        out = weight * 2
        out.register_hook(compiled)
        out.sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [5.0] * 3


_WAITING = """
import sys, threading, time
from pathlib import Path
import torch
from gradtrace_recorder.observers.native.build import library
from gradtrace_recorder.observers.native.journal import NativeJournal
from gradtrace_schemas.journal import KINDS, NULL_INT32

journal = NativeJournal(library(), Path(sys.argv[1]), rank=0, attempt=0, wall_start_ns=1, monotonic_start_ns=2)
taken, written = threading.Event(), threading.Event()

def hold():
    with journal.lock:
        taken.set()
        written.wait()

place = (1, journal.string("act"), 0, 0, 0, 0, NULL_INT32)  # names are what the lock is for
holder = threading.Thread(target=hold)
holder.start()
taken.wait()
journal.move(7, 10, place)
assert journal.place_of(7) is place
journal.release(journal.hold(KINDS["groups"], *[0] * 11))
written.set()
holder.join()
journal.close(remove=True)
"""


def test_python_cannot_hold_what_hooks_wait_for(tmp_path: Path) -> None:
    """Under `lock` others still write; the core has no entry to its own. In a process that would hang otherwise."""
    command = [sys.executable, "-c", _WAITING, str(tmp_path / "journal")]
    subprocess.run(command, check=True, timeout=60, env={**os.environ, "GRADTRACE_DIR": ""})
    assert not hasattr(library().Journal(), "__enter__")


def test_a_library_that_was_built_for_other_records_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is compiled in must be what the schemas say: else it would be written past the ends of records."""
    built = build.built_library()
    assert built is not None
    monkeypatch.setattr(record_layouts, "digest", lambda: "of other records")
    assert build.built_library() is None
    monkeypatch.setattr(build, "built_library", lambda: built)
    with pytest.raises(ImportError, match="built for other records"):
        library()
