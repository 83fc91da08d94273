"""Summaries by the native library against torch's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gradtrace_recorder.observers.native.build import CACHE_VARIABLE, library
from gradtrace_recorder.summaries.native import NativeSummary
from gradtrace_recorder.summaries.torch_ops import TorchSummary
from support import native


@pytest.fixture(scope="module", autouse=True)
def built() -> Iterator[None]:
    before = os.environ[CACHE_VARIABLE]
    native.build_or_skip()
    yield
    os.environ[CACHE_VARIABLE] = before


def test_summaries_are_those_of_torch() -> None:
    """Whatever the strides, with the processor's vectors and without."""
    found, reference = library(), TorchSummary(norms_only=False)
    torch.manual_seed(0)
    sizes = [
        (),
        (1,),
        (15,),
        (16,),
        (33,),
        (4095,),
        (4097,),
        (70, 130),
        (3, 4096),
        (0, 3),
        (9, 1, 40, 50),
    ]
    try:
        for vectors in (2, 1, 0):
            found.use_vectors(vectors)
            for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
                for size in sizes:
                    whole = torch.randn(size).to(dtype)
                    views = [whole, whole.mT, whole[::2, 1::3]] if whole.dim() == 2 else [whole]
                    views += (
                        [whole.permute(3, 1, 0, 2), whole[:1].expand(70, 1, 40, 50)]
                        if whole.dim() == 4
                        else []
                    )
                    if whole.numel() > 100:
                        odd = whole.clone()
                        odd.view(-1)[3:9:2] = torch.tensor([torch.nan, torch.inf, -torch.inf]).to(
                            dtype
                        )
                        views.append(odd)
                    for view in views:
                        assert_equal_numbers(found.summary(view, True), reference.numbers(view))
                tiny, huge = torch.finfo(dtype).tiny, torch.finfo(dtype).max
                for value in (0.0, -0.0, tiny, huge, 0.1):
                    same = torch.full((5000,), value, dtype=dtype)
                    got = found.summary(same, True)
                    assert (
                        got[1] == float(same.abs().max()) and got[5] == reference.numbers(same)[5]
                    )
                    exact = abs(float(same[0])) * 5000**0.5
                    assert got[0] == pytest.approx(exact, rel=1e-6) or dtype == torch.float64
    finally:
        found.use_vectors(2)


def assert_equal_numbers(got: Any, expected: Any) -> None:
    assert (got[1], got[3:6]) == (expected[1], expected[3:6])
    scale = 3e-6 * max(expected[0], 1e-30)
    assert got[0] == pytest.approx(expected[0], abs=scale)
    assert got[2] == pytest.approx(expected[2], abs=10 * scale)
    assert got[6] == pytest.approx(expected[6], abs=scale)


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
