"""Real launchers, as a user calls them: their ranks are one attempt, whole, with the bits of an unrecorded run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from gradtrace_analyzer.runs.opening import open_run
from support.launching.launched import JOB, bits, free_port, is_one_attempt, must_be_equal
from support.launching.launcher import JobResult, run_command

pytestmark = pytest.mark.slow

PYTHON = sys.executable
JOBS = JOB.parent
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
ACCELERATE = [PYTHON, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
ACCELERATE += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
DEEPSPEED = [PYTHON, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--no_local_rank"]
C10D = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:PORT", "--rdzv-id", "mine"]
C10D += ["--local-addr", "127.0.0.1"]
MANY = "torch.multiprocessing"

# The command, with PORT, OUT, RUN; the kind; how its ranks find each other.
PROGRAMS = {
    "torchrun": ([*TORCHRUN, "--master-port", "PORT", JOB, "OUT", "env"], "torchrun", "ids"),
    "torchrun-standalone": (
        [*TORCHRUN, "--standalone", "--local-addr", "127.0.0.1", JOB, "OUT", "env"],
        "torchrun",
        "ids",
    ),
    "torchrun-c10d": ([*TORCHRUN, *C10D, JOB, "OUT", "env"], "torchrun", "ids"),
    "torchrun-no-python": (
        [*TORCHRUN, "--master-port", "PORT", "--no-python", "WRAPPER", JOB, "OUT", "env"],
        "torchrun",
        "ids",
    ),
    "spawn": ([PYTHON, JOB, "OUT", "tcp://127.0.0.1:PORT", "spawn"], f"{MANY} (spawn)", "store"),
    "fork": ([PYTHON, JOB, "OUT", "tcp://127.0.0.1:PORT", "fork"], f"{MANY} (fork)", "store"),
    "forkserver": (
        [PYTHON, JOB, "OUT", "tcp://127.0.0.1:PORT", "forkserver"],
        f"{MANY} (forkserver)",
        "store",
    ),
    "spawn-without-a-group": ([PYTHON, JOB, "OUT", "none", "spawn"], f"{MANY} (spawn)", "parent"),
    "fork-without-a-group": ([PYTHON, JOB, "OUT", "none", "fork"], f"{MANY} (fork)", "parent"),
    "lightning-ddp": ([PYTHON, JOBS / "launched_lightning.py", "OUT", "ddp"], "Lightning", "store"),
    "lightning-ddp-spawn": (
        [PYTHON, JOBS / "launched_lightning.py", "OUT", "ddp_spawn"],
        f"{MANY} (spawn)",
        "store",
    ),
    "lightning-ddp-notebook": (
        [PYTHON, JOBS / "launched_lightning.py", "OUT", "ddp_notebook"],
        f"{MANY} (fork)",
        "store",
    ),
    "accelerate": (
        [*ACCELERATE, "--main_process_port", "PORT", JOBS / "launched_accelerate.py", "OUT"],
        "accelerate launch (torchrun)",
        "ids",
    ),
    "accelerate-notebook": (
        [PYTHON, JOBS / "launched_accelerate.py", "OUT", "notebook", "PORT"],
        "elastic_launch (fork)",
        "store",
    ),
    "deepspeed": (
        [*DEEPSPEED, "--master_port", "PORT", JOB, "OUT", "env"],
        "deepspeed",
        "store",
    ),
}


def launched(
    command: Sequence[object], folder: Path, recorded: str | None, *, env: dict[str, str]
) -> dict[int, str]:
    """Runs a launcher; the bits that its ranks left."""
    wrapper = folder / "wrapper.sh"
    # A shell of its own around each rank: no two ranks have one parent.
    wrapper.write_text(f'#!/bin/sh\n"{PYTHON}" "$@"\nexit $?\n')
    wrapper.chmod(0o755)
    out = folder / f"bits-{recorded}"
    words = {"PORT": str(free_port()), "OUT": str(out), "WRAPPER": str(wrapper)}
    filled = [str(part) for part in command]
    for word, text in words.items():
        filled = [part.replace(word, text) for part in filled]
    where = None if recorded is None else folder / recorded
    job: JobResult = run_command(filled, recorded=where, env=env, timeout=150)
    job.must_succeed()
    assert "gradtrace:" not in job.stderr, job.stderr
    return bits(out)


ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
# The bits of a script do not depend on its launcher: each is run bare once, by one that is quick.
QUICK = {
    "launched": PROGRAMS["fork"][0],
    "launched_lightning": PROGRAMS["lightning-ddp-notebook"][0],
    "launched_accelerate": PROGRAMS["accelerate-notebook"][0],
}


class References:
    """By script, the bits that it leaves unrecorded, and its recording under that launcher."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bits: dict[str, dict[int, str]] = {}

    def of(self, script: str, group: str) -> tuple[dict[int, str], Path]:
        """(bits by rank, a run)."""
        name = f"{script}-{group}"
        folder = self._folder / name
        if name not in self._bits:
            folder.mkdir()
            command = QUICK[script]
            if group == "none":
                command = PROGRAMS["fork-without-a-group"][0]
            self._bits[name] = launched(command, folder, None, env=ENVIRONMENT)
            assert launched(command, folder, "run", env=ENVIRONMENT) == self._bits[name]
        return self._bits[name], folder / "run"


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("references"))


