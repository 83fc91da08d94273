"""The numbers of a tolerance stand in numerics/tolerance.py alone: no other module, and no SQL in one, has a copy."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradtrace_analyzer
from gradtrace_analyzer.numerics import tolerance

ROOT = Path(gradtrace_analyzer.__file__).parent
OWNER = "numerics/tolerance.py"
TREES = {
    str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(ROOT.rglob("*.py"))
}

# Numbers that only the tolerance has, wherever the two runs' values are judged.
TOLD_BY_VALUE = (
    "FEWEST_NUMBERS",
    "ROUNDED_ONCE",
    "SEEN",
    "TURNED",
    "UNJUDGED",
    "WIDER_STATISTICS",
    "AS_ADDED_UP",
    "FINEST",
)
JUDGES = (
    "diff/divided/part_sums.py",
    "diff/divided/whole_values.py",
    "diff/pairing/lower_bound.py",
    "diff/pairing/pairs.py",
    "diff/tolerances/amplification.py",
    "diff/tolerances/judgement.py",
    "diff/tolerances/lengths.py",
    "diff/tolerances/noise.py",
    "diff/tolerances/updates.py",
)


def defined(tree: ast.Module) -> Iterator[str]:
    """The names of a module's own constants, without the underscore of a private one."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            for name in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(name, ast.Name) and name.id.isupper():
                    yield name.id.lstrip("_")


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
                yield from map(
                    float, re.findall(r"(?<![\w.$])\d+(?:\.\d+)?(?:e-?\d+)?(?![\w.])", node.value)
                )
            elif isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
                yield float(node.value)


def test_no_other_module_has_a_constant_of_that_name() -> None:
    owned = set(defined(TREES[OWNER]))
    assert {"GROWTH", "SEEN", "NOISE_FLOOR", "DECISIVE", "UPDATED", "UNJUDGED"} < owned
    copies = [
        (path, name)
        for path, tree in TREES.items()
        if path != OWNER
        for name in defined(tree)
        if name in owned
    ]
    assert copies == []


@pytest.mark.parametrize("path", JUDGES)
def test_no_judge_writes_a_number_of_the_tolerance(path: str) -> None:
    owned = {getattr(tolerance, name): name for name in TOLD_BY_VALUE}
    assert [owned[n] for n in numbers(TREES[path]) if n in owned] == []
