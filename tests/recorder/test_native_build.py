"""How the native observer is built and found. The compiler here is a script: it gives out a library built before."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from gradtrace_recorder.observers.native import build
from gradtrace_recorder.observers.native.build import (
    CACHE_VARIABLE,
    NotBuilt,
    build_native,
    built_library,
)
from support.environment import native_observer
from support.recordings.in_process import recording, rows

_COMPILER = """#!/bin/sh
echo "$@" >> {log}
case "$1" in
--version) echo "a compiler, version 1" ;;
-shared) sleep 0.3; for last; do :; done; cat {library} >"$last"; chmod +rwx "$last" ;;
esac
"""


@pytest.fixture(scope="module")
def library() -> Path:
    before = os.environ[CACHE_VARIABLE]
    try:
        return native_observer.build_or_skip()
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


def test_a_build_that_was_killed_leaves_nothing_that_is_found_and_hinders_no_other(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(compiler(tmp_path, library)))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    script = (tmp_path / "compiler").read_text()
    (tmp_path / "compiler").write_text(script.replace("sleep 0.3", "sleep 60"))
    command = [sys.executable, "-m", "gradtrace_recorder", "build"]
    killed = subprocess.Popen(command, start_new_session=True)
    until = time.monotonic() + 60
    while not (tmp_path / "log").exists() or "-shared" not in (tmp_path / "log").read_text():
        assert time.monotonic() < until
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait(10)
    assert list((tmp_path / "cache").rglob("build-*")) and built_library() is None
    (tmp_path / "compiler").write_text(script)
    assert build_native().read_bytes() == library.read_bytes()
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


def test_without_a_home_and_where_nothing_can_be_kept_it_says_so_and_python_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import torch

    def nobody(_: int) -> None:
        raise KeyError

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    (tmp_path / "file").write_text("")
    with pytest.raises(NotBuilt, match=r"cannot be kept in .*name another folder in GRADTRACE_"):
        build_native()
    for name in ("HOME", "XDG_CACHE_HOME", CACHE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.raises(NotBuilt, match="no home directory; name a folder in GRADTRACE_"):
        build_native()
    with recording(tmp_path / "run", observer="native", strict=False):
        torch.ones(2, requires_grad=True).sum().backward()
    assert "none is built for this torch" in capfd.readouterr().err
    assert rows(tmp_path / "run", "SELECT count(*) FROM backward_passes") == [(1,)]


def test_a_library_that_was_cut_off_ends_no_job_and_is_built_anew(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a full disk or a power failure leaves one: to load it raises SIGBUS. In a process of its own, for that."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler(tmp_path, library)))
    built = build_native()
    whole = built.read_bytes()
    built.write_bytes(whole[: len(whole) // 4])
    job = "import torch; torch.ones(2, requires_grad=True).sum().backward()"
    environment = {**os.environ, "GRADTRACE_DIR": str(tmp_path / "run")}
    done = subprocess.run(
        [sys.executable, "-c", job], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stderr.count("\n") == 1, done.stderr
    assert "is damaged (python -m gradtrace_recorder build makes a new one)" in done.stderr
    assert rows(tmp_path / "run", "SELECT count(*) FROM backward_passes") == [(1,)]
    assert build_native() == built and built.read_bytes() == whole
    calls = len((tmp_path / "log").read_text().splitlines())
    (built.parent / "lock").unlink()
    (built.parent / "lock").mkdir()  # nothing can be locked there, nor need it be
    assert build_native() == built
    assert len((tmp_path / "log").read_text().splitlines()) == calls + 1  # which compiler it is


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


def test_a_compiler_that_is_named_and_does_not_run_is_not_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for named in ("/nonexistent", "g++ -O1", "false"):
        monkeypatch.setenv("CXX", named)
        with pytest.raises(
            NotBuilt, match=re.escape(f"CXX names {named!r}, which is no compiler that runs")
        ):
            build_native()


def test_a_library_that_fails_its_trial_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    junk = tmp_path / "junk.so"
    junk.write_bytes(b"no library")
    monkeypatch.setenv("CXX", str(compiler(tmp_path, junk)))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    with pytest.raises(NotBuilt, match="ended with 1: ImportError"):
        build_native()
    assert not list((tmp_path / "cache").rglob("*.so"))


@pytest.mark.parametrize("which", ["cache", "library"])
def test_a_library_that_others_could_have_written_is_not_loaded(
    tmp_path: Path,
    library: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    which: str,
) -> None:
    import torch

    cache = tmp_path / "cache"
    there = cache / library.relative_to(native_observer.CACHE)
    there.parent.mkdir(parents=True)
    there.write_bytes(library.read_bytes())
    monkeypatch.setenv(CACHE_VARIABLE, str(cache))
    (cache if which == "cache" else there).chmod(0o777)
    with recording(tmp_path / "run", strict=False):
        torch.ones(2, requires_grad=True).sum().backward()
    said = capfd.readouterr().err
    assert "may be written by anybody" in said and "recorded with the Python observer" in said
    if which == "cache":
        with pytest.raises(NotBuilt, match="may be written by anybody; name another folder"):
            build_native()


def test_what_is_built_is_written_by_its_owner_alone(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the umask, which in some containers is none: else it would not be loaded."""
    monkeypatch.setenv("CXX", str(compiler(tmp_path, library)))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    before = os.umask(0)
    try:
        built = build_native()
    finally:
        os.umask(before)
    places = [built, *built.parents][: len(built.relative_to(tmp_path).parts)]
    assert [place.stat().st_mode & 0o022 for place in places] == [0] * 4


def test_a_python_without_the_gil_is_left_alone(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading an extension that does not know of it would switch the lock on for the whole job."""
    monkeypatch.setenv(CACHE_VARIABLE, str(native_observer.CACHE))
    assert build.built_library() is not None
    real = sysconfig.get_config_var
    monkeypatch.setattr(
        sysconfig, "get_config_var", lambda name: 1 if name == "Py_GIL_DISABLED" else real(name)
    )
    assert build.built_library() is None
    with pytest.raises(NotBuilt, match="needs Python's global lock"):
        build_native()


def test_a_library_that_does_not_load_is_said_and_python_records(
    tmp_path: Path,
    library: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    import torch

    broken = tmp_path / "cache" / library.relative_to(native_observer.CACHE)
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"no library")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    with recording(tmp_path / "run", strict=False):
        torch.ones(2, requires_grad=True).sum().backward()
    assert "does not load" in capfd.readouterr().err
    assert rows(tmp_path / "run", "SELECT count(*) FROM backward_passes") == [(1,)]


def test_a_compiler_that_says_nothing_of_itself_is_used(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = compiler(tmp_path, library)
    script.write_text(script.read_text().replace('echo "a compiler, version 1"', "true"))
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    assert build_native().exists()
