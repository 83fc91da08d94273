"""Builds the native observer against the job's own torch, and finds what was built. A job never compiles.

Neither ninja nor setuptools is asked for: one call of the compiler for each source. What is built lies in a cache
of the user's, in a folder for this torch, its ABI, this Python and these sources, under a name that says which compiler
made it. Several processes may build at once: one does, the others wait for it; what is there is whole, as it comes by
a rename.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradtrace_recorder.observers.native import record_layouts
from gradtrace_recorder.settings.variables import NATIVE_CACHE

NAME = "gradtrace_native"
CACHE_VARIABLE = NATIVE_CACHE.variable
_CPP = Path(__file__).parent / "cpp"
_SOURCES = (
    "summary/summary.cpp",
    "journal/journal.cpp",
    "python/journal_type.cpp",
    "python/observer.cpp",
)
# Contracted operations would give other bits on other processors; the vector code asks for them by name. Elements are
# copied as words and read as numbers, which strict aliasing forbids.
_FLAGS = (
    "-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-strict-aliasing", "-DNDEBUG",
)  # fmt: skip
_LIBRARIES = ("torch_python", "torch", "torch_cpu", "c10")
_SECONDS = 900


class NotBuilt(RuntimeError):
    """Why there is no native observer; the text says what would help."""


def build_native(*, again: bool = False) -> Path:
    """Build the native observer for the torch of this Python, if that was not done yet. Where it lies.

    `again` builds it even so. Raises NotBuilt.
    """
    if _has_no_gil():
        raise NotBuilt(
            "the native observer needs Python's global lock, and this Python runs without; "
            "jobs are recorded by the Python observer"
        )
    if not record_layouts.is_fresh():
        raise NotBuilt(
            f"{record_layouts.HEADER_FILE.name} is not the one of gradtrace_schemas; scripts/reference writes it"
        )
    compiler, version = _compiler()
    try:
        folder = _folder()
    except RuntimeError as error:  # of `Path.home`
        raise NotBuilt(
            f"the native observer has no place: there is no home directory; name a folder in {CACHE_VARIABLE}"
        ) from error
    built = folder / f"{NAME}-{_digest(version)}.so"
    try:
        if not again and _is_whole(built) and _why_not_trusted(built) is None:
            return built  # where nothing can be written, too
        for place in reversed((folder, *folder.parents)):
            if not place.exists():
                # Whatever the umask: nobody else writes here.
                place.mkdir(mode=0o755, exist_ok=True)
        reason = _why_not_trusted(folder)
        if reason is not None:
            raise NotBuilt(
                f"the native observer is not built where others could change it: {reason}; "
                f"name another folder in {CACHE_VARIABLE}"
            )
        with _alone(folder / "lock"):
            if again or not _is_whole(built):
                _build(compiler, built)
    except OSError as error:
        raise NotBuilt(
            f"the native observer cannot be kept in {str(folder)!r}: {error.strerror or error}; "
            f"name another folder in {CACHE_VARIABLE}"
        ) from error
    return built


def built_library() -> Path | None:
    """The newest that was built for this torch, this Python and these sources."""
    if _has_no_gil():
        return None  # loading it would switch the lock on, for the whole job
    try:
        found = sorted(_folder().glob(f"{NAME}-*.so"), key=lambda path: path.stat().st_mtime_ns)
    except (OSError, RuntimeError, AttributeError):  # no home, or a torch that is built otherwise
        return None
    return found[-1] if found else None


def library() -> Any:
    """The loaded native observer, or None where none is built. Raises ImportError for one that does not load, and
    for one that another user could have put there."""
    path = built_library()
    if path is None:
        return None
    reason = _why_not_trusted(path)
    if reason is not None:
        raise ImportError(f"others could have changed it: {reason}")
    if not _is_whole(path):
        raise ImportError(
            f"{str(path)!r} is damaged (python -m gradtrace_recorder build makes a new one)"
        )
    found = _loaded(path)
    if found.layouts != record_layouts.digest():
        raise ImportError(f"{str(path)!r} was built for other records")
    return found


@functools.cache
def _loaded(path: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _build(compiler: str, built: Path) -> None:
    import torch

    root = Path(torch.__path__[0])
    includes = [
        _CPP,
        root / "include",
        root / "include" / "torch" / "csrc" / "api" / "include",
        sysconfig.get_paths()["include"],
    ]
    given = [f"-I{path}" for path in includes] + _flags_of_torch()
    for left in built.parent.glob("build-*"):  # of one that was killed: we are alone
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=built.parent) as place:
        objects = []
        for source in _SOURCES:
            into = str(Path(place) / f"{Path(source).stem}.o")
            _run([compiler, *_FLAGS, *given, "-c", str(_CPP / source), "-o", into])
            objects.append(into)
        whole = Path(place) / built.name
        libraries = [f"-L{root / 'lib'}", *(f"-l{name}" for name in _LIBRARIES)]
        _run([compiler, "-shared", *objects, *libraries, "-o", str(whole)])
        if not _is_whole(whole):
            _seal(whole)
        whole.chmod(0o755)
        _try(whole)
        os.replace(whole, built)


def _seal(path: Path) -> None:
    """Write the digest of what the file holds behind it, where no loader looks, and all of it to the disk."""
    with open(path, "r+b") as file:
        digest = hashlib.sha256(file.read()).digest()
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


def _is_whole(path: Path) -> bool:
    """Whether the file ends with its digest. A library that lacks its end takes the process along: SIGBUS."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    return len(data) > size and hashlib.sha256(data[:-size]).digest() == data[-size:]


