"""What started this process, by its variables and parents: its rank, and what the ranks of one start share.

Torch's launcher is not the only one. Lightning starts rank 1 from rank 0, `mpirun` and `srun` set variables of their
own, `torch.multiprocessing` sets none, and a shell sets what its user typed. Nothing here talks to another process.
"""

from __future__ import annotations

import ipaddress
import multiprocessing.process
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gradtrace_schemas import processes

How = Literal["ids", "address", "parent", "world", "alone"]

# (rank, world size, local rank) as launchers call them, and who that is. The first that is whole counts: what is
# started last sets RANK, and an MPI within a SLURM step knows its ranks better than the step does.
# SLURM_STEP_NUM_TASKS and not SLURM_NTASKS: a batch script that calls Python itself is one process of its allocation.
_RANKS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "variables"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "mpirun"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "mpirun"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "mpirun"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "srun"),
)


@dataclass(frozen=True)
class Launcher:
    """What started this process, as far as that can be told without asking anybody.

    `key` is a text that the ranks of one start share, found `how`; where it `is_certain`, no other start has it.
    `world_size` is None where nothing says it. `parent` is the process that started this one.
    """

    kind: str
    rank: int
    world_size: int | None
    local_rank: int | None
    how: How
    key: str
    is_certain: bool
    restart: int
    parent: str


def current_launcher(group: tuple[int, int] | None) -> Launcher:
    """Of this process, now: a job may set the variables itself before it trains.

    `group` is (rank, world size) in the process group, which knows better; None while there is none.
    """
    child = _torch_child()
    environment: Mapping[str, str] = os.environ
    ranks: Mapping[str, str] = environment
    if child is not None:
        # RANK and SLURM_PROCID are the parent's, unless this process has set them for itself.
        inherited = _initial_environment()
        ranks = {k: v for k, v in environment.items() if inherited.get(k) != v}
    rank, world_size, local_rank, kind = _rank(ranks, child)
    if group is not None:
        rank, world_size = group
    how, key, is_certain = _key(environment, world_size, child)
    return Launcher(
        kind=_kind(environment, kind, child),
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        how=how,
        key=key,
        is_certain=is_certain and child is None,  # one parent may start several times
        restart=_number(environment, "TORCHELASTIC_RESTART_COUNT") or 0,
        parent=process_token(os.getppid()),
    )


def process_token(pid: int) -> str:
    """A text for a process that no other has, on whatever machine; of one that is gone, what is left to say."""
    return f"{pid}@{processes.start_of(pid)}@{processes.machine_token():x}"


@dataclass(frozen=True)
class _TorchChild:
    """This process, begun by `torch.multiprocessing.start_processes`: its number among `nprocs`, and how."""

    index: int
    method: str

    @property
    def parent(self) -> str:
        """The process that called it; a fork server is between."""
        parent = multiprocessing.process.parent_process()
        return process_token(os.getppid() if parent is None else parent.pid or 0)


def _torch_child() -> _TorchChild | None:
    """None in any other process. Source: torch/multiprocessing/spawn.py, `_wrap` (2.6 to 2.13)."""
    process: Any = multiprocessing.process.current_process()
    spawn = sys.modules.get("torch.multiprocessing.spawn")
    target: Any = getattr(process, "_target", None)
    arguments: Any = getattr(process, "_args", ())
    if spawn is None or target is None or target is not getattr(spawn, "_wrap", None):
        return None
    if len(arguments) < 2 or not isinstance(arguments[1], int):
        return None
    return _TorchChild(arguments[1], type(process).__name__.removesuffix("Process").lower())


def _rank(
    environment: Mapping[str, str], child: _TorchChild | None
) -> tuple[int, int | None, int | None, str]:
    """(rank, world size, local rank, who says so)."""
    for rank_name, size_name, local_name, kind in _RANKS:
        rank, size = _number(environment, rank_name), _number(environment, size_name)
        if rank is not None and size is not None and rank < size:
            return rank, size, _number(environment, local_name), kind
    local, size = _number(environment, "LOCAL_RANK"), _number(environment, "WORLD_SIZE")
    nodes = environment.get("NODE_RANK", environment.get("GROUP_RANK", "0"))
    if local is not None and size is not None and local < size and nodes == "0":
        return local, size, local, "local rank"  # Lightning gives no RANK
    if child is not None:
        return child.index, None, child.index, "child"
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    return rank or 0, size or (None if rank else 1), local, "variables"


