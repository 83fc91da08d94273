"""What the recipes of docs/ say is true: of a law, a command, an explanation, a compared table.

The files are those that the recipes show. They lie in folders of their own, which the packages are told to look into as
well: this is all that tells them from files in the packages themselves. Lines that a recipe adds to a module are run
behind it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.synthetic_runs.builder import build_run, summary_columns
from support.synthetic_runs.data_parallel import Job, edit
from support.synthetic_runs.layer_chain import layered_run

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


def shown_lines(page: str, module: str) -> str:
    """The lines that a page of docs/ says to add to a module, which it names in a comment in front of them."""
    text = (ROOT / "docs" / page).read_text()
    [lines] = re.findall(rf"^```python\n# in {module}.*?\n(.*?)^```$", text, re.M | re.S)
    return str(lines)


def test_recipes_of_laws_and_commands_show_two_files_each() -> None:
    assert sorted(shown_files()) == [
        "analyzer/gradtrace_analyzer/check/laws/learning_rates.py",
        "analyzer/gradtrace_analyzer/commands/losses.py",
        "analyzer/gradtrace_analyzer/diff/explanations/allocators.py",
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


EXPLAINED = """
from gradtrace_analyzer.diff import explanations
explanations.__path__.append({folder!r} + "/explanations")
from gradtrace_analyzer.diff.explanations import allocators, registry
from gradtrace_analyzer.diff.explanations.allocators import OtherAllocator
registry.EXPLAINERS += (allocators.EXPLAINER,)
from gradtrace_analyzer.reports.diff.explanations import *
from gradtrace_analyzer.reports.diff.explanations import TEMPLATES, Iterator, Template, Wording
{lines}
from gradtrace_analyzer.cli import main
main()
"""


def test_explanation_of_the_recipe_is_asked_and_told(folder: Path) -> None:
    lines = shown_lines("add-an-explanation.md", "reports/diff/explanations.py")
    program = EXPLAINED.replace("{lines}", lines.replace("{", "{{").replace("}", "}}"))
    a = layered_run(folder / "a", allocator="native")
    faults = {
        "gradient": {"at": {(1, "layer2"): 0.5}, "allocator": "arena"},
        "output": {"outputs": {(1, "layer2"): 0.5}, "allocator": "arena"},
        "same": {"at": {(1, "layer2"): 0.5}, "allocator": "native"},
    }
    said = {}
    for name, fault in faults.items():
        b = layered_run(folder / name, **fault)  # type: ignore[arg-type]
        done = ran(program, folder, "diff", a, b)
        assert (done.returncode, done.stderr) == (1, ""), done.stderr
        said[name] = "The allocator is arena instead of native." in done.stdout
    assert said == {"gradient": True, "output": False, "same": False}


# What the page declares, put into `links` before anything else of the analyzer is loaded.
COMPARED = """
from gradtrace_analyzer.diff import links
from gradtrace_analyzer.diff.links import LinkTable, Of
{lines}
links.LINK_TABLES += (TENSORS,)
links.LINK_TABLE[TENSORS.table] = TENSORS
links.TABLE_NAMES += (TENSORS.table,)
at = links.LINKS.index("local_gradient")
links.LINKS = (*links.LINKS[:at], TENSORS.link, *links.LINKS[at:])
from gradtrace_analyzer.cli import main
main()
"""


def test_table_of_the_recipe_is_compared_by_its_declaration_alone(tmp_path: Path) -> None:
    program = COMPARED.replace("{lines}", shown_lines("contributing.md", "diff/links.py"))
    runs = [saved(tmp_path / "a", 1.0), saved(tmp_path / "b", 2.0)]

    def diff(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program, "diff", *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )

    text = diff(*runs, "--link", "saved_gradient", "--fail-on", "saved_gradient>=0.1")
    assert (text.returncode, text.stderr) == (1, ""), text.stderr
    assert (
        "Step 1, rank 0: grad_input 0 of Node 1 (saved gradient) differs by 2.8e-01." in text.stdout
    )
    assert "rounding explains up to 9.4e-16: float64, 1 layer" in text.stdout
    assert "Compared: rank 0, steps 0-2; 6 node_tensors" in text.stdout
    assert "Fails: saved_gradient: relative error 0.28" in text.stdout
    noisy = diff(*runs, "--noise", saved(tmp_path / "c", 2.0))
    assert noisy.returncode == 0 and "The same within noise" in noisy.stdout, noisy.stdout


def saved(path: Path, value: float) -> Path:
    """A run with the gradients of two Nodes in each of three steps, one of which holds the value."""
    tensors = [
        {"step": step, "backward_index": 0, "event_index": event, "direction": "grad_input", "position": 0,
         **summary_columns([value if (step, event) == (1, 1) else 1.0, 3.0])}
        for step in range(3)
        for event in range(2)
    ]  # fmt: skip
    calls = [
        {"step": step, "root": 0, "module_fqn": "", "phase": "forward", "call_index": 0,
         **summary_columns([1.0, 2.0], "output_")}
        for step in range(3)
    ]  # fmt: skip
    return build_run(path, {"module_calls": calls, "node_tensors": tensors})
