"""What there is around a job that would be started here: facts for `analyzer doctor`, without a verdict on them.

Printed as JSON by `python -m gradtrace_recorder examine`, so that the analyzer, which never loads torch, can ask any
Python. Nothing is recorded, and nothing stays behind: the one file that is made is removed again.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradtrace_recorder.settings.variables import (
    Settings,
    SettingsError,
    settings_from,
    unknown_variables,
)

_PACKAGES = ("gradtrace", "torch", "pyarrow", "numpy")
_SHARED_MEMORY = "/dev/shm"


def examination(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The facts. What could not be found out is None, its reason beside it."""
    settings, error = _settings(environment)
    directory = os.getcwd() if settings is None else settings.directory
    journal_bytes = _journal_bytes()
    return {
        "python": {"executable": sys.executable, "version": platform.python_version()},
        "system": platform.system(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "entry_points": [point.value for point in _entry_points()],
        "autoload": environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD"),
        "settings": None if settings is None else {**settings.as_json(), "observer": settings.observer},
        "settings_error": error,
        "remarks": list(
            unknown_variables(environment) if settings is None else settings.remarks
        ),
        "directory": directory_facts(Path(directory), journal_bytes),
        "journal_bytes": journal_bytes,
        "shared_memory": _space(_SHARED_MEMORY),
        "limits": {
            "file_bytes": _limit(resource.RLIMIT_FSIZE),
            "memory_bytes": _limit(resource.RLIMIT_AS),
            "open_files": _limit(resource.RLIMIT_NOFILE),
        },
        **_torch(settings),
    }  # fmt: skip


def directory_facts(place: Path, journal_bytes: int | None) -> dict[str, Any]:
    """The run's directory, or, where it does not exist yet, the nearest one above, in which it would be made."""
    there = place
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    facts: dict[str, Any] = {
        "path": str(place),
        "exists": os.path.lexists(place),
        "asked": str(there),
        "is_directory": there.is_dir(),
        "file_system": _file_system(there),
        "space": _space(str(there)),
        "write_error": None,
        "allocation_error": None,
        "attempts": _attempts(place),
    }
    probe = there / f".gradtrace-doctor-{os.getpid()}"
    try:
        descriptor = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError as error:
        facts["write_error"] = error.strerror or str(error)
        return facts
    try:
        if journal_bytes is not None:
            os.posix_fallocate(descriptor, 0, journal_bytes)
    except OSError as error:
        facts["allocation_error"] = error.strerror or str(error)
    finally:
        os.close(descriptor)
        probe.unlink(missing_ok=True)
    return facts


def _settings(environment: Mapping[str, str]) -> tuple[Settings | None, str | None]:
    try:
        return settings_from(environment), None
    except SettingsError as error:
        return None, str(error)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    """Ours, of those that torch calls at the end of its import."""
    points = importlib.metadata.entry_points(group="torch.backends")
    return [point for point in points if point.value.startswith("gradtrace_recorder.")]


def _journal_bytes() -> int | None:
    """How much a rank allocates when it begins; None where pyarrow or numpy is missing."""
    try:
        from gradtrace_recorder.journal.writer import HALF_RECORDS
        from gradtrace_schemas.journal import RECORD_BYTES
    except ImportError:
        return None
    return int(2 * HALF_RECORDS * RECORD_BYTES)


def _space(path: str) -> dict[str, int] | None:
    try:
        total, _, free = shutil.disk_usage(path)
    except OSError:
        return None
    return {"total_bytes": total, "free_bytes": free}


def _limit(kind: int) -> int | None:
    """What this process may take of it; None: as much as it wants."""
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _file_system(path: Path) -> str | None:
    """The type of what is mounted there, as /proc/self/mounts has it."""
    best, found = -1, None
    real = os.path.realpath(path)
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, where, kind, *_ = line.split(" ")
        where = where.replace("\\040", " ")
        inside = real == where or real.startswith(where.rstrip("/") + "/")
        if inside and len(where) >= best:
            best, found = len(where), kind
    return found


def _attempts(run: Path) -> list[int]:
    """Which attempts the directory holds already."""
    try:
        from gradtrace_schemas import layout

        names = os.listdir(run / layout.ATTEMPTS)
    except (ImportError, OSError):
        return []
    return sorted(n for name in names if (n := layout.attempt_of(name)) is not None)


def _torch(settings: Settings | None) -> dict[str, Any]:
    """What only an imported torch tells. Armed by GRADTRACE_DIR or not, nothing happens here that is an event."""
    try:
        import torch

        from gradtrace_recorder.torch_internals.privates import TESTED_TORCH

        facts: dict[str, Any] = {
            "torch": {"version": str(torch.__version__), "tested": list(TESTED_TORCH)},
            "torch_error": None,
        }
    except Exception as error:
        return {"torch": None, "torch_error": f"{type(error).__name__}: {error}", "native": None}
    try:
        facts["native"] = _native(settings)
    except Exception as error:
        facts["native"] = {
            "built": None, "loads": False, "why": f"{type(error).__name__}: {error}", "compiler": None, "unused": None
        }  # fmt: skip
    return facts


def _native(settings: Settings | None) -> dict[str, Any]:
    """Whether the native observer is built and loads, what would compile it, and why these settings do not use it."""
    from gradtrace_recorder.observers.native import build, choice

    built = build.built_library()
    why = None
    if built is not None:
        try:
            build.library()
        except Exception as error:
            why = str(error)
    try:
        compiler: str | None = build._compiler()[1]
    except build.NotBuilt:
        compiler = None
    unused = None
    if settings is not None:
        asked = "GRADTRACE_OBSERVER asks for the Python one"
        unused = asked if settings.observer == "python" else choice.why_python(settings)
    return {
        "built": None if built is None else str(built),
        "loads": built is not None and why is None,
        "why": why,
        "compiler": compiler,
        "unused": unused,
    }
