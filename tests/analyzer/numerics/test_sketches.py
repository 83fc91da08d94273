"""What sketches tell of two tensors: how far apart they are, and what multiple one is of the other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gradtrace_analyzer.numerics.arrays import Side
from gradtrace_analyzer.numerics.sketches import (
    closest_multiple,
    distances,
    factor_between,
    is_same_factor,
    on_node_lanes,
    relative_error,
    relative_errors,
)


def summary(norm: float | None, sketch: list[float] | None = None, **more: Any) -> dict[str, Any]:
    return {"norm": norm, "sketch": sketch, "sum": 0.0, "nan_count": 0, "inf_count": 0, **more}


def test_relative_error_is_the_distance_of_sketches_over_the_larger_norm() -> None:
    a, b = summary(5.0, [3.0, 0, 0, 4]), summary(10.0, [0.0, 0, 0, 0])
    assert relative_error(a, b) == relative_error(b, a) == 0.5
    assert relative_error(a, a) == 0.0


def test_sketches_of_other_widths_leave_norms_and_sums() -> None:
    a, b = summary(4.0, [1.0] * 4, sum=1.0), summary(3.0, [1.0] * 16, sum=3.0)
    assert relative_error(a, b) == 2 / 4  # the sums are further apart than the norms
    assert relative_error(a, {**b, "sum": 1.5}) == 1 / 4
    assert relative_error(a, b, from_sketches_alone=True) is None


@pytest.mark.parametrize("count", ["nan_count", "inf_count"])
def test_error_between_other_counts_of_what_is_not_finite_is_none(count: str) -> None:
    a, b = summary(1.0, [1.0] * 4), summary(1.0, [1.0] * 4)
    b[count] = 1
    assert relative_error(a, b) is None
    a[count] = 1
    assert relative_error(a, b) == 0.0
    del a[count], b[count]  # where they were not recorded they are no difference
    assert relative_error(a, b) == 0.0


def test_nothing_against_nothing_has_no_error_but_where_a_sketch_must_tell() -> None:
    a, b = summary(0.0, [0.0] * 4), summary(None)
    assert relative_error(a, b) == 0.0
    assert relative_error(a, b, from_sketches_alone=True) is None


def side(norms: list[float], sketches: list[list[float] | None]) -> Side:
    count = len(norms)
    columns = {
        "fingerprint": pa.array([1] * count, pa.int64()),
        "norm": pa.array(norms, pa.float64()),
        "numel": pa.array([4] * count, pa.int64()),
        "sketch": pa.array(sketches, pa.list_(pa.float32())),
    }
    return Side(pa.table({f"x_{name}": column for name, column in columns.items()}), "x_")


def test_errors_of_columns_are_those_of_their_rows() -> None:
    draw = np.random.default_rng(0)
    lanes = [draw.standard_normal((50, 16)).astype(np.float32) for _ in "ab"]
    norms = [np.abs(draw.standard_normal(50)) for _ in "ab"]
    norms[0][7] = norms[1][7] = 0.0
    sides = [side(n.tolist(), x.tolist()) for n, x in zip(norms, lanes, strict=True)]
    errors, has = relative_errors(sides, np.ones(50, bool))
    expected = [
        relative_error(
            *(summary(n[row], x[row].tolist()) for n, x in zip(norms, lanes, strict=True))
        )
        for row in range(50)
    ]
    assert has.all() and errors[7] == 0.0
    np.testing.assert_allclose(errors, np.array(expected, float), rtol=1e-14)


def test_rows_without_a_sketch_of_one_width_are_told() -> None:
    a, b = (side([1.0, 1.0], [[1.0] * 4, other]) for other in ([1.0] * 4, None))
    errors, has = relative_errors([a, b], np.ones(2, bool))
    assert has.tolist() == [True, False] and errors[0] == 0.0
    assert relative_errors([a, b], np.array([True, False]))[1].all()  # the second is not asked for
    _, has = relative_errors([a, side([1.0, 1.0], [[1.0] * 16] * 2)], np.ones(2, bool))
    assert not has.any()


def test_distances_are_of_float64_however_large_the_lanes() -> None:
    far = np.array([[3e38, 0, 0, 0], [1, 0, 0, 0]], np.float32)
    found = distances(far, -far)
    assert found.dtype == np.float64 and found[0] == pytest.approx(6e38, 1e-6) and found[1] == 2


def test_factor_is_told_where_it_explains_nearly_all_of_the_difference() -> None:
    draw = np.random.default_rng(1)
    a = draw.standard_normal(4).tolist()
    aside = draw.standard_normal(4)
    aside -= aside @ np.array(a) / (np.array(a) @ np.array(a)) * np.array(a)
    aside *= np.linalg.norm(a) / np.linalg.norm(aside)
    for share, is_told in ((0.04, True), (0.06, False)):  # of the change, what lies beside it
        b = [1.5 * x + share * 0.5 * y for x, y in zip(a, aside, strict=True)]
        found = factor_between(a, b)
        assert (found is not None) is is_told and (found is None or abs(found - 1.5) < 1e-12)


def test_no_factor_of_equal_missing_or_unrelated_values() -> None:
    a = [1.0, -2.0, 3.0, 4.0]
    assert factor_between(a, [x * (1 + 1e-6) for x in a]) is None
    assert factor_between(a, None) is None and factor_between([], []) is None
    assert factor_between(a, a * 4) is None
    assert factor_between([0.0] * 4, a) is None
    assert factor_between(a, [math.nan] * 4) is None
    assert factor_between(a, [x * 2e3 for x in a]) == 2e3
    for times in (2e3, 1 / 2e3, -2e3, 0.0):
        assert factor_between(a, [x * times for x in a], most=1e3) is None
    assert factor_between(a, [-x for x in a], most=1e3) == -1


def test_closest_multiple_leaves_what_lies_beside_it() -> None:
    found = closest_multiple([3.0, 0.0, 0.0, 4.0], [6.0, 1.0, 0.0, 8.0])
    assert found == (2.0, 1.0, 5.0)
    assert closest_multiple([0.0] * 4, [1.0] * 4) is None
    assert closest_multiple([math.inf] * 4, [1.0] * 4) is None


def test_factors_are_the_same_within_a_thousandth() -> None:
    assert is_same_factor(4.003, 4.0) and not is_same_factor(4.005, 4.0)
    assert is_same_factor(-2.0, -2.0) and not is_same_factor(None, 2.0)


def test_sketch_folds_onto_the_lanes_of_nodes() -> None:
    assert on_node_lanes([float(n) for n in range(16)]) == [24.0, 28.0, 32.0, 36.0]
    assert on_node_lanes([1.0, 2.0, 3.0, 4.0]) == [1.0, 2.0, 3.0, 4.0]
    assert on_node_lanes([1e16, 0, 0, 0, 1.0, 0, 0, 0, -1e16, 0, 0, 0]) == [1.0, 0, 0, 0]
    assert on_node_lanes([]) == [] and on_node_lanes([1.0] * 5) == []
