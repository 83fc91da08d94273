"""What the recipes of docs/ say of a law and of a command is true: two files, and no other is edited.

The files are those that the recipes show. They lie in folders of their own, which the packages `check.laws` and
`commands` are told to look into as well: this is all that tells them from files in the packages themselves.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.synthetic_runs.builder import build_run
from support.synthetic_runs.data_parallel import Job, edit

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys
from gradtrace_analyzer import commands
from gradtrace_analyzer.check import laws
laws.__path__.append({folder!r} + "/laws")
commands.__path__.append({folder!r} + "/commands")
"""
ANALYZER = PROGRAM + "from gradtrace_analyzer.cli import main\nmain()\n"
PYTEST = PROGRAM + "import pytest\nsys.exit(pytest.main(sys.argv[1:]))\n"


def shown_files() -> dict[str, str]:
    """Every file that a page of docs/ shows whole, its path in a comment on the first line."""
    return {
        block.splitlines()[0][2:]: block
        for page in sorted((ROOT / "docs").rglob("*.md"))
        for block in re.findall(r"^```python\n(# \S+\.py\n.*?)^```$", page.read_text(), re.M | re.S)
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of the recipes, by the last part of the folder that they belong to."""
    for path, text in shown_files().items():
        place = tmp_path / Path(path).parent.name / Path(path).name
        if path.startswith("tests/"):
            place = tmp_path / "tests" / Path(path).name
        place.parent.mkdir(exist_ok=True)
        place.write_text(text)
    return tmp_path


def ran(program: str, folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program.format(folder=str(folder)), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )


def test_recipes_show_two_files_each() -> None:
    assert sorted(shown_files()) == [
        "analyzer/gradtrace_analyzer/check/laws/learning_rates.py",
        "analyzer/gradtrace_analyzer/commands/losses.py",
        "tests/analyzer/check/laws/test_learning_rates.py",
        "tests/analyzer/test_losses_command.py",
    ]


def test_law_of_the_recipe_is_judged_told_and_explains(folder: Path) -> None:
    rows = Job().made()
    edit(rows, "optimizer_groups", {}, learning_rate=0.1)
    edit(rows, "optimizer_groups", {"rank": 1, "step": 1}, learning_rate=0.2)
    edit(rows, "parameters", {"rank": 1, "step": 1, "point": "after"}, fingerprint=5)
    run = build_run(folder / "run", rows, world_size=2)

    text = ran(ANALYZER, folder, "check", run)
    assert (text.returncode, text.stderr) == (1, "")
    lines = text.stdout.splitlines()
    at = lines.index("warning  learning_rates_equal")
    assert lines[at + 1] == "  Step 1: the learning rates of ranks 0-1 differ."
    assert lines[at + 2] == "error  parameters_equal"
    assert lines[at + 3].endswith("It follows from the above: the learning rates differ.")
    assert (
        "gradients_equal (15 buckets and gradients), learning_rates_equal (3 parameter groups), parameters_equal"
        in lines[-1]
    )

    answer = json.loads(ran(ANALYZER, folder, "check", run, "--format", "json").stdout)
    cause, effect = answer["violations"]
    assert (cause["law"], cause["severity"], cause["step"]) == (
        "learning_rates_equal", "warning", 1,
    )  # fmt: skip
    assert (cause["ranks"], cause["inherits"]) == ([0, 1], None)
    assert (effect["law"], effect["inherits"]) == ("parameters_equal", "learning_rates_equal")
    assert answer["judged"]["learning_rates_equal"] == 3

    told = ran(ANALYZER, folder, "laws", "learning_rates_equal")
    assert told.stdout.startswith("learning_rates_equal  warning\n\nThe ranks of a data-parallel")


def test_command_of_the_recipe_is_listed_and_answers(folder: Path) -> None:
    assert re.search(r"^  losses +The loss of each", ran(ANALYZER, folder, "--help").stdout, re.M)
    run = build_run(folder / "run", Job().made(), world_size=2)
    done = ran(ANALYZER, folder, "losses", run, "--format", "csv")
    assert (done.returncode, done.stdout) == (
        0,
        "rank,first_loss,last_loss\n0,1.0,1.0\n1,1.0,1.0\n",
    )


def test_tests_of_the_recipes_pass(folder: Path) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT]
    done = ran(PYTEST, folder, *options, "--basetemp", folder / "temp", folder / "tests")
    assert done.returncode == 0 and "5 passed" in done.stdout, done.stdout + done.stderr


def test_two_laws_that_wait_for_each_other_are_one_clear_error(folder: Path) -> None:
    law = folder / "laws" / "learning_rates.py"
    law.write_text(
        law.read_text().replace('after=["gradients_equal"]', 'after=["learning_rates_equal"]')
    )
    done = ran(ANALYZER, folder, "check", build_run(folder / "run", Job().made(), world_size=2))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("laws stand after each other in a circle: learning_rates_equal\n")
