"""Rows that a device leaves: by torch's operations and by Triton's kernel, equal to the summary on the CPU.

The kernel runs under Triton's interpreter here, which shows that its arithmetic is right; that it is right on a
device, where programs run at once, scripts/gpu-check shows.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradtrace_recorder.summaries.device.rows import TORN, WORDS, arrived, as_summaries
from gradtrace_recorder.summaries.device.torch_rows import TooLarge, TorchRows
from gradtrace_recorder.summaries.torch_ops import TorchSummary
from gradtrace_schemas.summary import CHUNK, STATE_FULL, reference_summary

FULL = TorchSummary(norms_only=False)
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
CPU = torch.device("cpu")
NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed: its kernel is not run here (pip install triton)",
)


class Launcher(Protocol):
    def launch(self, tensor: torch.Tensor, ticket: int) -> None: ...


class Rows:
    """Memory for rows, and what stands in it."""

    def __init__(self) -> None:
        self.memory = torch.zeros((64, WORDS), dtype=torch.int64)
        self.ticket = 0

    def next(self) -> int:
        self.ticket += 1
        return self.ticket

    def have_arrived(self, tickets: Any) -> bool:
        asked = np.array(tickets, np.int64)
        return bool(arrived(self.memory.numpy()[asked % 64], asked).all())

    def of(self, ticket: int) -> Any:
        row = self.memory.numpy()[[ticket % 64]]
        assert arrived(row, np.array([ticket]))[0] and row[0, TORN] == 0
        return as_summaries(row, STATE_FULL)[0]

    def check(self, ticket: int, tensor: torch.Tensor) -> None:
        """The row holds what the CPU's path gives; its floating-point sums are held against exact ones, since those
        of torch in float32 are no better than 2e-6 where all elements are equal."""
        row = self.of(ticket)
        _, abs_max, _, nans, infs, fingerprint, _ = FULL.numbers(tensor)
        assert row["fingerprint"] == fingerprint
        assert (row["nan_count"], row["inf_count"], row["abs_max"]) == (nans, infs, abs_max)
        exact = reference_summary(tensor.double().numpy())
        scale = 1e-6 * exact.norm + 1e-300
        assert abs(row["norm"] - exact.norm) <= scale
        assert abs(row["sum"] - exact.sum) <= scale
        apart = [abs(a - b) for a, b in zip(row["sketch"].tolist(), exact.sketch, strict=True)]
        assert max(apart) <= scale


def tensors(dtype: torch.dtype, *, small: bool) -> Iterator[torch.Tensor]:
    """Of many forms: sizes around chunks, strides, values that are not finite or very small."""
    draw = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=draw, dtype=torch.float64) * 3).to(dtype)

    for count in (1, 17, CHUNK) if small else (1, 2, 17, CHUNK - 1, CHUNK, CHUNK + 1, 70_001):
        yield normal(count)
    yield normal(5, CHUNK)  # two programs
    whole = normal(66, 130)
    yield whole.t()
    yield whole[:, ::3]
    yield whole[2:3].expand(40, 130)
    yield whole[:60].view(6, 10, 130).permute(2, 0, 1)[1:]
    yield torch.as_strided(normal(3), (9000,), (0,))
    odd = normal(9, 11)
    odd[2, 3], odd[3, 3], odd[4, 4], odd[5, 5] = torch.nan, torch.inf, -torch.inf, -0.0
    odd[6, 6] = torch.finfo(dtype).smallest_normal / 4
    odd[7, 7] = torch.finfo(dtype).max
    yield odd if dtype not in (torch.float32, torch.float64) else odd.clamp(-1e15, 1e15)
    yield torch.full((10,), torch.nan, dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_torch_rows_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    rows = Rows()
    launcher = TorchRows(rows.memory, CPU)
    for tensor in tensors(dtype, small=False):
        ticket = rows.next()
        launcher.launch(tensor, ticket)
        rows.check(ticket, tensor)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64], ids=str
)
def test_torch_rows_know_every_dtype_of_the_cpu(dtype: torch.dtype) -> None:
    rows = Rows()
    launcher = TorchRows(rows.memory, CPU)
    whole = (torch.randn(130, 80, generator=torch.Generator().manual_seed(1)) * 9).to(dtype)
    odd = (whole.conj(), whole.conj().imag) if dtype.is_complex else ()
    for tensor in (whole, whole.t(), whole[:, :7], *odd):
        ticket = rows.next()
        launcher.launch(tensor, ticket)
        assert rows.of(ticket)["fingerprint"] == FULL.numbers(tensor)[5]
        assert rows.of(ticket)["norm"] == pytest.approx(FULL.numbers(tensor)[0], rel=1e-6)


def test_blocks_of_a_large_strided_tensor_are_in_logical_order() -> None:
    rows = Rows()
    tensor = torch.randn(1030, 1030, generator=torch.Generator().manual_seed(2)).t()
    TorchRows(rows.memory, CPU).launch(tensor, 1)
    rows.check(1, tensor)


def test_what_would_be_thousands_of_launches_is_refused() -> None:
    launcher = TorchRows(Rows().memory, CPU)
    with pytest.raises(TooLarge, match="too many"):
        launcher.launch(torch.zeros(1).expand(1 << 30), 1)


@pytest.fixture(scope="module")
def triton_rows() -> Iterator[Any]:
    """The module that launches kernels, with Triton's interpreter in the compiler's place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        from gradtrace_recorder.summaries.device import triton_rows as module

        yield module


