"""What a process runs under: versions, variables, switches of torch, command line, commit. Read once, at first event.

Nothing here asks a device, starts a process or waits: variables and switches are read where they lie, and of a
repository at most four small files. What cannot be read is left out.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gradtrace_schemas import SCHEMA_VERSION

# Variables that are known to change numbers or the order of reductions: of these families all, but those below.
VARIABLE_PREFIXES = (
    "ATEN_",
    "CUBLAS_",
    "CUBLASLT_",
    "CUDA_",
    "CUDNN_",
    "DNNL_",
    "GLOO_",
    "HSA_",
    "KMP_",
    "MIOPEN_",
    "MKL_",
    "NCCL_",
    "NVIDIA_",
    "OMP_",
    "ONEDNN_",
    "OPENBLAS_",
    "PYTORCH_",
    "RCCL_",
    "ROCBLAS_",
    "TORCHDYNAMO_",
    "TORCHINDUCTOR_",
    "TORCH_",
    "TRITON_",
    "XLA_",
)
VARIABLES = ("PYTHONHASHSEED",)

# Places, names of machines and logs of those families, which change no number.
_OTHERWISE = re.compile(
    r"DIR|PATH|HOME|CACHE|FILE|LOG|SOCKET|IFNAME|HOSTID|COMM_ID|DEBUG|DUMP|TRACE|VERSION|REQUIRE"
)
_SECRET = re.compile(
    r"SECRET|TOKEN|PASSW|CREDENTIAL|AUTH|API[-_]?KEY|ACCESS[-_]?KEY", re.IGNORECASE
)
_MOST_CHARACTERS = 200
_MOST_FOLDERS = 40
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")

_SWITCHES: Mapping[str, Callable[[], Any]] = {
    "num_threads": lambda: torch.get_num_threads(),
    "default_dtype": lambda: str(torch.get_default_dtype()).removeprefix("torch."),
    "deterministic_algorithms": lambda: torch.are_deterministic_algorithms_enabled(),
    "deterministic_warn_only": lambda: torch.is_deterministic_algorithms_warn_only_enabled(),
    "float32_matmul_precision": lambda: torch.get_float32_matmul_precision(),
    # The properties of torch.backends warn, or raise where a job sets old and new switches (torch 2.9 and newer).
    "cublas_allow_tf32": lambda: torch._C._get_cublas_allow_tf32(),
    "cudnn_allow_tf32": lambda: torch._C._get_cudnn_allow_tf32(),
    "cudnn_enabled": lambda: torch._C._get_cudnn_enabled(),
    "cudnn_benchmark": lambda: torch._C._get_cudnn_benchmark(),
    "cudnn_deterministic": lambda: torch._C._get_cudnn_deterministic(),
    "mkldnn_enabled": lambda: torch._C._get_mkldnn_enabled(),
    "flash_sdp": lambda: torch._C._get_flash_sdp_enabled(),
    "mem_efficient_sdp": lambda: torch._C._get_mem_efficient_sdp_enabled(),
    "math_sdp": lambda: torch._C._get_math_sdp_enabled(),
    "cpu_capability": lambda: torch.backends.cpu.get_cpu_capability(),
}


def versions() -> dict[str, str]:
    """Versions that may explain a difference."""
    return {
        "gradtrace": "0.1.0",
        "schema": str(SCHEMA_VERSION),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def environment(variables: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Variables and switches that change numbers, as they stand now."""
    found: dict[str, Any] = {
        name: value[:_MOST_CHARACTERS]
        for name, value in sorted(variables.items())
        if name in VARIABLES or (name.startswith(VARIABLE_PREFIXES) and not _OTHERWISE.search(name))
        if not _SECRET.search(name)
    }
    for name, read in _SWITCHES.items():
        try:
            found[name] = read()
        except (
            AttributeError,
            RuntimeError,
        ):  # another torch has no such switch, or refuses to tell
            continue
    return found


def autocast() -> dict[str, str]:
    """The device types for which autocast is on in this thread, each with its dtype.

    To be asked before our own code turns it off.
    """
    found = {}
    for device in ("cpu", "cuda"):
        try:
            if torch.is_autocast_enabled(device):
                found[device] = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        except (AttributeError, RuntimeError, TypeError):  # before torch 2.4 it took no device
            continue
    return found


def command_line(words: Sequence[str] | None = None) -> list[str]:
    """How the process was started, what stands behind a name that sounds like a secret masked."""
    said: list[str] = []
    is_secret = False
    for word in words if words is not None else getattr(sys, "orig_argv", sys.argv):
        name, equals, _ = word.partition("=")
        if is_secret and not word.startswith("-"):
            said.append("***")
        elif equals and _SECRET.search(name):
            said.append(f"{name}=***")
        else:
            said.append(word)
        is_secret = word.startswith("-") and not equals and _SECRET.search(word) is not None
    return said


def git_commit(start: Path | None = None) -> str | None:
    """The commit that is checked out around the job's script, None where there is none.

    Read from the files of `.git`; whether files were changed since cannot be known without comparing them all.
    """
    try:
        place = (start or _script()).absolute()
        for folder in (place, *place.parents)[:_MOST_FOLDERS]:
            entry = folder / ".git"
            if entry.is_dir():
                return _head(entry)
            if entry.is_file():  # a worktree or a submodule: it names the real one
                return _head(folder / _read(entry).removeprefix("gitdir:").strip())
    except (OSError, ValueError):
        pass
    return None


def _script() -> Path:
    """The folder of what runs as `__main__`, else the working directory."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).parent if isinstance(file, str) else Path.cwd()


def _head(git: Path) -> str | None:
    said = _read(git / "HEAD")
    if not said.startswith("ref:"):
        return _commit(said)
    name = said.removeprefix("ref:").strip()
    shared = git
    if (git / "commondir").is_file():
        shared = git / _read(git / "commondir")
    for folder in (git, shared):
        if (folder / name).is_file():
            return _commit(_read(folder / name))
    with open(shared / "packed-refs") as packed:
        for line in packed:
            if line.rstrip().endswith(f" {name}"):
                return _commit(line.split()[0])
    return None


def _read(path: Path) -> str:
    with open(path) as file:
        return file.read(4096).strip()


def _commit(text: str) -> str | None:
    return text if _COMMIT.fullmatch(text) else None
