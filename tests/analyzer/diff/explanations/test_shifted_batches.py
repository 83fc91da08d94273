"""Ranks that read ahead or take part in fewer reductions, told from tables of a few rows."""

from __future__ import annotations

from typing import Any

import pytest

from gradtrace_analyzer.diff.explanations.skipped_batches import SkippedBatches, skipped_batches
from gradtrace_analyzer.reports.diff.explanations import TEMPLATES
from gradtrace_analyzer.reports.diff.wording import Wording
from support.synthetic_runs.differences import Row, Rows, views


def sentences(connection: Any, **how: Any) -> list[str]:
    """What was found, in words."""
    template = TEMPLATES[SkippedBatches]
    assert template is not None
    return list(template.sentences(skipped_batches(connection, **how), Wording()))


def fed(**batches: str) -> Rows:
    """By rank (`r0`), a letter for what each step reads, `-` for nothing."""
    rows: list[Row] = [
        {"rank": int(rank[1:]), "step": step, "root": 0, "call_index": 0, "name": "x", "fingerprint": ord(letter)}
        for rank, letters in batches.items()
        for step, letter in enumerate(letters)
        if letter != "-"
    ]  # fmt: skip
    return {"inputs": rows}


@pytest.mark.parametrize(
    ("candidate", "said"),
    [
        ("abdef", "candidate reads from step 2 on what the baseline reads 1 step later: it left out a batch there."),
        ("abefg", "candidate reads from step 2 on what the baseline reads 2 steps later: it left out 2 batches there."),
        ("abbcd", "baseline reads from step 2 on what the candidate reads 1 step later: it left out a batch there."),
        ("abcde", None),
        ("abxyz", None),
        ("abdxf", None),  # one of them is that of a step later by chance
    ],
)  # fmt: skip
def test_rank_that_reads_ahead_of_the_other_side_left_out_a_batch(
    candidate: str, said: str | None
) -> None:
    found = sentences(views(fed(r0="abcde"), fed(r0=candidate)))
    assert found == ([] if said is None else [f"Rank 0 of the {said}"])


def test_rank_that_is_further_ahead_than_anybody_looks_is_not_recognised() -> None:
    assert sentences(views(fed(r0="abcdefgh"), fed(r0="abghijkl"))) == []
    assert sentences(views(fed(r0="abcdefgh"), fed(r0="abfghijk"))) != []


def test_ranks_that_left_out_the_same_are_told_together() -> None:
    a, b = fed(r0="abcd", r1="efgh", r2="ijkl"), fed(r0="acde", r1="eghi", r2="ijkl")
    [said] = sentences(views(a, b))
    assert said.startswith("Ranks 0-1 of the candidate read from step 1 on")
    assert said.endswith("they left out a batch there.")


def test_inputs_that_are_known_to_agree_are_not_looked_at() -> None:
    assert sentences(views(fed(r0="abcd"), fed(r0="acde")), inputs=False) == []


def reduced(**numbers: list[int]) -> Rows:
    """By rank, the number of the last collective of each step."""
    rows: list[Row] = [
        {"rank": int(rank[1:]), "step": step, "collective_seq": number, "kind": "all_reduce", "parameter_fqns": ["w"]}
        for rank, own in numbers.items()
        for step, number in enumerate(own)
    ]  # fmt: skip
    return {"buckets": rows}


ALL = reduced(r0=[1, 2, 3], r1=[1, 2, 3], r2=[1, 2, 3])


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ([1, 1, 2], "left out a collective before or in step 1"),
        ([1, 2, 1], "left out 2 collectives before or in step 2"),
        ([1, 3, 4], "launched one more: a collective before or in step 1"),
        ([1, 2, 5], "launched more: 2 collectives before or in step 2"),
    ],
)
def test_rank_whose_collectives_are_numbered_otherwise_is_named(own: list[int], said: str) -> None:
    b = reduced(r0=[1, 2, 3], r1=own, r2=[1, 2, 3])
    [found] = sentences(views(ALL, b))
    assert found.startswith(f"Rank 1 of the candidate {said}:")


def test_numbers_that_begin_elsewhere_are_the_same() -> None:
    b = reduced(r0=[11, 12, 13], r1=[1, 2, 3], r2=[1, 2, 3])
    assert sentences(views(ALL, b)) == []


def test_rank_is_held_against_the_others_where_all_launch_more() -> None:
    b = reduced(r0=[1, 3, 5], r1=[1, 3, 4], r2=[1, 3, 5])
    [found] = sentences(views(ALL, b))
    assert found.startswith("Rank 1 of the candidate left out a collective before or in step 2:")


def test_where_most_ranks_are_numbered_otherwise_no_rank_left_anything_out() -> None:
    b = reduced(r0=[1, 2, 3], r1=[1, 3, 4], r2=[1, 1, 2])
    assert sentences(views(ALL, b)) == []