def launcher_of(module: Any, rows: Rows) -> Any:
    return module.TritonRows(rows.memory, CPU, lambda: 0, rows.have_arrived)


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_kernels_rows_are_those_of_the_cpu(triton_rows: Any, dtype: torch.dtype) -> None:
    rows = Rows()
    launcher = launcher_of(triton_rows, rows)
    for tensor in tensors(dtype, small=True):
        assert launcher.variant(tensor) is not None
        ticket = rows.next()
        launcher.launch(tensor, ticket)
        rows.check(ticket, tensor)


@NEEDS_TRITON
@settings(max_examples=12, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    dtype=st.sampled_from(FLOATS),
    start=st.integers(0, 3),
    stride=st.integers(1, 3),
)
def test_the_kernel_reads_any_strides(
    triton_rows: Any, shape: list[int], order: Any, dtype: torch.dtype, start: int, stride: int
) -> None:
    rows = Rows()
    whole = torch.randn([n * stride + start for n in shape]).to(dtype)
    tensor = whole[tuple(slice(start, None, stride) for _ in shape)]
    axes = list(range(len(shape)))
    order.shuffle(axes)
    tensor = tensor.permute(axes)
    launcher = launcher_of(triton_rows, rows)
    launcher.launch(tensor, 7)
    rows.check(7, tensor)


@NEEDS_TRITON
def test_many_tensors_in_one_launch_leave_a_row_each(triton_rows: Any) -> None:
    rows = Rows()
    launcher = launcher_of(triton_rows, rows)
    some = [torch.randn(n).half() for n in (3, 5 * CHUNK, 1, 700, 4 * CHUNK + 1)]
    for turn in range(6):  # more than there are lists: they are used again
        tickets = launcher.launch_many(some, rows.next)
        assert len(tickets) == len(some)
        if turn in (0, 5):
            for ticket, tensor in zip(tickets, some, strict=True):
                rows.check(ticket, tensor)
        some = some[:3] if turn == 0 else some


@NEEDS_TRITON
def test_what_the_kernel_does_not_read_it_leaves_to_torch(triton_rows: Any) -> None:
    """Among others views whose signs are only marked: their bits are not those of their values."""
    launcher = launcher_of(triton_rows, Rows())
    marked = torch.randn(4, dtype=torch.complex64).conj().imag
    five = torch.zeros(4, 4, 4, 4, 4)[::2, ::2, ::2, ::2, ::2]
    for tensor in (marked, five, torch.arange(4), torch.zeros(4, dtype=torch.float8_e4m3fn)):
        assert launcher.variant(tensor) is None


