"""Journal and summary of the native observer, each alone: compiled without torch's and Python's headers, tried by a
program of its own (native_parts/*.cpp). The thorough ones run under ThreadSanitizer as well; `scripts/sanitize` runs
all."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gradtrace_recorder.observers.native import build, record_layouts

_TESTS = Path(__file__).parent / "native_parts"
_CPP = record_layouts.HEADER_FILE.parent.parent
PARTS = ("journal", "summary")


def compiled(part: str, folder: Path, *flags: str) -> Path:
    """The program that tries this part. Skips where nothing compiles, or not with these flags."""
    try:
        compiler, _ = build._compiler()
    except build.NotBuilt as error:
        pytest.skip(str(error))
    given = ["-std=c++20", "-O1", "-g", "-fno-strict-aliasing", "-ffp-contract=off", *flags]
    trial = folder / "trial.cpp"
    trial.write_text("int main() {}\n")
    if subprocess.run(
        [compiler, *given, str(trial), "-o", str(folder / "trial")],
        capture_output=True,
        check=False,
    ).returncode:
        pytest.skip(f"{compiler} does not link with {' '.join(flags)}")
    sources = [str(_TESTS / f"{part}.cpp"), str(_CPP / part / f"{part}.cpp")]
    program = folder / part
    subprocess.run(
        [compiler, *given, f"-I{_CPP}", f"-I{_TESTS}", *sources, "-pthread", "-o", str(program)],
        check=True,
        timeout=240,
    )
    return program


@pytest.mark.parametrize("part", PARTS)
def test_a_part_does_alone_what_it_should(tmp_path: Path, part: str) -> None:
    done = subprocess.run(
        [compiled(part, tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_threads_in_a_part_race_for_nothing(tmp_path: Path, part: str) -> None:
    """Under ThreadSanitizer, which sees a race whether or not it goes wrong."""
    program = compiled(part, tmp_path, "-fsanitize=thread", "-Wno-tsan")
    # Where addresses are laid out as it does not expect, it does not start.
    setarch = shutil.which("setarch")
    command = [*([setarch, "-R"] if setarch else []), str(program)]
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not start here")
    assert done.returncode == 0, done.stderr
