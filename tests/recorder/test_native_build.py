"""How the native observer is built and found. The compiler here is a script: it gives out a library built before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradtrace_recorder.observers.native.build import CACHE_VARIABLE, NotBuilt, build_native
from support import native
from support.recorded import recording, rows

_COMPILER = """#!/bin/sh
echo "$@" >> {log}
case "$1" in
--version) echo "a compiler, version 1" ;;
-shared) sleep 0.3; for last; do :; done; cp {library} "$last" ;;
esac
"""


@pytest.fixture(scope="module")
def library() -> Path:
    before = os.environ[CACHE_VARIABLE]
    try:
        return native.build_or_skip()
    finally:
        os.environ[CACHE_VARIABLE] = before


def compiler(folder: Path, library: Path) -> Path:
    script = folder / "compiler"
    script.write_text(_COMPILER.format(log=folder / "log", library=library))
    script.chmod(0o755)
    return script


def test_two_processes_that_build_at_once_build_once(tmp_path: Path, library: Path) -> None:
    command = [sys.executable, "-m", "gradtrace_recorder", "build"]
    environment = {
        **os.environ,
        "CXX": str(compiler(tmp_path, library)),
        CACHE_VARIABLE: str(tmp_path / "cache"),
    }
    both = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = {process.communicate(timeout=240)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(said) == 1 and Path(said.pop().strip()).read_bytes() == library.read_bytes()
    calls = (tmp_path / "log").read_text().splitlines()
    assert sum(call.startswith("-shared") for call in calls) == 1
    assert not list((tmp_path / "cache").rglob("build-*"))


def test_without_a_compiler_it_says_so_and_python_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import torch

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    with pytest.raises(NotBuilt, match="needs a C\\+\\+ compiler"):
        build_native()
    with recording(tmp_path / "run", observer="native", strict=False):
        torch.ones(2, requires_grad=True).sum().backward()
    assert "none is built for this torch" in capfd.readouterr().err
    assert rows(tmp_path / "run", "SELECT count(*) FROM backward_passes") == [(1,)]


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "compiler"
    script.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo v && exit\necho 'x.h: error: no such header' >&2; exit 4\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    with pytest.raises(NotBuilt, match=r"compiler ended with 4: x\.h: error: no such header"):
        build_native()
    assert not list((tmp_path / "cache").rglob("*.so")) and not list(
        (tmp_path / "cache").rglob("build-*")
    )


def test_a_library_that_does_not_load_is_said_and_python_records(
    tmp_path: Path,
    library: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    import torch

    broken = tmp_path / "cache" / library.relative_to(native.CACHE)
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"no library")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    with recording(tmp_path / "run", strict=False):
        torch.ones(2, requires_grad=True).sum().backward()
    assert "does not load" in capfd.readouterr().err
    assert rows(tmp_path / "run", "SELECT count(*) FROM backward_passes") == [(1,)]


def test_a_library_that_lost_its_end_is_said_not_loaded_and_built_again(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mapped, it would kill the job where it is read past its end; so the job is a process of its own."""
    cache = tmp_path / "cache" / library.parent.parent.name / library.parent.name
    cache.mkdir(parents=True)
    cut = cache / library.name
    cut.write_bytes(library.read_bytes()[:100_000])
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    source = "import torch; torch.ones(2, requires_grad=True).sum().backward(); print('fine')"
    environment = os.environ | {
        "GRADTRACE_DIR": str(tmp_path / "run"),
        "GRADTRACE_OBSERVER": "auto",
    }
    job = subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, timeout=100
    )
    assert (job.returncode, job.stdout) == (0, "fine\n")
    assert "is damaged" in job.stderr and "recorded with the Python observer" in job.stderr
    monkeypatch.setenv("CXX", str(compiler(tmp_path, library)))
    assert build_native().read_bytes() == library.read_bytes()


def test_a_compiler_that_says_nothing_of_itself_is_used(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = compiler(tmp_path, library)
    script.write_text(script.read_text().replace('echo "a compiler, version 1"', "true"))
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    assert build_native().exists()
