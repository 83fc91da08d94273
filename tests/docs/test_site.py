"""The site as scripts/check builds it: strict, and asking for nothing from the network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What a browser would load by itself; a link is not.
LOADED = (
    r'<(?:script|img|iframe|source)[^>]+src="(https?:)?//'
    r'|<link[^>]+rel="(?:stylesheet|preload|icon)"[^>]+href="(https?:)?//'
)


def options() -> list[str]:
    """Those of the command in scripts/check, but for where the site goes."""
    lines = (ROOT / "scripts" / "check").read_text().splitlines()
    [line] = [line for line in lines if "mkdocs" in line]
    words = line.split("mkdocs", 1)[1].strip('" ').split()
    return words[: words.index("--site-dir")]


def built(place: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", *options(), "--site-dir", str(place / "built")],
        cwd=place,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What the site is made from, to be changed."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "CHANGELOG.md", tmp_path)
    return tmp_path


@pytest.mark.slow
def test_site_is_built_and_loads_nothing_from_elsewhere(copy: Path) -> None:
    done = built(copy)
    assert done.returncode == 0, done.stderr
    pages = list((copy / "built").rglob("*.html"))
    assert len(pages) > 25
    assert [p.name for p in pages if re.search(LOADED, p.read_text())] == []
    assert "0.1.0" in (copy / "built" / "changelog.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("link", ["guides/nowhere.md", "guides/diff.md#nowhere"])
def test_link_that_leads_nowhere_fails_the_build(link: str, copy: Path) -> None:
    page = copy / "docs" / "index.md"
    page.write_text(f"{page.read_text()}\n[x]({link})\n")
    done = built(copy)
    assert done.returncode == 1 and "nowhere" in done.stderr, done.stderr
