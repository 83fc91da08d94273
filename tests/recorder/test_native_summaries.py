"""Summaries by the native library against torch's."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradtrace_recorder.observers.native.build import library
from gradtrace_recorder.summaries.native import NativeSummary
from gradtrace_recorder.summaries.torch_ops import TorchSummary
from gradtrace_schemas.summary import reference_summary
from support.recordings.in_process import recording, rows

pytestmark = pytest.mark.usefixtures("native_library")


DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
VECTORS = (2, 1, 0)  # AVX-512, AVX2, none; less where the processor has less


@pytest.fixture
def every_vectors() -> Iterator[Callable[[], Iterator[Any]]]:
    """The library, told to use each kind of vectors in turn."""

    def each() -> Iterator[Any]:
        for wanted in VECTORS:
            found = library()
            found.use_vectors(wanted)
            yield found

    yield each
    library().use_vectors(2)


def test_summaries_of_chosen_shapes(every_vectors: Callable[[], Iterator[Any]]) -> None:
    """Those that the code treats each in a way of its own, and are too large to be drawn often."""
    torch.manual_seed(0)
    views = []
    for dtype in DTYPES:
        flat = torch.randn(200_000).to(dtype)
        odd = flat.clone()
        odd[70_000:70_003] = torch.tensor([torch.nan, torch.inf, -torch.inf]).to(dtype)
        for one in (flat, odd):
            views += [
                one[:1].expand(30, 400).T,  # one element
                one[70_000].expand(13_000),  # the same, and NaN
                one[: 300 * 520].view(300, 520).T,
                one[1 : 300 * 519 + 1].view(300, 519).T,  # rows that begin within a group
                one[: 130 * 31].view(130, 31).T,
                one[: 31 * 5000].view(5000, 31).T,  # rows of several chunks
                one[: 2 * 4 * 5 * 12 * 13].view(2, 12, 13, 4, 5).permute(0, 3, 4, 1, 2),
                one[: 20 * 24 * 26].view(24, 26, 20).permute(2, 1, 0),
                one[: 130 * 140].view(130, 140)[:, ::2],
                one[: 130 * 140].view(130, 140)[::2, ::3].T,
                one[: 2 * 3 * 90 * 80].view(2, 90, 80, 3).permute(0, 3, 1, 2),
                one[: 3 * 5000].view(5000, 3).T,
                one[: 4 * 33 * 24].view(4, 33, 3, 8).permute(0, 2, 1, 3),  # rows of heads
                one[: 7 * 130 * 51].view(7, 130, 51).transpose(0, 1),
                one[:300, None].expand(300, 140),
                one[None, :300].expand(140, 300),
                one[: 60 * 500].view(60, 500)[:, 3:490],
            ]
    assert_those_of_torch(views, every_vectors)


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**40))
def test_summaries_are_those_of_torch(
    every_vectors: Callable[[], Iterator[Any]], seed: int
) -> None:
    """Of any shape, strides, place in memory and bits."""
    draw = random.Random(seed)
    assert_those_of_torch([drawn_tensor(draw) for _ in range(4)], every_vectors)


def drawn_tensor(draw: random.Random) -> torch.Tensor:
    """At most 30,000 elements in up to 7 dimensions, in any order in memory, with gaps, or lying on each other."""
    sizes: list[int] = []
    for _ in range(draw.randint(0, 7)):
        most = 30_000 // math.prod([max(1, size) for size in sizes])
        largest = draw.choice([2, 5, 40, 300, 6000])
        sizes.append(0 if draw.random() < 0.01 else draw.randint(1, max(1, min(most, largest))))
    strides, step = [0] * len(sizes), draw.choice([1, 1, 1, 2, 3, 9])
    for d in draw.sample(range(len(sizes)), len(sizes)):
        strides[d] = 0 if draw.random() < 0.05 else step
        grown = step * max(1, sizes[d]) + draw.choice([0, 0, 0, 1, 5])
        step = step if strides[d] == 0 or grown > 200_000 else grown
    offset = draw.randint(0, 20)
    last = sum(max(0, n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
    values = drawn_values(draw, offset + last + 1)
    return torch.as_strided(values, sizes, strides, offset)


def drawn_values(draw: random.Random, count: int) -> torch.Tensor:
    """Small and large numbers, or any bits, or odd numbers among others."""
    dtype = draw.choice(DTYPES)
    torch.manual_seed(draw.getrandbits(32))
    values: torch.Tensor = (torch.randn(count) * 10 ** draw.choice([-3, 0, 3])).to(dtype)
    kind = draw.choice(["plain", "plain", "bits", "odd", "mostly odd"])
    if kind == "bits":
        words = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
        values = words.view(dtype)
        if dtype == torch.float64:  # of larger ones no square is a number
            values = torch.where(values.abs().log2().abs() < 400, values, 0.0)
    elif kind != "plain":
        info = torch.finfo(dtype)
        odd = [torch.nan, torch.inf, -torch.inf, -0.0, 0.0, info.tiny, info.smallest_normal / 4]
        if dtype != torch.float64:
            odd += [info.max, info.min]
        chosen = torch.tensor(odd, dtype=dtype)[torch.randint(0, len(odd), (count,))]
        values = torch.where(torch.rand(count) < (0.001 if kind == "odd" else 0.8), chosen, values)
    return values


def assert_those_of_torch(
    tensors: list[torch.Tensor], every_vectors: Callable[[], Iterator[Any]]
) -> None:
    """Equal bits, counts and largest magnitudes; norm, sum and sketch within 1e-6 of the norm of exact ones."""
    ways = {whole: TorchSummary(norms_only=not whole) for whole in (True, False)}
    expected = [
        (ways[True].numbers(one), ways[False].numbers(one), exact_numbers(one)) for one in tensors
    ]
    for found in every_vectors():
        for one, (full, norms, (norm, total, sketch)) in zip(tensors, expected, strict=True):
            said = f"{one.dtype} {tuple(one.shape)} {one.stride()}"
            got, got_norms = found.summary(one, True), found.summary(one, False)
            assert (got[1], got[3:6]) == (full[1], full[3:6]), said
            assert (got_norms[1], got_norms[3:]) == (norms[1], norms[3:]), said
            near = 1e-6 * norm if norm > 1e-30 else 1e-36
            assert got[:3:2] == got_norms[:3:2], said
            assert got[0] == pytest.approx(norm, abs=near), said
            assert got[2] == pytest.approx(total, abs=near), said
            assert got[6] == pytest.approx(sketch, abs=near), said


def exact_numbers(tensor: torch.Tensor) -> tuple[float, float, tuple[float, ...]]:
    """Norm, sum and sketch in float64, by the reference; the sketch as far as float32 has it."""
    exact = reference_summary(tensor.double().numpy())
    most = float(torch.finfo(torch.float32).max)
    return exact.norm, exact.sum, tuple(min(max(lane, -most), most) for lane in exact.sketch)


def test_what_is_no_plain_tensor_is_left_to_torch() -> None:
    found = library()
    plain = torch.ones(3)
    others = [
        plain.int(), plain.to_sparse(), plain.to("meta"), torch._neg_view(plain),
        torch.ones(3, dtype=torch.complex64),
    ]  # fmt: skip
    assert [found.summary(other, True) for other in others] == [None] * len(others)
    gone = torch.ones(100)
    gone.untyped_storage().resize_(0)
    assert found.summary(gone, True) is None
    assert torch.vmap(lambda x: x * (1 if found.summary(x, True) is None else 0))(plain).sum() == 3


def odd_list() -> list[torch.Tensor]:
    """Small and large, of several dtypes and strides, with what is not finite, and what no library knows."""
    torch.manual_seed(0)
    broken = torch.randn(40)
    broken[3:9:2] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    return [
        torch.randn(3, 5), torch.randn(70, 90).t(), torch.randn(9000), broken, torch.randn(7).bfloat16(),
        torch.randn(5).half(), torch.randn(6).double(), torch.arange(9), torch.randn(3, dtype=torch.complex64),
        torch.empty(0), torch.tensor(2.5), torch.full((8,), 1e-20), torch._neg_view(torch.randn(4)),
    ]  # fmt: skip


@pytest.mark.parametrize("norms_only", [False, True])
def test_a_list_is_summarised_as_each_of_it(norms_only: bool) -> None:
    """Bit by bit, whether by torch's operations or in one call of the library."""
    tensors = odd_list()
    for way in (
        TorchSummary(norms_only=norms_only),
        NativeSummary(library(), norms_only=norms_only),
    ):
        assert way.each(tensors) == [way.numbers(tensor) for tensor in tensors]
        assert way.each([]) == []


