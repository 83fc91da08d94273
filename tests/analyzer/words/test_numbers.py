"""Numbers as a sentence says them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from gradtrace_analyzer.words.numbers import (
    also_in,
    and_more,
    bytes_text,
    clock_text,
    counted,
    counts_phrase,
    ms_text,
    noun,
    number,
    percent_text,
    possessive,
    ranks_phrase,
    rows_phrase,
    seconds_text,
    spans,
    stages_phrase,
    steps_phrase,
    told_apart,
    verb,
)


def test_numbers_are_told_as_spans() -> None:
    assert spans([9, 0, 1, 2, 8, 9]) == "0-2,8-9"
    assert spans([]) == ""


def test_one_number_is_told_in_the_singular() -> None:
    assert (ranks_phrase([3]), ranks_phrase([3, 4])) == ("rank 3", "ranks 3-4")
    assert (steps_phrase([0, 2]), steps_phrase(range(2, 3))) == ("steps 0,2", "step 2")
    assert (stages_phrase({1}), stages_phrase({1, 0})) == ("stage 1", "stages 0-1")
    assert (possessive([1]), possessive([0, 1])) == ("rank 1's", "ranks 0-1's")


@pytest.mark.parametrize(
    ("one", "several"),
    [
        ("step", "steps"),
        ("backward pass", "backward passes"),
        ("microbatch", "microbatches"),
        ("more boundary", "more boundaries"),
        ("day", "days"),
        ("more time", "more times"),
    ],
)
def test_things_are_counted_in_the_number_that_fits(one: str, several: str) -> None:
    assert (noun(1, one), noun(0, one), noun(2, one)) == (one, several, several)
    assert counted(1, one) == f"1 {one}"
    assert counted(1200, one) == f"1,200 {several}"


def test_verb_fits_things_and_their_count() -> None:
    assert [verb(n, "is", "are") for n in (0, 1, 2)] == ["are", "is", "are"]
    assert [verb([7] * n, "is", "are") for n in (0, 1, 2)] == ["are", "is", "are"]


def test_what_is_left_is_counted() -> None:
    assert [and_more(n) for n in (-2, 0, 1, 30)] == ["", "", " and 1 more", " and 30 more"]
    assert also_in([3, 4, 9], 3) == " So in 2 later steps."
    assert also_in([3], 3) == ""
    assert counts_phrase({"slow": 2, "full": 1500}) == "2 slow, 1,500 full"
    assert counts_phrase({}) == ""


@pytest.mark.parametrize(
    ("ns", "said"),
    [
        (None, "-"),
        (0, "0.00 ms"),
        (9_990_000, "9.99 ms"),
        (10_000_000, "10.0 ms"),
        (9_999_000_000, "9999.0 ms"),
        (10_000_000_000, "10.0 s"),
        (1_234_500_000_000, "1,234.5 s"),
    ],
)
def test_times_have_as_many_digits_as_a_person_reads(ns: float | None, said: str) -> None:
    assert ms_text(ns) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.523, "0.52 s"),
        (10, "10 s"),
        (119, "119 s"),
        (120, "2 min"),
        (7199, "120 min"),
        (9000, "2.5 h"),
        (172_799, "48.0 h"),
        (259_200, "3 days"),
    ],
)
def test_long_times_are_told_in_their_unit(seconds: float, said: str) -> None:
    assert seconds_text(seconds) == said


@pytest.mark.parametrize(
    ("share", "said"),
    [(None, "-"), (0, "0%"), (0.032, "3.2%"), (0.1, "10%"), (0.414, "41%"), (1.0, "100%")],
)
def test_shares_are_told_as_percent(share: float | None, said: str) -> None:
    assert percent_text(share) == said


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1_420_000, "1.42 MB"),
        (3_000_000_000, "3 GB"),
        (5_600_000_000_000, "5.6 TB"),
    ],
)
def test_sizes_are_told_in_their_unit(count: int, said: str) -> None:
    assert bytes_text(count) == said


@pytest.fixture
def clock_of_kathmandu() -> Iterator[None]:
    """A local time that is no whole number of hours from that of the machine."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = "<+0545>-5:45"
    time.tzset()
    yield
    if before is None:
        del os.environ["TZ"]
    else:
        os.environ["TZ"] = before
    time.tzset()


@pytest.mark.usefixtures("clock_of_kathmandu")
def test_clock_is_local_and_has_milliseconds() -> None:
    assert clock_text(1_700_000_000_007_900_000) == "03:58:20.007"


def test_numbers_are_told_with_the_digits_they_need() -> None:
    assert [number(n) for n in (0.1 + 0.2, 1 / 3, 12, None, "x")] == [
        "0.3", "0.333333", "12", "None", "x",
    ]  # fmt: skip
    assert told_apart(1.0, 2.0) == ("1", "2")
    assert told_apart(1.0001, 1.0002) == ("1.0001", "1.0002")
    assert told_apart(1.23456789, 1.23456788) == ("1.234568", "1.234568")
    assert told_apart(0.25, 0.25) == ("0.25", "0.25")
    assert (told_apart(None, 0.123), told_apart(0.123, None)) == (("-", "0.12"), ("0.12", "-"))


def test_rows_are_counted_by_table() -> None:
    counts = {"inputs": 1, "backward_passes": 1, "node_events": 1_200, "buckets": 2}
    assert rows_phrase(counts) == "1 input, 1 backward_pass, 1,200 node_events, 2 buckets"
