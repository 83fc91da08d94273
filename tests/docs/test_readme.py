"""What README and the site promise about themselves: length, links, names of scripts, variables."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from gradtrace_recorder.settings.variables import VARIABLES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = [*TOP, *sorted(DOCS.rglob("*.md"))]
MOST_WORDS = 800
# What scripts and tests alone ask for.
OTHER_VARIABLES = {"GRADTRACE_BENCH_PROBE", "GRADTRACE_MATRIX_CACHE"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_readme_has_at_most_800_words() -> None:
    """Commands and tables included; what has neither letter nor digit is no word."""
    words = [w for w in (ROOT / "README.md").read_text().split() if re.search(r"\w", w)]
    assert 300 < len(words) <= MOST_WORDS


@pytest.mark.parametrize("path", TOP, ids=name_of)
def test_links_of_the_top_level_lead_somewhere(path: Path) -> None:
    """Those of the site are held by mkdocs itself (scripts/check)."""
    links = re.findall(r"\]\(([^)\s]+)\)", path.read_text())
    inside = [link for link in links if not link.startswith(("http://", "https://", "#"))]
    assert inside or path.name == "CHANGELOG.md"
    assert [link for link in inside if not (path.parent / link.partition("#")[0]).exists()] == []


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_scripts_and_variables_that_a_page_names_are_there(path: Path) -> None:
    text = path.read_text()
    scripts = set(re.findall(r"\bscripts/([\w-]+)", text)) - {"schema-docs"}  # the changelog's
    assert [name for name in sorted(scripts) if not (ROOT / "scripts" / name).exists()] == []
    known = {variable.variable for variable in VARIABLES} | OTHER_VARIABLES
    shown_as_mistakes = {"GRADTRACE_SUMARY", "GRADTRACE_DRI"}
    named = set(re.findall(r"\bGRADTRACE_[A-Z_]*[A-Z]\b", text)) - shown_as_mistakes
    assert sorted(named - known) == []


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_python_that_a_page_shows_can_be_read(path: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL):
        if "->" in block and block.count("\n") == 1:
            block = f"def {block.split('.', 1)[1].rstrip()}: ..."  # a signature of the reference
        ast.parse(block)


def test_readme_names_the_two_commands_of_a_checkout_and_the_system() -> None:
    text = (ROOT / "README.md").read_text()
    assert "\nscripts/demo " in text and "\nscripts/test " in text and "Linux only" in text