def test_the_value_of_a_scalar_is_read_as_torch_reads_it() -> None:
    found = library()
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        for value in (0.1, -3e-5, float("inf")):
            one = torch.full((1, 1), value, dtype=dtype, requires_grad=True)
            assert found.scalar(one) == float(one.detach())
    others = [
        torch.ones(2),
        torch.tensor(1),
        torch.ones(1).to_sparse(),
        torch.ones(1, device="meta"),
    ]
    assert [found.scalar(other) for other in others] == [None] * len(others)


def recorded_backward(
    folder: Path, change: Callable[[torch.Tensor], object]
) -> dict[str, dict[str, Any]]:
    """The rows of a pass through products and, between them, views and a transposed one, by Node.

    `change` is done to the gradients that views get, after the Nodes that made them were recorded.
    """
    torch.manual_seed(0)
    weight = torch.randn(12, 20, requires_grad=True)
    with recording(folder, observer="native"):
        viewed = (weight * 1.5).view(20, 12)
        lengthened = (viewed @ torch.eye(12)).unsqueeze(0)
        product = lengthened.transpose(1, 2) * 2.5
        viewed.register_hook(change)
        lengthened.register_hook(change)
        product.backward(torch.randn(1, 12, 20))
    columns = ["node_name"] + [
        f"grad_{side}_{what}" for side in ("output", "input") for what in ("fingerprint", "abs_max")
    ]
    found = rows(folder, f"SELECT {', '.join(columns)} FROM node_events ORDER BY event_index")
    names = ["last", "transpose", "unsqueeze", "mm", "view", "first", "weight"]
    assert len(found) == len(names)
    return {
        name: dict(zip(columns, row, strict=True)) for name, row in zip(names, found, strict=True)
    }


