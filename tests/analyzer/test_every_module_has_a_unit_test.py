"""Every module of the analyzer is imported by a test, so that something is asked of it below the command line.

What is exempt stands here with the reason; an exemption whose modules all have tests by now is to be taken out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import gradtrace_analyzer

TESTS = Path(__file__).parent
PACKAGE = Path(gradtrace_analyzer.__file__).parent

# A module, or a room with all that is in it, by what is asked of it instead.
EXEMPT = {
    "__main__": "the process of the command: test_interrupts.py starts it",
    "commands": "options in, exit code out: each is run as a person runs it, by test_*_command.py and test_golden.py",
    "reports": "texts: read whole, in tests/golden",
    "exports": "files: read back whole, by test_export.py",
    "progress": "for whoever waits, on stderr; no answer hangs on it, and nothing tests it yet",
    "check.check": "through `check`: tests/analyzer/check",
    "check.evidence": "through `check`: tests/analyzer/check",
    "check.laws.birthplaces": "through the law of what is not finite: tests/analyzer/check/laws/test_finite.py",
    "check.laws.deviations": "through the laws of a mean: tests/analyzer/check/laws/test_reductions.py",
    "check.laws.mean": "through the laws of a mean: tests/analyzer/check/laws/test_reductions.py",
    "check.laws.predecessors": "through the law of what is not finite: tests/analyzer/check/laws/test_finite.py",
    "failures.phrases": "through `failures`: test_failures_command.py",
    "failures.under_way": "through `failures`: test_failures_command.py",
    "failures.waiting": "through `failures`: tests/whole/test_failures.py has the ranks that it is about",
    "numerics.hook_promises": "through `check`: tests/analyzer/check/laws/test_reductions.py",
    "runs.flight": "through `open_run`: tests/whole/test_flight.py",
    "runs.journals": "through `open_run`: test_opening.py",
    "runs.last_seen": "through `failures` and `repair`: test_failures_command.py, test_repair.py",
    "timing": "through `timing` of jobs whose times are made up: tests/analyzer/timing",
}


def modules() -> set[str]:
    """The analyzer's modules by name, without the package's in front; a folder's is one where it holds any code."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        inside = path.relative_to(PACKAGE).with_suffix("").parts
        if inside[-1] == "__init__":
            inside = inside[:-1] if len(ast.parse(path.read_text()).body) > 1 else ()
        if inside:
            found.add(".".join(inside))
    return found


def imported() -> set[str]:
    """What the tests of the analyzer import, by name."""
    found: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        for name in names_in(path):
            package, _, inside = name.partition(".")
            if package == "gradtrace_analyzer":
                found.add(inside)
    return found


def names_in(path: Path) -> Iterator[str]:
    """The modules, and what may be one, that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_of(module: str, exempt: str) -> bool:
    return module == exempt or module.startswith(f"{exempt}.")


def test_every_module_has_a_unit_test() -> None:
    untested = modules() - imported()
    without = sorted(m for m in untested if not any(is_of(m, exempt) for exempt in EXEMPT))
    assert not without, f"no test under tests/analyzer imports {', '.join(without)}"


def test_every_exemption_is_of_a_module_without_one() -> None:
    untested = modules() - imported()
    idle = sorted(exempt for exempt in EXEMPT if not any(is_of(m, exempt) for m in untested))
    assert not idle, f"these have tests by now and need no exemption: {', '.join(idle)}"


def test_every_stage_of_diff_has_one() -> None:
    """Of the rooms that are pure, or read a few tables, none is exempt."""
    assert not [exempt for exempt in EXEMPT if is_of(exempt, "diff")]
    assert {m for m in modules() if is_of(m, "diff")} <= imported()