def _key(
    environment: Mapping[str, str], world_size: int | None, child: _TorchChild | None
) -> tuple[How, str, bool]:
    """How the ranks of a start know each other without talking, what they share, and whether no other start has it.

    In this order: ids that a launcher made for one start cannot be another's. An address and a port serve one job at
    a time, but may serve the next tomorrow. A parent may start several jobs. The size of the world is next to nothing.
    """
    for ids, is_certain in _ids(environment):
        return "ids", "/".join(ids), is_certain
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if address and port and world_size != 1:
        return "address", "/".join(("address", _place(address), port)), False
    if child is not None:
        return "parent", f"children of {child.parent}", False
    if world_size is not None and world_size > 1:
        return "world", f"world of {world_size}", False
    return "alone", f"process {process_token(os.getpid())}", True


def _ids(environment: Mapping[str, str]) -> Iterator[tuple[tuple[str, ...], bool]]:
    """The ids of the launcher that stands closest to this process, and whether they are one start's alone."""
    run_id = environment.get("TORCHELASTIC_RUN_ID")
    if run_id is not None:
        restart = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        logs = environment.get("TORCHELASTIC_ERROR_FILE", "")
        if logs and environment.get("GROUP_WORLD_SIZE") == "1":
            # One agent started all: its folder for errors has a random name, made for each start.
            # Source: torch/distributed/elastic/multiprocessing/api.py, `DefaultLogsSpecs` (2.13).
            folder = os.path.dirname(os.path.dirname(logs))
            machine = f"{processes.machine_token():x}"
            yield ("torchelastic", run_id, restart, folder, machine), True
        # A person chooses the id of a rendezvous, and may choose it again; static ones are all called `none`.
        # Agents that come and go begin anew without counting it as a restart.
        place = _place(environment.get("MASTER_ADDR", "")), environment.get("MASTER_PORT", "")
        yield ("torchelastic", run_id, restart, *place), False
    namespace = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid")
    if namespace:
        yield ("mpi", namespace), False  # a number made of host and pid
    job, step = environment.get("SLURM_JOB_ID"), environment.get("SLURM_STEP_ID")
    if job and step:
        cluster = environment.get("SLURM_CLUSTER_NAME", "")
        yield ("slurm", cluster, job, step, environment.get("SLURM_RESTART_COUNT", "0")), True
    if environment.get("PMI_JOBID"):
        yield ("mpi", environment["PMI_JOBID"]), False


def _place(address: str) -> str:
    """An address as the ranks of other machines would say it: a loopback is one machine's, and one container's."""
    try:
        is_local = ipaddress.ip_address(address).is_loopback
    except ValueError:
        is_local = address in ("", "localhost")
    return f"{_network()}:loopback" if is_local else address


def _network() -> str:
    """The network that loopback addresses mean here."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}:{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return os.uname().nodename


def _kind(environment: Mapping[str, str], said_by: str, child: _TorchChild | None) -> str:
    """What a person calls the launcher."""
    # Accelerate's own variables are set by its command alone, for every job that it starts.
    is_accelerate = "ACCELERATE_MIXED_PRECISION" in environment
    if "TORCHELASTIC_RUN_ID" in environment:
        if child is not None:
            return f"elastic_launch ({child.method})"
        return "accelerate launch (torchrun)" if is_accelerate else "torchrun"
    if child is not None:
        return f"torch.multiprocessing ({child.method})"
    if "CROSS_RANK" in environment and "LOCAL_SIZE" in environment:
        return "deepspeed"
    if said_by in ("mpirun", "srun"):
        return said_by
    if said_by == "local rank":
        return "Lightning"
    if environment.get("SLURM_STEP_ID") and "SLURM_PROCID" in environment:
        return "srun"
    if "OMPI_COMM_WORLD_RANK" in environment or "PMI_RANK" in environment:
        return "mpirun"
    if is_accelerate:
        return "accelerate launch"
    return "variables" if "RANK" in environment else "none"


def _initial_environment() -> dict[str, str]:
    """The environment that this process began with, before anything in it changed `os.environ`."""
    try:
        with open("/proc/self/environ", "rb") as file:
            entries = os.fsdecode(file.read()).split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None
