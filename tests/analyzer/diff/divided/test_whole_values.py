"""One value from its parts, and two such values against each other."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gradtrace_analyzer.diff.divided.whole_values import change_between, change_of_sums, whole_value

Part = tuple[Any, ...]


def part(numel: int, norm: float | None = 1.0, **more: Any) -> Part:
    """numel, norm, abs_max, sum, nan_count, inf_count, sketch, dtype, fingerprint, is_flat."""
    values = {
        "numel": numel,
        "norm": norm,
        "abs_max": 0.5,
        "sum": 2.0,
        "nan_count": 0,
        "inf_count": 0,
        "sketch": [1.0, 2.0],
        "dtype": "float32",
        "fingerprint": 7,
        "is_flat": False,
    }
    return tuple({**values, **more}.values())


def test_replica_stands_for_all_of_them() -> None:
    found = whole_value([part(8, 3.0), part(8, 4.0)], [part(8)])
    assert found is not None and (found["norm"], found["sketch"], found["fingerprint"]) == (
        3.0,
        [1.0, 2.0],
        7,
    )


def test_shards_add_up_where_that_is_the_size_of_the_other_side() -> None:
    shards = [part(6, 3.0, abs_max=0.5, sum=1.0), part(2, 4.0, abs_max=2.5, sum=-3.0, nan_count=1)]
    found = whole_value(shards, [part(8)])
    assert found is not None
    assert (found["numel"], found["norm"], found["abs_max"], found["sum"]) == (8, 5.0, 2.5, -2.0)
    assert (found["nan_count"], found["sketch"], found["fingerprint"]) == (1, None, None)


def test_equal_shards_add_up_too_where_the_other_side_has_the_whole() -> None:
    found = whole_value([part(4, 3.0), part(4, 4.0)], [part(8)])
    assert found is not None and (found["numel"], found["norm"]) == (8, 5.0)


def test_shards_of_both_sides_are_both_whole() -> None:
    two, four = [part(4, 3.0)] * 2, [part(2, 1.0)] * 4
    sizes = [(whole_value(a, b) or {}).get("numel") for a, b in ((two, four), (four, two))]
    assert sizes == [8, 8]


def test_shard_that_holds_nothing_adds_nothing() -> None:
    found = whole_value([part(8, 3.0), part(0, None, abs_max=None, sum=None)], [part(8)])
    assert found is not None and found["norm"] == 3.0


@pytest.mark.parametrize(
    "parts", [[part(3), part(4)], [part(6), part(2, None)]], ids=["another size", "no summary"]
)
def test_parts_that_do_not_make_a_whole_are_none(parts: list[Part]) -> None:
    assert whole_value(parts, [part(8)]) is None


def value(norm: float = 5.0, **more: Any) -> dict[str, Any]:
    return {
        "norm": norm,
        "sum": 1.0,
        "nan_count": 0,
        "inf_count": 0,
        "sketch": [3.0, 4.0],
        "fingerprint": 1,
        **more,
    }


@pytest.mark.parametrize(
    ("a", "b", "differs", "error"),
    [
        (value(), value(), False, 0.0),
        (value(), value(fingerprint=2, sketch=[3.0, 2.0]), True, 0.4),
        # Without a sketch on both sides the norm and the sum are all there is: the larger of their errors.
        (value(), value(4.0, fingerprint=2, sketch=None), True, 0.2),
        (value(), value(4.0, fingerprint=2, sketch=None, sum=3.0), True, 0.4),
        (value(), value(fingerprint=2, nan_count=1), True, None),
        (value(0.0, sketch=[0.0, 0.0]), value(0.0, sketch=[0.0, 0.0], fingerprint=2), True, 0.0),
        (value(fingerprint=None), value(fingerprint=None), True, 0.0),
    ],
)
def test_two_wholes_are_held_against_each_other_by_what_both_have(
    a: dict[str, Any], b: dict[str, Any], differs: bool, error: float | None
) -> None:
    change = change_between(a, b)
    assert (change.differs, change.error) == (differs, pytest.approx(error) if error else error)


def sums(a: list[Any], b: list[Any]) -> list[Any]:
    return [x for pair in zip(a, b, strict=True) for x in pair]


A = [8, 5.0, 2.0, 1.0, 0, 0]  # numel, norm, abs_max, sum, nan_count, inf_count


def test_sum_is_held_against_the_other_divided_by_the_factor() -> None:
    change = change_of_sums(sums(A, [8, 10.0, 4.0, 2.0, 0, 0]), 2.0, 0.125)
    assert change is not None and (change.differs, change.error, change.tolerance) == (
        False,
        0.0,
        0.125,
    )
    assert change.candidate is not None and change.candidate["abs_max"] == 2.0
    other = change_of_sums(sums(A, [8, 10.0, 4.0, 2.0, 0, 0]), 1.0, 0.125)
    assert other is not None and (other.differs, other.error) == (True, 0.5)


@pytest.mark.parametrize(
    "b", [[9, *A[1:]], [8, None, *A[2:]], [0, *A[1:]]], ids=["size", "no norm", "nothing"]
)
def test_sums_of_other_sizes_are_not_compared(b: list[Any]) -> None:
    assert change_of_sums(sums(A if b[0] else [0, *A[1:]], b), 1.0, 0.1) is None


def test_sum_that_is_not_finite_on_one_side_has_no_error() -> None:
    change = change_of_sums(sums(A, [8, 5.0, 2.0, 1.0, 3, 0]), 1.0, 0.1)
    assert change is not None and change.differs and change.error is None
    assert not math.isnan(change.tolerance)
