"""The numbers of a tolerance stand in numerics/model.py alone: no other module, and no SQL, has a copy."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

import gradtrace_analyzer
from gradtrace_analyzer.numerics.model import MEASURED, MODEL, REASONED, SOURCE

ROOT = Path(gradtrace_analyzer.__file__).parent
TREES = {
    str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(ROOT.rglob("*.py"))
}
TEXTS = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "diff").rglob("*.sql"))
}

# Numbers that only the tolerance has, wherever the two runs' values are judged.
TOLD_BY_VALUE = (
    "fewest_numbers",
    "rounded_once",
    "turned",
    "unjudged",
    "as_added_up",
    "of_terms",
    "flipped",
    "least_factor",
)
JUDGES = (
    "diff/divided/part_sums.py",
    "diff/divided/whole_values.py",
    "diff/pairing/lower_bound.py",
    "diff/pairing/pairs.py",
    *(path for path in TREES if path.startswith("diff/tolerances/")),
)


_NUMBER = r"(?<![\w.$])\d+(?:\.\d+)?(?:e-?\d+)?(?![\w.])"


def numbers(tree: ast.Module) -> Iterator[float]:
    """The numbers that a module writes: in Python, where powers are worked out, and in its texts but docstrings."""
    documented = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            try:
                base, exponent = map(ast.literal_eval, (node.left, node.right))
            except ValueError:
                continue
            yield base**exponent
        elif isinstance(node, ast.Constant) and id(node) not in documented:
            if isinstance(node.value, str):
                yield from map(float, re.findall(_NUMBER, node.value))
            elif isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
                yield float(node.value)


def owned() -> dict[float, str]:
    return {float(getattr(MODEL, name)): name for name in TOLD_BY_VALUE}


@pytest.mark.parametrize("path", JUDGES)
def test_no_judge_writes_a_number_of_the_tolerance(path: str) -> None:
    assert [owned()[n] for n in numbers(TREES[path]) if n in owned()] == []


@pytest.mark.parametrize("path", TEXTS)
def test_no_file_of_sql_writes_a_number_of_the_tolerance(path: str) -> None:
    sql = "\n".join(line for line in TEXTS[path].splitlines() if not line.startswith("--"))
    found = map(float, re.findall(_NUMBER, sql))
    assert [owned()[n] for n in found if n in owned()] == []


def test_each_number_says_on_what_it_stands() -> None:
    for name, (value, kind, why) in MODEL.grounds().items():
        assert value > 0 and kind in (SOURCE, MEASURED, REASONED) and len(why) > 20, name


def test_model_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        MODEL.growth = 8.0  # type: ignore[misc]
