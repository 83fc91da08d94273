"""How laws are found and put into the chain of a step; and that each of them has its tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from gradtrace_analyzer.check.law import Findings, Law, law
from gradtrace_analyzer.check.registry import BadLaws, all_laws, in_chain

# As they stood when laws began to say themselves what they come after: answers are sorted by it.
CHAIN = [
    "data_differ", "values_finite", "forward_is_fresh", "replays_equal", "passes_complete", "handovers_equal",
    "actions_complete", "gradients_accumulate", "microbatches_add_up", "wrapper_called", "last_pass_reduces",
    "passes_match", "buckets_launched", "collectives_match", "reduction_is_mean", "gradients_equal",
    "parameters_equal",
]  # fmt: skip


def made(name: str, *after: str, **more: Any) -> Law:
    """A law that finds nothing."""
    return law(name, "error", "step", "Nothing.", after=after, **more)(lambda evidence: Findings())


def names(laws: Iterable[Law]) -> list[str]:
    return [one.name for one in laws]


def test_laws_stand_in_the_order_that_answers_had() -> None:
    assert [name for name in names(all_laws()) if name in CHAIN] == CHAIN


def test_order_is_that_of_the_chain_however_laws_are_found() -> None:
    assert names(in_chain(reversed(all_laws()))) == names(all_laws())


def test_law_behind_another_stands_next_to_it_whatever_its_name() -> None:
    chain = [made("b"), made("a", "b"), made("c", "a"), made("d", "c")]
    for name in ("aa", "zz"):
        assert names(in_chain([*chain, made(name, "b")])) == ["b", name, "a", "c", "d"]
    two = [made("y", "b"), made("z", "y")]
    assert names(in_chain([*chain, *two])) == ["b", "y", "z", "a", "c", "d"]
    assert names(in_chain([*chain, made("z", "b", "a")])) == ["b", "a", "z", "c", "d"]


@pytest.mark.parametrize(
    ("laws", "said"),
    [
        ([made("a", "b"), made("b", "a"), made("c", "b")], "in a circle: a, b$"),
        ([made("a", "a")], "in a circle: a$"),
        ([made("a"), made("b", "d")], "^after of law 'b' names 'd'; there are a, b$"),
        ([made("a", explained_by=["d"])], "^explained_by of law 'a' names 'd'; there are a$"),
        (
            [made("a", explained_by=["b"]), made("b")],
            "^law 'b' explains others, and has no `as_cause`$",
        ),
        ([made("a", explains=["d"])], "^explains of law 'a' names 'd'; there are a$"),
        (
            [made("a", explains=["b"]), made("b")],
            "^law 'a' explains others, and has no `as_cause`$",
        ),
        ([made("a"), made("a")], r"^two laws are called 'a', in \S+ and \S+$"),
    ],
)
def test_laws_that_do_not_fit_together_are_one_clear_error(laws: list[Law], said: str) -> None:
    with pytest.raises(BadLaws, match=said):
        in_chain(laws)


def test_unit_has_the_plural_that_it_is_given_or_its_own() -> None:
    regular = made("a")
    assert (regular.counted(1), regular.counted(2000)) == ("1 step", "2,000 steps")
    pairs = law("b", "error", ("pair of steps", "pairs of steps"), "Nothing.")
    assert pairs(lambda evidence: Findings()).counted(3) == "3 pairs of steps"
    passes = law("c", "error", "backward pass", "Nothing.")
    assert passes(lambda evidence: Findings()).counted(2) == "2 backward passes"


def test_violation_has_the_severity_of_its_law_unless_another_is_given() -> None:
    one = made("a")
    assert one.violation(3, "Broken.", rank=1).severity == "error"
    assert one.violation(3, "Broken.", severity="warning").severity == "warning"


@pytest.mark.parametrize("one", all_laws(), ids=lambda one: str(one.name))
def test_law_says_what_holds(one: Law) -> None:
    assert one.severity in ("error", "warning") and one.doc.endswith(".") and one.doc[0].isupper()


TESTED = {
    "a run that breaks it": ("violation",),
    "a run that keeps it, and how much was judged": (".compared", '["judged"]'),
    "a run in which it cannot be judged, and why": ("not_judged",),
}


def untested(one: Law, folder: Path) -> list[str]:
    """What tests of a law's module lack: they name the law, and what they look at."""
    module = one.judge.__module__.rpartition(".")[2]
    path = folder / f"test_{module}.py"
    if not path.exists():
        return [f"law {one.name!r} has no {path.name}"]
    text = path.read_text()
    tests = [
        ast.get_source_segment(text, node) or ""
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    naming = [test for test in tests if re.search(rf"\b{one.name}\b", test)]
    return [
        f"{path.name} has no test with {what} of law {one.name!r}"
        for what, signs in TESTED.items()
        if not any(sign in test for test in naming for sign in signs)
    ]


@pytest.mark.parametrize("one", all_laws(), ids=lambda one: str(one.name))
def test_law_has_tests_in_the_module_of_its_name(one: Law) -> None:
    assert untested(one, Path(__file__).parent / "laws") == []


def test_law_without_tests_is_told(tmp_path: Path) -> None:
    one = made("grows")
    assert untested(one, tmp_path) == ["law 'grows' has no test_test_registry.py"]
    tests = "def test_it() -> None:\n    assert findings(grows).violations\n"
    (tmp_path / "test_test_registry.py").write_text(tests)
    assert untested(one, tmp_path) == [
        "test_test_registry.py has no test with a run that keeps it, and how much was judged of law 'grows'",
        "test_test_registry.py has no test with a run in which it cannot be judged, and why of law 'grows'",
    ]
