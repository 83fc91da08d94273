"""The verdict is a function of facts: a table of cases."""

from __future__ import annotations

import pytest

from gradtrace_analyzer.diff.verdict import Decision, Facts, decision

LACKS = "the candidate lacks rank 1, of which nothing can be said"

CASES = {
    "nothing differs": (Facts(), Decision("identical")),
    "nothing can be compared": (Facts(cannot="why"), Decision("incomparable", "why")),
    "nothing can be compared, whatever else is known": (
        Facts(cannot="why", differs=True, sums_apart=True, decided_by_bits=True),
        Decision("incomparable", "why"),
    ),
    "sums agree": (Facts(sums_apart=False), Decision("within_tolerance", place="sums")),
    "sums are apart": (Facts(sums_apart=True), Decision("different", place="sums")),
    "sums stand in the place of rows": (
        Facts(sums_apart=False, differs=True, is_beyond=True),
        Decision("within_tolerance", place="sums"),
    ),
    "agrees, and a rank is missing": (Facts(unseen=LACKS), Decision("incomparable", LACKS)),
    "differs, and a rank is missing": (
        Facts(differs=True, unseen=LACKS, is_beyond=True),
        Decision("different", place="beyond"),
    ),
    "agrees, and one side has more parameters": (
        Facts(is_other_model=True, has_lone=True),
        Decision("different"),
    ),
    "agrees, and one side has something more": (
        Facts(has_lone=True),
        Decision("within_tolerance"),
    ),
    "agrees, and rows were set aside": (Facts(has_aside=True), Decision("within_tolerance")),
    "differs within tolerance": (
        Facts(differs=True),
        Decision("within_tolerance", place="first"),
    ),
    "differs within tolerance, which bits decide": (
        Facts(differs=True, decided_by_bits=True),
        Decision("different", place="first"),
    ),
    "differs within tolerance, in another model": (
        Facts(differs=True, is_other_model=True),
        Decision("different", place="first"),
    ),
    "differs beyond tolerance": (
        Facts(differs=True, is_beyond=True),
        Decision("different", place="beyond"),
    ),
    "differs beyond tolerance, which bits decide": (
        Facts(differs=True, is_beyond=True, decided_by_bits=True),
        Decision("different", place="first"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_facts_allow_one_verdict(case: str) -> None:
    facts, expected = CASES[case]
    assert decision(facts) == expected


def test_only_what_cannot_be_said_has_a_reason() -> None:
    for facts, _ in CASES.values():
        found = decision(facts)
        assert bool(found.reason) == (found.verdict == "incomparable")
