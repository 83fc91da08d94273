"""Two sequences of Nodes of one module call: which of the candidate's is which of the baseline's."""

from __future__ import annotations

import pytest

from gradtrace_analyzer.diff.pairing.occurrences import MadeNode, aligned, renumbered


def nodes(text: str, bits: str = "") -> list[MadeNode]:
    """`Mul.4 Add.4`: names and sizes; `bits` has one letter for what arrives at each, `-` for unknown."""
    letters = bits or "-" * len(text.split())
    made = (word.split(".") for word in text.split())
    return [
        MadeNode(name, int(size), (None if letter == "-" else ord(letter), None))
        for (name, size), letter in zip(made, letters, strict=True)
    ]


@pytest.mark.parametrize(
    ("old", "new", "pairs"),
    [
        ("T.4 Mul.4 Mm.4 Mul.8", "T.4 Mul.4 Mm.4 Mul.8", [(0, 0), (1, 1), (2, 2), (3, 3)]),
        # One more in the middle: sizes tell which.
        ("T.4 Mul.4 Mm.4 Mul.8", "T.4 Mul.2 Mul.4 Mm.4 Mul.8", [(0, 0), (1, 2), (2, 3), (3, 4)]),
        ("Gelu.4 Mul.4", "Mul.4 Gelu.4 Mul.4", [(0, 1), (1, 2)]),
        # Two became one, one became two.
        ("Mm.4 Mul.4 Add.4 Sum.1", "Mm.4 Addcmul.4 Sum.1", [(0, 0), (3, 2)]),
        ("Mm.4 Addcmul.4 Sum.1", "Mm.4 Mul.4 Add.4 Sum.1", [(0, 0), (2, 3)]),
        ("Mul.4", "Add.4", []),
        ("", "Add.4", []),
    ],
)
def test_nodes_pair_in_order_by_name_and_size(
    old: str, new: str, pairs: list[tuple[int, int]]
) -> None:
    assert aligned(nodes(old), nodes(new)) == pairs


def test_bits_tell_which_of_two_alike_was_added() -> None:
    assert aligned(nodes("Mul.4", "x"), nodes("Mul.4 Mul.4", "yx")) == [(0, 1)]
    assert aligned(nodes("Mul.4", "x"), nodes("Mul.4 Mul.4", "xy")) == [(0, 0)]


def test_candidate_takes_the_baselines_numbers_and_new_ones_follow() -> None:
    old, new = nodes("Mul.4 Gelu.4 Mul.8"), nodes("Mul.2 Mul.4 Gelu.4 Mul.8")
    assert renumbered(old, new) == [("Mul", 2, 0), ("Mul", 0, 1), ("Mul", 1, 2)]
    assert renumbered(old, old) == []


def test_thousands_of_nodes_are_aligned_too() -> None:
    old = [MadeNode(f"N{n % 7}", n) for n in range(3000)]
    new = [*old[:1500], MadeNode("N3", 5), *old[1500:]]
    pairs = aligned(old, new)
    assert len(pairs) == 3000 and pairs[-1] == (2999, 3000)
