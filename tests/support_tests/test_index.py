"""The index page of tests/support lists what is there, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

SUPPORT = Path(__file__).resolve().parents[1] / "support"
PAGE = (SUPPORT / "README.md").read_text()


def test_every_module_has_one_line_on_the_page_and_every_line_a_module() -> None:
    listed = re.findall(r"^- `([^`]+)`", PAGE, re.MULTILINE)
    there = [
        str(path.relative_to(SUPPORT))
        for path in SUPPORT.rglob("*.py")
        if path.name != "__init__.py"
    ]
    assert sorted(listed) == sorted(there)


def test_every_folder_has_a_heading() -> None:
    headings = re.findall(r"^## (\w+): \w", PAGE, re.MULTILINE)
    assert sorted(headings) == sorted({path.parent.name for path in SUPPORT.glob("*/*.py")})


def test_a_line_says_what_its_module_gives_and_who_uses_it() -> None:
    lines = re.findall(r"^- .*", PAGE, re.MULTILINE)
    assert lines
    assert [line for line in lines if not re.match(r"- `\S+\.py`: .+\. Used by .+\.$", line)] == []


def test_files_that_a_line_names_exist() -> None:
    """As users of a module: by their path from tests/, from tests/support, or from the folder of the line."""
    for module, line in re.findall(r"^- `([^`]+)`(.*)", PAGE, re.MULTILINE):
        places = (SUPPORT.parent, SUPPORT, (SUPPORT / module).parent, SUPPORT.parents[1])
        for name in re.findall(r"`([\w/*-]+\.py|scripts/[\w-]+)[^`]*`", line):
            assert any(list(place.glob(name)) for place in places), f"{module}: {name}"
