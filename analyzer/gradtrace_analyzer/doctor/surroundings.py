"""From the facts that a Python tells of itself to what they mean for a job that it would run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gradtrace_analyzer.doctor.finding import Finding
from gradtrace_analyzer.words.numbers import bytes_text, spans

# What jobs were recorded with in `scripts/matrix` (the recorder itself knows for torch); the oldest that is accepted.
TESTED = {"python": ("3.10", "3.11", "3.12"), "pyarrow": ("17", "26"), "numpy": ("1", "2")}
OLDEST = {"python": (3, 10), "torch": (2, 6)}
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p")
# What NCCL and the workers of a DataLoader ask for, in a container that was given no more: 64 MiB.
_SMALL_SHARED_MEMORY = 256 << 20
_SMALL_DISK = 1 << 30
_FEW_FILES = 1024

Facts = Mapping[str, Any]


def surroundings(facts: Facts, python: str) -> Iterator[Finding]:
    """What is there, in the order in which a job meets it."""
    yield _versions(facts)
    yield _torch(facts)
    yield _packages(facts, python)
    yield _start(facts, python)
    yield from _settings(facts)
    yield from _directory(facts)
    yield from _machine(facts)
    if facts["torch"] is not None:
        yield _native(facts, python)


def _versions(facts: Facts) -> Finding:
    version = facts["python"]["version"]
    said = f"{version}, {facts['python']['executable']}"
    if _numbers(version) < OLDEST["python"]:
        oldest = ".".join(map(str, OLDEST["python"]))
        return Finding("python", "wrong", f"{said}; gradtrace needs {oldest} or newer")
    if facts["system"] != "Linux":
        return Finding(
            "python", "wrong", f"{said}, on {facts['system']}; gradtrace records on Linux alone"
        )
    return _tested("python", version, said)


def _torch(facts: Facts) -> Finding:
    if facts["torch"] is None:
        if facts["packages"]["torch"] is None:
            return Finding(
                "torch",
                "wrong",
                "there is none in this Python: no job of it can be recorded",
                "name the Python that runs the job: --python .venv/bin/python",
            )
        return Finding(
            "torch", "wrong", f"it cannot be imported: {facts['torch_error']}", "mend that first"
        )
    version = facts["torch"]["version"]
    if _numbers(version) < OLDEST["torch"]:
        oldest = ".".join(map(str, OLDEST["torch"]))
        return Finding("torch", "wrong", f"{version}; gradtrace records torch {oldest} and newer")
    minors = {".".join(map(str, _numbers(tested))) for tested in facts["torch"]["tested"]}
    if ".".join(map(str, _numbers(version))) in minors:
        return Finding("torch", "ok", version)
    ordered = sorted(minors, key=_numbers)
    return Finding(
        "torch", "note", f"{version}; tested with {', '.join(ordered)}; see the self-test"
    )


def _packages(facts: Facts, python: str) -> Finding:
    held = {name: facts["packages"][name] for name in ("pyarrow", "numpy")}
    missing = [name for name, version in held.items() if version is None]
    if missing:
        return Finding(
            "packages",
            "wrong",
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
            f"{python} -m pip install {' '.join(missing)}",
        )
    said = ", ".join(f"{name} {version}" for name, version in held.items())
    others = [n for n, v in held.items() if not _is_tested(n, v)]
    if others:
        tested = ", ".join(f"{name} {' and '.join(TESTED[name])}" for name in others)
        return Finding("packages", "note", f"{said}; tested with {tested}")
    return Finding("packages", "ok", said)


def _start(facts: Facts, python: str) -> Finding:
    """Whether torch calls us at the end of its import."""
    auto = "or import gradtrace_recorder.auto in the job"
    if not facts["entry_points"]:
        return Finding(
            "start",
            "wrong",
            "torch does not find gradtrace among its backends: it lies in the path, and is not installed",
            f"{python} -m pip install gradtrace, {auto}",
        )
    if facts["autoload"] == "0":
        return Finding(
            "start",
            "wrong",
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from starting the recorder",
            f"unset it, {auto}",
        )
    return Finding("start", "ok", "torch starts the recorder at the end of its import")


def _settings(facts: Facts) -> Iterator[Finding]:
    settings = facts["settings"]
    if facts["settings_error"] is not None:
        yield Finding(
            "settings",
            "wrong",
            f"recording would be off: {facts['settings_error']}",
            "docs/reference/settings.md has what each can be",
        )
    elif settings is None:
        yield Finding(
            "settings",
            "note",
            "GRADTRACE_DIR is not set here: recording is off; the rest is told as of the current directory",
            "start the job with GRADTRACE_DIR=runs/a, before Python begins",
        )
    else:
        yield Finding("settings", "ok", _as_given(settings))
    for remark in facts["remarks"]:
        yield Finding("settings", "wrong", remark)


def _as_given(settings: Facts) -> str:
    shown = {name: value for name, value in settings.items() if value not in ([], 0)}
    return ", ".join(
        f"{name} {','.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in shown.items()
    )


def _directory(facts: Facts) -> Iterator[Finding]:
    about = facts["directory"]
    path, asked, space = about["path"], about["asked"], about["space"]
    if not about["is_directory"]:
        yield Finding("directory", "wrong", f"{asked} is no directory", "name another")
        return
    if about["write_error"]:
        where = path if about["exists"] else f"{path} cannot be made: {asked}"
        yield Finding(
            "directory",
            "wrong",
            f"{where} cannot be written into: {about['write_error']}",
            "name another in GRADTRACE_DIR, or mend its rights",
        )
        return
    kind = about["file_system"] or "a file system that is not known"
    said = f"{path} {'is there' if about['exists'] else 'can be made'}, on {kind}"
    if about["attempts"]:
        said += f"; it holds attempts {spans(about['attempts'])}, what is recorded next is another"
    is_remote = kind in _NETWORK or kind.startswith("fuse")
    yield Finding(
        "directory",
        "note" if is_remote else "ok",
        said + ("; each record crosses the network" if is_remote else ""),
        "record into a local directory and copy it afterwards" if is_remote else None,
    )
    free = "" if space is None else f"{bytes_text(space['free_bytes'])} are free"
    needed = facts["journal_bytes"]
    if about["allocation_error"]:
        yield Finding(
            "disk",
            "wrong",
            f"{about['allocation_error']}: each rank allocates {bytes_text(needed)} when it begins; {free}",
            "name a directory on another disk in GRADTRACE_DIR",
        )
    elif space is not None:
        is_small = space["free_bytes"] < _SMALL_DISK
        each = (
            "" if needed is None else f"; each rank allocates {bytes_text(needed)} when it begins"
        )
        yield Finding(
            "disk",
            "note" if is_small else "ok",
            free + each,
            "GRADTRACE_STEPS, or GRADTRACE_MODE=flight, record less" if is_small else None,
        )


def _machine(facts: Facts) -> Iterator[Finding]:
    shared, limits, needed = facts["shared_memory"], facts["limits"], facts["journal_bytes"] or 0
    if shared is not None:
        is_small = shared["free_bytes"] < _SMALL_SHARED_MEMORY
        yield Finding(
            "shared memory",
            "note" if is_small else "ok",
            f"{bytes_text(shared['free_bytes'])} are free in /dev/shm"
            + ("; DataLoader workers and NCCL may want more, gradtrace none" if is_small else ""),
            "docker run --shm-size 8g" if is_small else None,
        )
    if limits["file_bytes"] is not None and limits["file_bytes"] <= needed:
        yield Finding(
            "limits",
            "wrong",
            f"no file may be larger than {bytes_text(limits['file_bytes'])} (ulimit -f); "
            f"a journal is {bytes_text(needed)}",
            "ulimit -f unlimited",
        )
    elif limits["memory_bytes"] is not None:
        said = (
            f"a process may map {bytes_text(limits['memory_bytes'])} (ulimit -v), "
            f"{bytes_text(needed)} of it for a journal"
        )
        yield Finding("limits", "note", said)
    elif limits["open_files"] is not None and limits["open_files"] < _FEW_FILES:
        yield Finding(
            "limits",
            "note",
            f"{limits['open_files']} files may be open (ulimit -n); gradtrace takes two",
        )
    else:
        yield Finding("limits", "ok", "none that recording would meet")


def _native(facts: Facts, python: str) -> Finding:
    about = facts["native"]
    build = f"{python} -m gradtrace_recorder build"
    name = "native observer"
    if about["loads"] and about["unused"]:
        return Finding(name, "note", f"built, and not used: {about['unused']}")
    if about["loads"]:
        return Finding(name, "ok", f"built for this torch and this Python: {about['built']}")
    if about["built"]:
        return Finding(
            name, "wrong", f"built, and does not load: {about['why']}", f"{build} --again"
        )
    if about["why"]:
        return Finding(
            name, "note", f"not to be had: {about['why']}; Nodes are watched by the Python observer"
        )
    if about["compiler"] is None:
        return Finding(
            name,
            "note",
            "not built, and there is no C++ compiler; Nodes are watched by the Python observer, which costs more",
            f"install g++ or clang++, then {build}",
        )
    return Finding(
        name,
        "note",
        "not built; Nodes are watched by the Python observer, which costs more",
        build,
    )


def _tested(name: str, version: str, said: str) -> Finding:
    if _is_tested(name, version):
        return Finding(name, "ok", said)
    return Finding(name, "note", f"{said}; tested with {', '.join(TESTED[name])}")


def _is_tested(name: str, version: str) -> bool:
    return any(version == one or version.startswith(f"{one}.") for one in TESTED[name])


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor."""
    parts = version.split("+")[0].split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)
