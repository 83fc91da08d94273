"""The laws of a tensor summary, on its reference implementation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradtrace_schemas.summary import (
    CHUNK,
    lanes,
    multipliers,
    projection,
    reference_summary,
    signed,
    weights,
)


def test_weights_are_odd_and_no_two_are_equal() -> None:
    assert (weights() % 2 == 1).all() and len(np.unique(weights())) == CHUNK
    assert (multipliers(0, 1000) % 2 == 1).all()


def test_every_place_of_a_chunk_has_one_lane_and_every_lane_as_many_places() -> None:
    assert np.bincount(lanes()).tolist() == [CHUNK // 16] * 16
    assert (np.abs(projection()).sum(1) == 1).all()


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(1, 9000),
    place=st.integers(0, 10**9),
    bit=st.integers(0, 31),
    seed=st.integers(0, 1000),
)
def test_any_changed_bit_changes_the_fingerprint(
    count: int, place: int, bit: int, seed: int
) -> None:
    values = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    changed = values.copy()
    changed.view(np.uint32)[place % count] ^= np.uint32(1 << bit)
    assert reference_summary(values).fingerprint != reference_summary(changed).fingerprint


@settings(deadline=None, max_examples=40)
@given(count=st.integers(2, 9000), a=st.integers(0, 10**9), b=st.integers(0, 10**9))
def test_swapping_two_elements_changes_the_fingerprint(count: int, a: int, b: int) -> None:
    values = np.arange(count, dtype=np.float64)
    swapped = values.copy()
    swapped[[a % count, b % count]] = values[[b % count, a % count]]
    same = a % count == b % count
    assert (reference_summary(values).fingerprint == reference_summary(swapped).fingerprint) is same


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_swapping_numbers_that_differ_only_in_sign_changes_the_fingerprint(dtype: type) -> None:
    # The difference is the highest bit alone: times an even difference of 64-bit weights it would vanish.
    values: Any = np.ones(300, dtype)
    swapped = values.copy()
    values[7], swapped[200] = -1, -1
    assert reference_summary(values).fingerprint != reference_summary(swapped).fingerprint


@settings(deadline=None, max_examples=30)
@given(count=st.integers(1, 20_000), cut=st.integers(0, 20_000))
def test_fingerprints_and_sketches_of_shards_add_up_to_those_of_the_whole(
    count: int, cut: int
) -> None:
    values = np.random.default_rng(count).standard_normal(count)
    cut = min(cut, count)
    whole = reference_summary(values)
    left, right = reference_summary(values[:cut]), reference_summary(values[cut:], offset=cut)
    assert whole.fingerprint == signed(left.fingerprint + right.fingerprint)
    added = np.array(left.sketch) + np.array(right.sketch)
    np.testing.assert_allclose(whole.sketch, added, atol=1e-9 * max(1.0, whole.norm))


def test_numbers_are_those_of_the_finite_elements() -> None:
    got = reference_summary(np.array([3.0, np.nan, -4.0, np.inf, -np.inf], np.float32))
    assert (got.norm, got.abs_max, got.sum) == (5.0, 4.0, -1.0)
    assert (got.nan_count, got.inf_count, got.numel) == (1, 2, 5)


@pytest.mark.parametrize("kind", ["dense", "one column", "one row", "rank one", "block", "long"])
def test_sketches_estimate_the_distance_between_tensors(kind: str) -> None:
    """The standard error is stated as 0.18: structured changes must not be worse than chance allows."""
    errors = []
    for seed in range(150):
        draw = np.random.default_rng(seed)
        rows, columns = (64, 1024) if kind == "long" else (96, 512)
        a = draw.standard_normal((rows, columns))
        change = np.zeros_like(a)
        if kind in ("dense", "long"):
            change = draw.standard_normal(a.shape)
        elif kind == "one column":
            change[:, seed % columns] = draw.standard_normal(rows)
        elif kind == "one row":
            change[seed % rows] = draw.standard_normal(columns)
        elif kind == "rank one":
            change = np.outer(draw.standard_normal(rows), draw.standard_normal(columns))
        else:
            change[10:20, 30:60] = 1.0
        sketches = [np.array(reference_summary(x).sketch) for x in (a, a + change)]
        estimate = np.linalg.norm(sketches[1] - sketches[0])
        errors.append(estimate / np.linalg.norm(change) - 1)
    spread = float(np.std(errors))
    print(f"{kind}: standard error {spread:.3f}, mean {np.mean(errors):.3f}")
    assert spread < 0.27
