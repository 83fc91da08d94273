"""The summary by torch operations against the reference: the same fingerprint, whatever the tensor's form."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradtrace_recorder.summaries.torch_ops import BLOCK, TorchSummary
from gradtrace_schemas.summary import CHUNK, reference_summary, signed

FULL = TorchSummary(norms_only=False)
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
SIZES = [1, 2, 15, 17, 1000, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 5, BLOCK + 7]


def made(dtype: torch.dtype, count: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=draw).bool()
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(-100 if dtype.is_signed else 0, 100, (count,), generator=draw).to(
            dtype
        )
    return torch.randn(count, generator=draw, dtype=dtype if dtype.is_complex else None).to(dtype)


def as_numpy(tensor: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    return tensor.contiguous().numpy()


def fingerprint(tensor: torch.Tensor, offset: int = 0) -> int:
    return FULL.numbers(tensor, offset)[5]


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_are_those_of_the_reference(dtype: torch.dtype, count: int) -> None:
    tensor = made(dtype, count)
    norm, abs_max, total, nans, infs, got, sketch = FULL.numbers(tensor)
    if dtype == torch.bfloat16:
        expected = reference_summary(tensor.float().numpy())
        bits = reference_summary(tensor.view(torch.int16).numpy())
        assert got == bits.fingerprint
    else:
        expected = reference_summary(as_numpy(tensor))
        assert got == expected.fingerprint
    scale = max(expected.norm, 1e-30)
    assert abs(norm - expected.norm) <= 1e-6 * scale
    assert abs_max == pytest.approx(expected.abs_max, rel=1e-7)
    assert abs(total - expected.sum) <= 1e-5 * scale
    assert (nans, infs) == (expected.nan_count, expected.inf_count)
    assert np.abs(np.array(sketch) - expected.sketch).max() <= 2e-6 * scale


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t.contiguous(),
    "transposed": lambda t: t.t().contiguous().t(),
    "padded rows": lambda t: torch.nn.functional.pad(t, (0, 3))[:, :-3],
    "every second column": lambda t: torch.repeat_interleave(t, 2, dim=1)[:, ::2],
    "copied": lambda t: t.clone(),
    "negated lazily": lambda t: torch._neg_view(-t),
}


@pytest.mark.parametrize("shape", [(3, 5), (700, 33), (90, 5000), (2, 400_000), (1, 7), (0, 4)])
@pytest.mark.parametrize("form", FORMS)
def test_strides_change_no_fingerprint(form: str, shape: tuple[int, int]) -> None:
    plain = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    other = FORMS[form](plain)
    assert torch.equal(other, plain)
    assert fingerprint(other) == fingerprint(plain)


def test_expanded_tensor_is_read_without_being_made_whole() -> None:
    expanded = torch.tensor([1.5]).expand(4000, 3000)
    assert fingerprint(expanded) == fingerprint(expanded.contiguous())


def test_thread_count_changes_no_fingerprint() -> None:
    tensor = torch.randn(1_000_003)
    alone = fingerprint(tensor)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert fingerprint(tensor) == alone
    finally:
        torch.set_num_threads(before)


def test_summaries_on_two_threads_at_once_are_those_of_one() -> None:
    tensors = [torch.randn(5000 + n) for n in range(40)]
    alone = [FULL.numbers(t) for t in tensors]
    found: dict[int, object] = {}

    def work(first: int) -> None:
        for n in range(first, 40, 2):
            found[n] = FULL.numbers(tensors[n])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[n] for n in range(40)] == alone


@settings(deadline=None, max_examples=40)
@given(count=st.integers(1, 3 * CHUNK), offset=st.integers(0, 3 * CHUNK), wide=st.booleans())
def test_offset_places_a_shard_in_its_whole(count: int, offset: int, wide: bool) -> None:
    dtype = torch.float64 if wide else torch.float32
    whole = made(dtype, offset + count, seed=count)
    got = FULL.numbers(whole[offset:], offset)
    expected = reference_summary(whole[offset:].numpy(), offset)
    assert got[5] == expected.fingerprint
    np.testing.assert_allclose(got[6], expected.sketch, atol=3e-6 * max(1, expected.norm))
    assert signed(got[5] + fingerprint(whole[:offset])) == fingerprint(whole)


@settings(deadline=None, max_examples=40)
@given(
    values=st.lists(
        st.sampled_from([0.0, -0.0, 1e38, -1e38, 1e-38, 1e-45, 2.5, float("nan"), float("inf")]),
        min_size=1,
        max_size=40,
    )
)
def test_extreme_and_non_finite_values_are_counted_and_left_out(values: list[float]) -> None:
    array = np.array(values, np.float32)
    norm, abs_max, total, nans, infs, _, _ = FULL.numbers(torch.from_numpy(array))
    expected = reference_summary(array)
    assert (nans, infs) == (expected.nan_count, expected.inf_count)
    assert norm == pytest.approx(expected.norm, rel=1e-5, abs=1e-300)
    assert abs_max == expected.abs_max
    assert total == pytest.approx(expected.sum, rel=1e-5, abs=1e32)


def test_sketch_is_linear() -> None:
    a, b = torch.randn(20_000), torch.randn(20_000)
    left = np.array(FULL.numbers(2 * a + b)[6])
    right = 2 * np.array(FULL.numbers(a)[6]) + np.array(FULL.numbers(b)[6])
    np.testing.assert_allclose(left, right, atol=1e-5 * float((2 * a + b).norm()))


def test_norms_alone_leave_out_fingerprint_and_sketch() -> None:
    got = TorchSummary(norms_only=True).numbers(torch.tensor([3.0, 4.0]))
    assert got == (5.0, 4.0, 7.0, 0, 0, 0, (0.0,) * 16)
