"""The ablation of the tolerance: which case a kept question is of, and what is written of what was judged."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from support.accuracy.ablation import SECTION, case_of, pairs_of, rows, section_of, with_section
from support.accuracy.measuring import Case, Outcome
from support.frozen import corpus


def test_question_says_which_case_it_is_of() -> None:
    assert case_of("mlp, two ranks (DDP), sound at 1") == Case("mlp", "two ranks (DDP)", "1", None)
    about = "translator, bf16, another order of summation, one element by 1% at the root"
    change = "bf16, another order of summation"
    assert case_of(about) == Case("translator", change, "", "one element by 1%")


@pytest.mark.skipif(
    not (corpus.CORPUS / corpus.QUESTIONS).exists(), reason="recordings are not in a package"
)
def test_kept_pairs_are_those_of_the_page() -> None:
    pairs = pairs_of(corpus.questions())
    assert (len(pairs), sum(pair.case.kind is None for pair in pairs)) == (473, 121)


def test_line_of_an_allowance_says_what_changes_without_it() -> None:
    fault, sound = Case("mlp", "none", "1", "times 2"), Case("mlp", "none", "1", None)
    whole = [Outcome(fault, "different", "exact", ""), Outcome(sound, "within_tolerance", None, "")]
    without = {
        "kinks": [
            Outcome(fault, "different", "module", ""),
            Outcome(sound, "different", "step", ""),
        ],
        "drift": whole,
    }
    assert list(rows(whole, without, {"kinks": 2, "drift": 1}))[2:] == [
        "| (none) | | 1 | 1 | 0 | |",
        "| kinks | 2 | 0 | -1 | +1 | 2 |",
        "| drift | 1 | 0 | 0 | 0 | 0 |",
    ]


def test_section_is_put_in_the_page_and_kept_when_the_rest_is_made_anew() -> None:
    page = "# Page\n\n## By change\n\nrows\n\n## What it cannot do\n\nthings\n"
    first = with_section(page, f"{SECTION}\n\nold\n\n")
    assert first.index("old") < first.index("## What it cannot do") and section_of(page) == ""
    second = with_section(first, f"{SECTION}\n\nnew\n\n")
    assert "old" not in second and section_of(second) == f"{SECTION}\n\nnew\n\n"
    assert with_section(page, section_of(second)) == second
