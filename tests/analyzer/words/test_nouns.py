"""What things are called."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import gradtrace_analyzer
from gradtrace_analyzer.words.nouns import (
    SIDES,
    bucket_name,
    bucket_phrase,
    enumerated,
    listed,
    module_phrase,
    module_with_noun,
    other_side,
    upper_first,
)

ROOT = Path(gradtrace_analyzer.__file__).parent


def test_parameters_without_a_name_are_said_so() -> None:
    assert listed([None]) == "a parameter without a name"
    assert (
        bucket_phrase(2, 1, [None, "b"])
        == "Step 2, bucket 1 (a parameter without a name and 1 more)"
    )
    assert bucket_name(None, "a") == "bucket None (a)"


def test_names_are_listed_up_to_so_many() -> None:
    assert listed(["a", "b", "c"]) == "a and 2 more"
    assert listed(["a", "b", "c"], 2) == "a, b and 1 more"
    assert listed(["a", "b", "c"], 3) == "a and b and c"
    assert listed([]) == ""


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("", ""),
        ("a", "a"),
        ("ab", "a and b"),
        ("abc", "a, b and c"),
        ("abcde", "a, b, c and 2 more"),
    ],
)
def test_names_are_enumerated_as_in_a_sentence(names: str, said: str) -> None:
    assert enumerated(list(names), 3) == said


def test_modules_are_called_by_their_name_and_root() -> None:
    assert module_phrase("blocks.0") == "blocks.0"
    assert module_phrase("") == "the root module"
    assert module_phrase(None) == module_phrase(None, "root 1") == "code outside any module"
    assert module_phrase("a.0", "root 1 (Net)") == "a.0 of root 1 (Net)"
    assert module_phrase("0", "root 1 (Net)") == "module 0 of root 1 (Net)"
    assert module_phrase("3.1") == "module 3.1"
    assert module_phrase("", "root 1 (Net)") == "root 1 (Net)"
    assert [module_with_noun(fqn) for fqn in ("a.b", "", None)] == [
        "module a.b",
        "the root module",
        "code outside any module",
    ]


def test_each_side_has_another() -> None:
    assert [other_side(side) for side in SIDES] == list(SIDES[::-1])


def test_capital_leaves_names_as_they_are() -> None:
    assert upper_first("stage of NLLLoss") == "Stage of NLLLoss" and upper_first("") == ""


# How a plural, the other side or a place without a module is spelled out by hand, as `ast.unparse` writes it.
_SPELLED_OUT = (
    r"'s' if |else 's'|'s' \* |'es' if |else 'es'",
    r"'candidate': 'baseline'",
    r"code outside any module(?!,)",
)


@pytest.mark.parametrize("pattern", _SPELLED_OUT)
def test_no_module_but_these_spells_it_out(pattern: str) -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if path.parent.name != "words"
        for text in (ast.unparse(_without_docstrings(ast.parse(path.read_text(encoding="utf-8")))),)
        if re.search(pattern, text)
    }
    # A rule of tolerance knows no words: its room is beside this one.
    assert found <= {"numerics/tolerance.py"}


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            body[0] = ast.Pass()
    return tree