# Run in a process of its own, with the library's path: hooks of ours between others must change nothing.
_TRIAL = f"""
import pathlib, sys, torch
from {__name__} import _loaded

library = _loaded(pathlib.Path(sys.argv[1]))
assert library.summary(torch.ones(3), True)[0] > 1.7
x, w = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
y, seen = x * w, []
for _ in range(2):
    y.grad_fn.register_prehook(lambda gradients: seen.append(gradients[0].sum().item()))
    y.grad_fn.register_hook(lambda given, got: seen.append((given[0] + given[1] + got[0]).sum().item()))
    library.move_lists(y.grad_fn)
y.sum().backward()
assert (x.grad.tolist(), w.grad.tolist()) == ([2.0] * 3, [1.0] * 3), "gradients"
assert seen == [3.0, 3.0, 12.0, 12.0], "what hooks see"

class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

leaf, hooked = (w.expand(3).grad_fn.next_functions[0][0] for w in (x, w))
hooked.register_hook(lambda given, got: None)
made = Own.apply(x), x * 2  # a Function's Node goes with its tensor (2.9)
nodes = [*(one.grad_fn for one in made), leaf, hooked]
found = [library.traits(node)[:3] for node in nodes]
assert found == [(True, False, False), (False, False, False), (False, True, False), (False, True, True)], found
"""


def _try(path: Path) -> None:
    """Try it in a process of its own, so that one that does not load, or disturbs, is never found."""
    package = Path(__file__).resolve().parents[3]
    paths = os.pathsep.join([str(package), *(p for p in sys.path if p)])
    _run(
        [sys.executable, "-c", _TRIAL, str(path)],
        {**os.environ, "PYTHONPATH": paths, "GRADTRACE_DIR": ""},
    )


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, env=environment, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NotBuilt(
            f"the native observer was not built: {Path(command[0]).name} took longer than {_SECONDS} seconds"
        ) from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        errors = [line for line in said if "error" in line.lower()] or said
        raise NotBuilt(
            f"the native observer was not built: {Path(command[0]).name} ended with {done.returncode}: "
            f"{errors[0] if errors else 'and said nothing'}"
        )


def _compiler() -> tuple[str, str]:
    """The C++ compiler, and the first line that it says of itself."""
    named = os.environ.get("CXX", "").strip()
    for name in [named] if named else ["c++", "g++", "clang++"]:
        path = shutil.which(name)
        if path is not None:
            done = subprocess.run(
                [path, "--version"], capture_output=True, text=True, timeout=60, check=False
            )
            if done.returncode == 0:
                said = done.stdout.splitlines() or [""]
                return path, f"{said[0]} {platform.machine()}"
    if named:
        raise NotBuilt(
            f"CXX names {named!r}, which is no compiler that runs (a path or a name, without options); "
            "without CXX it is c++, g++ or clang++"
        )
    raise NotBuilt(
        "the native observer needs a C++ compiler (c++, g++ or clang++; CXX names another), and there is none; "
        "jobs are recorded by the Python observer"
    )


def _folder() -> Path:
    """Where libraries for this torch, this Python and these sources lie."""
    import torch

    parts: list[str | bytes] = [
        record_layouts.digest(),
        str(torch.__version__),
        str(getattr(torch.version, "git_version", "")),
        *_flags_of_torch(),
        sysconfig.get_config_var("SOABI") or "",
        platform.machine(),
        *_FLAGS,
    ]
    with contextlib.suppress(OSError):  # one's own build of torch changes under the same version
        binary = Path(torch.__path__[0]) / "lib" / "libtorch_python.so"
        parts.append(str(binary.stat().st_size))
    for path in sorted(path for kind in ("*.cpp", "*.h") for path in _CPP.rglob(kind)):
        parts += [str(path.relative_to(_CPP)), path.read_bytes()]
    release = str(torch.__version__).replace("/", "-")
    return _cache() / "native" / f"torch-{release}-{_digest(*parts)}"


def _flags_of_torch() -> list[str]:
    import torch

    return [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]


def _cache() -> Path:
    chosen = os.environ.get(CACHE_VARIABLE, "")
    if chosen:
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "gradtrace"


def _has_no_gil() -> bool:
    """Whether this Python is one of those built to run without its global lock."""
    return bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def _why_not_trusted(path: Path) -> str | None:
    """Why another user could have put there what lies at `path`, None where only those could whom we trust already:
    ourselves, root, and whoever installed us."""
    trusted = {os.geteuid(), 0, Path(__file__).stat().st_uid}
    cache = _cache()
    for place in (path, *path.parents):
        about = place.stat()
        if about.st_uid not in trusted:
            return f"{str(place)!r} belongs to user {about.st_uid}"
        if about.st_mode & stat.S_IWOTH and not (place.is_dir() and about.st_mode & stat.S_ISVTX):
            return f"{str(place)!r} may be written by anybody"
        if place == cache:
            break
    return None


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process at a time; the system takes the lock from one that dies."""
    with open(lock, "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
