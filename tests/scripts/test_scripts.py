"""Every script of scripts/ runs: each at the smallest size that it offers, in the environment of the tests.

A script that is new has no entry here and fails the first test. What is exercised by other means says where.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"

# Those that need no run of their own here, by the file that runs them.
RUN_ELSEWHERE = {
    "check": ".ci/run",
    "matrix": "scripts/check",
    "gpu-check": "tests/whole/test_gpu_check.py",
}


def ran(name: str, *arguments: object, code: int = 0) -> str:
    """What a script printed; it installs nothing, and finds the Python of the tests."""
    bins = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        [str(SCRIPTS / name), *map(str, arguments)],
        cwd=ROOT,
        # What pytest itself was told is not for the pytest of a script.
        env={
            **os.environ,
            "ENVIRONMENT_AS_IT_IS": "1",
            "PATH": bins,
            "TERM": "dumb",
            "PYTEST_ADDOPTS": "",
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def accuracy(folder: Path) -> None:
    """One part of the cases is begun, and a page is made of what it kept."""
    ran("accuracy", "--faults", 1, "--part", "1/2", "--seconds", 1, "--keep", folder / "kept")
    ran("accuracy", "--merge", folder / "kept", "--page", folder / "page.md")
    assert "| model |" in (folder / "page.md").read_text()


def bench(folder: Path) -> None:
    """Every workload."""
    names = ran("bench", "--list").split()
    assert {"drain", "diff", "ddp"} <= set(names)
    said = ran("bench", "--quick", *names)
    found = re.findall(r"^-- (\w+)\n(?!-- ).+", said, re.MULTILINE)
    assert found == names, said


def demo(folder: Path) -> None:
    said = ran("demo", folder / "runs")
    assert re.findall(r"^\$ analyzer (\w+)", said, re.MULTILINE) == ["info", "diff", "diff", "sql"]
    assert "blocks.1.mlp" in said


def fuzz(folder: Path) -> None:
    assert ran("fuzz", 0.2, 1).count("seed 1: ") == 2


def kills(folder: Path) -> None:
    assert "1 kills with seed 1, 0 with something wrong" in ran("kills", 1, 1)


def regold(folder: Path) -> None:
    """Nothing is rewritten: the tests that it would run are named."""
    said = ran("regold", "--collect-only", "-q", "-p", "no:cacheprovider")
    assert {line.split("::")[0] for line in said.splitlines() if "::" in line} == {
        "tests/analyzer/test_golden.py",
        "tests/whole/test_diff.py",
    }


def sanitize(folder: Path) -> None:
    """Its tests are named. To build and run them takes minutes, and a compiler."""
    said = ran("sanitize", "--list")
    files = {line.split("::")[0] for line in said.splitlines() if "::" in line}
    assert len(files) == 8 and "tests/recorder/test_native.py" in files
    threads = ran("sanitize", "--list", "thread")
    assert "test_threads_in_a_part_race_for_nothing[journal]" in threads


def pictures(folder: Path) -> None:
    """Of two recordings that are kept, so that no job need run here."""
    run = ROOT / "tests" / "data" / "schema-5"
    ran("pictures", run, run, folder / "pictures")
    drawn = {path.name: path.read_text() for path in (folder / "pictures").iterdir()}
    assert set(drawn) == {"diff.svg", "how.svg"} and "compared with itself" in drawn["diff.svg"]


def rejudge(folder: Path) -> None:
    """One kept pair; all of them are asked by scripts/check --all."""
    assert "0 of 1 answers changed" in ran("rejudge", "--only", "check accuracy/1")


def reference(folder: Path) -> None:
    assert ran("reference", "--check") == ""


TORCHS_TESTS = """
import os, sys, unittest, torch
class TestSmall(unittest.TestCase):
    def test_trains(self):
        torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    def test_counts_hooks(self):
        self.assertEqual(len(torch.nn.modules.module._global_forward_hooks), 0)
    def test_sees_us(self):
        self.test_trains()
        self.assertNotIn("gradtrace_recorder.session.session", sys.modules)
    def test_vanishes(self):
        self.test_trains()
        if "gradtrace_recorder.session.session" in sys.modules: os._exit(3)
    @unittest.skip("as torch does")
    def test_skipped(self): pass
"""


def torch_tests(folder: Path) -> None:
    """A file of tests of which one trains, one may end otherwise, and one may not."""
    (folder / "test").mkdir()
    (folder / "test" / "test_small.py").write_text(TORCHS_TESTS)
    asked = ("torch-tests", folder, "--files", "test_*.py", "--observers", "python", "--tests")
    assert ran(*asked, "trains or hooks or skipped").splitlines() == [
        "test_small.py: 2 passed, 1 skipped; 1 differ",
        "  TestSmall::test_counts_hooks: bare passed, python failed "
        "(it may: it counts or replaces torch's global hooks, of which some are ours)",
        "in all: 3 compared, 2 the same, 1 may differ, 5 Node events (python)",
    ]
    assert ran(*asked, "sees", code=1).splitlines() == [
        "test_small.py: 1 passed; 1 differ",
        "  TestSmall::test_sees_us: bare passed, python failed",
        "in all: 1 compared, 1 differ, 5 Node events (python)",
    ]
    # A process that dies ends the file: what every way came to before is compared, and the file is no success.
    assert ran(*asked, "trains or vanishes", code=1).splitlines() == [
        "test_small.py: 1 passed; 0 differ",
        "  python: exit status 3: test_small.py::TestSmall::test_vanishes",
        "in all: 1 compared, 1 the same",
    ]
    # A file whose tests cannot be collected would look as if all was well.
    (folder / "test" / "test_small.py").write_text("import not_there")
    told = ran(*asked, "trains", code=1).splitlines()
    assert told[0] == "test_small.py: no tests; 0 differ"
    assert told[1].startswith("  bare: exit status 2: ")


def its_tests(folder: Path) -> None:
    """With its arguments, which choose one quick file."""
    assert " passed" in ran("test", "-p", "no:cacheprovider", "tests/support_tests/test_index.py")


SMOKE: dict[str, Callable[[Path], None]] = {
    "accuracy": accuracy,
    "bench": bench,
    "demo": demo,
    "fuzz": fuzz,
    "kills": kills,
    "regold": regold,
    "sanitize": sanitize,
    "pictures": pictures,
    "reference": reference,
    "rejudge": rejudge,
    "test": its_tests,
    "torch-tests": torch_tests,
}
SLOW = {"accuracy", "bench", "demo", "kills", "rejudge", "torch-tests"}


def test_every_script_is_run_by_a_test() -> None:
    there = {path.name for path in SCRIPTS.iterdir() if path.is_file() and os.access(path, os.X_OK)}
    assert there == set(SMOKE) | set(RUN_ELSEWHERE)
    assert not set(SMOKE) & set(RUN_ELSEWHERE)


@pytest.mark.parametrize("name", RUN_ELSEWHERE)
def test_file_that_runs_a_script_names_it(name: str) -> None:
    assert re.search(rf"scripts\W+{name}\b", (ROOT / RUN_ELSEWHERE[name]).read_text())


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in SMOKE]
)
def test_script_runs(name: str, tmp_path: Path) -> None:
    SMOKE[name](tmp_path)