def make_larger_unseen(gradient: torch.Tensor) -> None:
    """Change it past torch: its version stays, so that only who reads it again can tell."""
    gradient.numpy()[...] *= 10


def make_larger(gradient: torch.Tensor) -> None:
    """The same in torch's sight."""
    gradient.mul_(10)


def test_what_is_handed_on_unchanged_is_not_summarised_again(tmp_path: Path) -> None:
    """By the Node that gets it, and by a view's, whose gradient is the same memory in the same order."""
    nodes = recorded_backward(tmp_path, make_larger_unseen)
    for maker, view in (("transpose", "unsqueeze"), ("mm", "view")):
        made = nodes[maker]["grad_input_fingerprint"]
        assert nodes[view]["grad_output_fingerprint"] == made
        assert nodes[view]["grad_input_fingerprint"] == made
    assert nodes["mm"]["grad_output_fingerprint"] == nodes["unsqueeze"]["grad_input_fingerprint"]
    said = nodes["mm"]["grad_input_abs_max"]
    assert nodes["first"]["grad_input_abs_max"] == pytest.approx(15 * said)  # it was changed
    last, turned = nodes["last"]["grad_input_fingerprint"], nodes["transpose"]
    assert turned["grad_output_fingerprint"] == last != turned["grad_input_fingerprint"]


def test_a_gradient_that_is_changed_in_place_is_summarised_again(tmp_path: Path) -> None:
    nodes = recorded_backward(tmp_path, make_larger)
    for maker, view in (("transpose", "unsqueeze"), ("mm", "view")):
        made, got = nodes[maker], nodes[view]
        assert got["grad_output_abs_max"] == pytest.approx(10 * made["grad_input_abs_max"])
        assert got["grad_input_abs_max"] == got["grad_output_abs_max"]
        assert got["grad_input_fingerprint"] == got["grad_output_fingerprint"]
        assert got["grad_input_fingerprint"] != made["grad_input_fingerprint"]
