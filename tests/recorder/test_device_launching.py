"""Which way a summary is made: Triton's kernel once it is ready, torch's operations before, and where it fails."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from gradtrace_recorder.summaries.device.launching import Launches
from gradtrace_recorder.summaries.device.readiness import Readiness
from gradtrace_recorder.summaries.device.rows import TICKET, WORDS, arrived, as_summaries
from gradtrace_recorder.summaries.torch_ops import TorchSummary
from gradtrace_schemas.summary import STATE_FULL
from support.devices.host_device import HostSurroundings

HAS_TRITON = importlib.util.find_spec("triton") is not None
FULL = TorchSummary(norms_only=False)


class Bench:
    """Launches on the host, and what they left."""

    def __init__(self) -> None:
        self.rows = torch.zeros((256, WORDS), dtype=torch.int64)
        self.said: list[str] = []
        self.launches = Launches(torch.device("cpu"), HostSurroundings(), self.rows)
        self.launches.begin(self.have_arrived, self.said.append)
        self.ticket = 0

    def have_arrived(self, tickets: Any) -> bool:
        asked = np.array(tickets, np.int64)
        return bool(arrived(self.rows.numpy()[asked % 256], asked).all())

    def next(self) -> int:
        self.ticket += 1
        return self.ticket

    def check(self, ticket: int | None, tensor: torch.Tensor) -> None:
        assert ticket is not None
        row = self.rows.numpy()[[ticket % 256]]
        assert arrived(row, np.array([ticket]))[0]
        assert as_summaries(row, STATE_FULL)[0]["fingerprint"] == FULL.numbers(tensor)[5]

    def one(self, tensor: torch.Tensor) -> None:
        ticket = self.next()
        self.launches.launch(tensor, ticket)
        self.check(ticket, tensor)

    def until_ready(self, what: Any) -> None:
        deadline = time.monotonic() + 60
        while not self.launches.readiness.is_ready(what):
            if any("outside of the scope of a kernel" in text for text in self.said):
                pytest.skip("this Triton (3.2) interprets no kernel that calls functions")
            assert time.monotonic() < deadline and not self.said, self.said
            time.sleep(0.01)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.launches.stop()


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def test_without_triton_torchs_operations_do_it_and_one_line_says_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # as where it is not installed
    for name in ("triton_rows", "kernel"):
        monkeypatch.delitem(sys.modules, f"gradtrace_recorder.summaries.device.{name}", False)
        package = sys.modules["gradtrace_recorder.summaries.device"]
        monkeypatch.delattr(package, name, raising=False)
    deadline = time.monotonic() + 30
    while not bench.said and time.monotonic() < deadline:
        bench.one(torch.randn(50))
        bench.one(torch.randn(4, 5).t().bfloat16())
    assert len(bench.said) == 1
    assert "torch's operations" in bench.said[0] and "triton" in bench.said[0]
    several = [torch.randn(3), torch.ones(2)]
    given = bench.launches.launch_many(several, bench.next)
    for ticket, tensor in zip(given, several, strict=True):
        bench.check(ticket, tensor)
    assert len(bench.said) == 1


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed (pip install triton)")
def test_a_kernel_that_is_ready_is_used_and_others_are_asked_for(
    bench: Bench, interpreter: None
) -> None:
    bench.one(torch.randn(50))
    bench.until_ready((torch.float32, False, False))
    triton = bench.launches._triton
    assert triton is not None
    used: list[Any] = []
    launch, many = triton.launch, triton.launch_many
    triton.launch = lambda *args: (used.append(args[0].dtype), launch(*args))[1]  # type: ignore[method-assign, func-returns-value]
    triton.launch_many = lambda *args: (used.append(len(args[0])), many(*args))[1]  # type: ignore[method-assign, func-returns-value]
    bench.one(torch.randn(50))
    bench.one(torch.randn(50).half())  # not yet: it is asked for meanwhile
    bench.one(torch.arange(5))  # no kernel reads integers
    assert used == [torch.float32]
    bench.until_ready((torch.float16, False, False))
    bench.until_ready((torch.float32, True, False))
    bench.until_ready((torch.float32, False, True))
    several = [torch.randn(7), torch.randn(3, 4).t(), torch.randn(2), torch.randn(5).half()]
    given = bench.launches.launch_many(several, bench.next)
    for ticket, tensor in zip(given, several, strict=True):
        bench.check(ticket, tensor)
    assert used == [torch.float32, 2, torch.float32, torch.float16]


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed (pip install triton)")
def test_a_kernel_that_fails_in_use_is_given_up_for_good(bench: Bench, interpreter: None) -> None:
    bench.one(torch.randn(50))
    bench.until_ready((torch.float32, False, False))

    def broken(*args: Any) -> None:
        raise OSError("no kernel image is available")

    triton = bench.launches._triton
    assert triton is not None
    triton.launch = broken  # type: ignore[assignment, method-assign]
    for _ in range(3):
        bench.one(torch.randn(50))
    assert len(bench.said) == 1 and "no kernel image is available" in bench.said[0]


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed (pip install triton)")
def test_a_device_does_not_use_the_interpreter(bench: Bench, interpreter: None) -> None:
    """It would copy the device's tensors to the host."""
    bench.launches._surroundings.interprets = lambda: False  # type: ignore[method-assign]
    while not bench.said:
        bench.one(torch.randn(50))
    assert "TRITON_INTERPRET" in bench.said[0]


def test_a_recording_after_another_finds_its_launcher_again(bench: Bench) -> None:
    bench.one(torch.arange(4))
    bench.launches.stop()
    said: list[str] = []
    bench.launches.begin(bench.have_arrived, said.append)
    bench.one(torch.arange(4))
    assert bench.rows[bench.ticket % 256, TICKET] == bench.ticket


def test_what_is_asked_for_is_prepared_once_and_elsewhere() -> None:
    threads: list[str] = []
    readiness = Readiness(lambda what: threads.append(threading.current_thread().name), print)
    deadline = time.monotonic() + 30
    while not all(readiness.is_ready(what) for what in ("a", "b")):
        assert time.monotonic() < deadline
    readiness.stop()
    assert threads == ["gradtrace-kernels"] * 2


def test_the_end_waits_for_what_is_being_prepared() -> None:
    """A thread that is still inside a compiler when Python ends would take the process down."""
    began, done = threading.Event(), threading.Event()

    def prepare(what: object) -> None:
        began.set()
        time.sleep(0.3)
        done.set()

    readiness = Readiness(prepare, print)
    readiness.is_ready("a")
    assert began.wait(10)
    readiness.stop()
    assert done.is_set() and not readiness.is_ready("b")


def test_a_failed_preparation_is_told_once_and_ends_all() -> None:
    told: list[Exception] = []

    def prepare(what: object) -> None:
        raise ValueError("no compiler")

    readiness = Readiness(prepare, told.append)
    deadline = time.monotonic() + 30
    while not told and time.monotonic() < deadline:
        assert not readiness.is_ready("a")
    readiness.give_up(ValueError("again"))
    assert not readiness.is_ready("b") and [str(e) for e in told] == ["no compiler"]
    readiness.stop()