@NEEDS_TRITON
def test_lists_that_the_device_has_yet_to_read_are_left_alone(triton_rows: Any) -> None:
    rows = Rows()
    launcher = triton_rows.TritonRows(rows.memory, CPU, lambda: 0, lambda tickets: False)
    tensors = [torch.ones(2), torch.ones(3)]
    taken = [len(launcher.launch_many(tensors, rows.next)) for _ in range(5)]
    assert taken == [2, 2, 2, 2, 0] and rows.ticket == 8


@NEEDS_TRITON
def test_a_launch_inside_another_takes_a_list_of_its_own(triton_rows: Any) -> None:
    """As by a signal handler of the job's, or on another thread with the same stream."""
    rows = Rows()
    launcher = launcher_of(triton_rows, rows)
    some, others = [torch.randn(5), torch.randn(70)], [torch.randn(9), torch.randn(30)]
    launcher.launch_many(others, rows.next)
    inner: list[int] = []

    def ticket() -> int:
        if not inner:
            inner.append(0)  # once
            inner[:] = launcher.launch_many(others, rows.next)
        return rows.next()

    outer = launcher.launch_many(some, ticket)
    for number, tensor in zip([*outer, *inner], some + others, strict=True):
        rows.check(number, tensor)
    workspace = launcher._workspaces[0]
    assert len(workspace.lists) == 2 and workspace.lists[0] is not workspace.lists[1]


@NEEDS_TRITON
def test_a_share_that_is_not_what_was_left_makes_the_row_torn(triton_rows: Any) -> None:
    """As if memory showed an older share of another program: the row says so, and is lost instead of wrong."""
    rows = Rows()
    from support.devices.share_kernel import finish

    launcher = launcher_of(triton_rows, rows)
    tensor = torch.randn(5 * CHUNK)
    launcher.launch(tensor, 1)
    rows.check(1, tensor)
    workspace = launcher._workspaces[0].partials
    length = len(workspace) // 24
    finish[(1,)](rows.memory[2], 1, workspace, length, 2, launcher._constants)
    assert rows.memory[2, TORN] == 0 and torch.equal(rows.memory[2], rows.memory[1])
    workspace[length + 1] += 1  # a NaN more in the second program's share
    finish[(1,)](rows.memory[2], 1, workspace, length, 2, launcher._constants)
    assert rows.memory[2, TORN] == 1


@NEEDS_TRITON
def test_streams_have_workspaces_of_their_own_up_to_a_bound(triton_rows: Any) -> None:
    from gradtrace_recorder.summaries.device.tables import NoWorkspace

    rows, stream = Rows(), [0]
    launcher = triton_rows.TritonRows(rows.memory, CPU, lambda: stream[0], rows.have_arrived)
    for number in range(triton_rows.MOST_STREAMS):
        stream[0] = number
        launcher._workspace()
    stream[0] = triton_rows.MOST_STREAMS
    with pytest.raises(NoWorkspace, match="more than"):
        launcher.launch(torch.ones(3), 1)


@NEEDS_TRITON
def test_the_kernels_compile_for_devices_without_one(tmp_path: Path) -> None:
    """To machine code of two generations, without warnings, with the atomic operation that the sum over programs
    rests on. In a process of its own: this one interprets."""
    script = Path(__file__).parents[1] / "support" / "devices" / "compiled_kernels.py"
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for line in done.stdout.splitlines():
        assert "acq_rel" in line and line.endswith("bytes"), line
    assert len(done.stdout.splitlines()) == 4


def test_nothing_warns_of_signalling_nans() -> None:
    bits = torch.tensor([0x7F800001, 0x7FC00000, 0x3F800000], dtype=torch.int32)
    rows = Rows()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TorchRows(rows.memory, CPU).launch(bits.view(torch.float32), 1)
    assert rows.of(1)["nan_count"] == 2
