"""Allowances are one registry: each can be switched off in one place, and is asked somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gradtrace_analyzer.diff.tolerances import allowances
from gradtrace_analyzer.diff.tolerances.allowances import ALLOWANCES, NAMES, Allowance, expression
from gradtrace_analyzer.numerics.model import MODEL

FILLED = {
    "scale": "1.0", "layers": 3, "role": "writes", "role_gain": "0.1", "writes_share": "1", "length": "0.2",
    "usual_times": 10.0, "rule_forward": "1e-6",
}  # fmt: skip
FOLDER = Path(allowances.__file__).parent


@pytest.mark.parametrize("allowance", ALLOWANCES, ids=NAMES)
def test_allowance_says_what_it_is_for_and_can_be_switched_off(allowance: Allowance) -> None:
    on, off = (expression(allowance.name, without, **FILLED) for without in ((), NAMES))
    assert on != off == allowance.without.format(**FILLED)
    assert "{" not in on and allowance.why.endswith(".")
    assert allowance.ablation.endswith(".")


def test_numbers_are_those_of_the_model() -> None:
    assert expression("noise_floor") == f"({MODEL.noise_floor} * l.norm)"
    assert expression("noise_floor", ["kinks"]) == expression("noise_floor")


def test_each_is_asked_in_one_judgement_and_none_twice_in_the_registry() -> None:
    assert len(set(NAMES)) == len(NAMES)
    code = "".join(path.read_text() for path in FOLDER.glob("*.py") if path.stem != "allowances")
    asked = set(re.findall(r"(?:expression|\bof)\(\s*['\"](\w+)['\"]", code))
    assert asked == set(NAMES)