@pytest.mark.parametrize("program", PROGRAMS)
def test_ranks_of_a_launcher_are_one_attempt(
    tmp_path: Path, program: str, references: References
) -> None:
    command, kind, found_by = PROGRAMS[program]
    for name in ("lightning", "accelerate", "deepspeed"):
        if program.startswith(name):
            pytest.importorskip(name)
    script = next(part.stem for part in command if isinstance(part, Path) and part.suffix == ".py")
    bare, reference = references.of(script, "none" if "none" in command else "group")
    assert len(bare) == 2
    assert launched(command, tmp_path, "run", env=ENVIRONMENT) == bare
    is_one_attempt(tmp_path / "run", kind, found_by)
    must_be_equal(reference, tmp_path / "run")


def test_two_agents_of_torchrun_are_one_attempt(tmp_path: Path) -> None:
    """Two machines, each with an agent: here of one rank each, on this one."""
    port = free_port()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GRADTRACE_")}
    environment |= {"GRADTRACE_DIR": str(tmp_path / "run"), "OMP_NUM_THREADS": "1"}
    head = [*TORCHRUN[:3], "--nproc-per-node", "1", "--nnodes", "2"]
    head += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    job = [str(JOB), str(tmp_path / "bits"), "env"]
    agents = [
        subprocess.Popen([*head, "--node-rank", str(node), *job], env=environment)
        for node in (0, 1)
    ]
    assert [agent.wait(150) for agent in agents] == [0, 0]
    is_one_attempt(tmp_path / "run", "torchrun", "store")


@pytest.mark.parametrize("flags", [["--pid", "--uts"], ["--pid", "--uts", "--net"]])
def test_containers_with_equal_process_ids_and_host_names_are_one_attempt(
    tmp_path: Path, flags: list[str]
) -> None:
    command = ["unshare", "--fork", "--mount-proc", *flags]
    try:
        done = subprocess.run([*command, "hostname", "worker"], capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        pytest.skip("there is no unshare here")
    if done.returncode:
        pytest.skip(f"namespaces cannot be made here: {done.stderr.decode().strip()}")
    # Apart in the network as well, they cannot talk: an address that means both is all that they share.
    group = "none" if "--net" in flags else "env"
    port, address = free_port(), "10.1.2.3" if "--net" in flags else "127.0.0.1"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GRADTRACE_")}
    environment |= {"GRADTRACE_DIR": str(tmp_path / "run"), "OMP_NUM_THREADS": "1"}
    environment |= {"WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    inside = 'hostname worker; "$@" & wait $!'
    ranks = [
        subprocess.Popen(
            [*command, "sh", "-c", inside, "sh", PYTHON, str(JOB), str(tmp_path / "bits"), group],
            env=environment | {"RANK": str(rank)},
        )
        for rank in (0, 1)
    ]
    assert [rank.wait(100) for rank in ranks] == [0, 0]
    is_one_attempt(tmp_path / "run", "variables", "store" if group == "env" else "address")
    facts = [info.facts for info in open_run(tmp_path / "run").ranks.values()]
    assert [fact["host"] for fact in facts] == ["worker", "worker"]
    assert facts[0]["pid"] == facts[1]["pid"]
