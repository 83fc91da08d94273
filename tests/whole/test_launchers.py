"""Ranks of one job are one attempt, whatever started them: here by variables alone, typed or imitated.

Real launchers are in test_launcher_programs.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from gradtrace_analyzer.runs.opening import open_run
from gradtrace_analyzer.runs.run import Run
from gradtrace_schemas import layout
from support.launching.launched import JOB, bits, free_port, is_one_attempt, must_be_equal
from support.launching.launcher import run_job

Variables = Sequence[Mapping[str, str]]


def ranks(**names: str) -> list[dict[str, str]]:
    """Two ranks' variables: `{}` stands for the rank."""
    return [{name: text.format(rank) for name, text in names.items()} for rank in (0, 1)]


SHELL = {"RANK": "{}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "PORT"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "{}",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "{}",
    "PMIX_NAMESPACE": "prterun-host-17@1",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "{}",
    "SLURM_LOCALID": "{}",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
}
ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "PORT"}

# How a person would start them: the variables, the group, the kind, and how the ranks find each other.
STARTS = {
    "two-shells": (SHELL, "env", "variables", "store"),
    "two-shells-that-never-talk": (SHELL, "none", "variables", "address"),
    "sizes-alone": ({"RANK": "{}", "WORLD_SIZE": "2"}, "none", "variables", "world"),
    "group-without-variables": ({"MY_RANK": "{}"}, "tcp", "none", "store"),
    "mpirun": (OPEN_MPI, "tcp", "mpirun", "store"),
    "mpirun-that-never-talks": (OPEN_MPI, "none", "mpirun", "ids"),
    "mpich": ({"PMI_RANK": "{}", "PMI_SIZE": "2"}, "none", "mpirun", "world"),
    "srun": (SLURM | ADDRESS, "tcp", "srun", "ids"),
    "srun-that-never-talks": (SLURM, "none", "srun", "ids"),
    "lightning-variables": (
        {"LOCAL_RANK": "{}", "NODE_RANK": "0", "WORLD_SIZE": "2", "MY_RANK": "{}"} | ADDRESS,
        "none",
        "Lightning",
        "address",
    ),
}


def launched(
    tmp_path: Path,
    variables: Mapping[str, str],
    group: str,
    *,
    recorded: str | None,
    env: Mapping[str, str] | None = None,
    apart: Variables = ({}, {}),
) -> dict[int, str]:
    """Runs the job in two ranks forked from one process; the bits that each left."""
    port = str(free_port())
    own = [
        {k: port if v == "PORT" else v for k, v in one.items()} | dict(more)
        for one, more in zip(ranks(**variables), apart, strict=True)
    ]
    out = tmp_path / f"bits-{recorded}"
    where = None if recorded is None else tmp_path / recorded
    place = f"tcp://127.0.0.1:{port}" if group == "tcp" else group
    job = run_job(JOB, out, place, recorded=where, env=env, forked=True, own=own, timeout=60)
    said = job.must_succeed().stderr
    assert "gradtrace" not in said, said
    return bits(out)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """The bits of the job without recording, with a group and without: no launcher changes them."""
    folder = tmp_path_factory.mktemp("bare")
    return {group: launched(folder, SHELL, group, recorded=None) for group in ("env", "none")}


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_ranks_are_one_attempt(tmp_path: Path, start: str, bare: dict[str, dict[int, str]]) -> None:
    variables, group, kind, found_by = STARTS[start]
    trained = [launched(tmp_path, variables, group, recorded=name) for name in ("a", "b")]
    assert trained == [bare["none" if group == "none" else "env"]] * 2
    for name in ("a", "b"):
        is_one_attempt(tmp_path / name, kind, found_by)
    must_be_equal(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("start", ["two-shells", "sizes-alone", "srun-that-never-talks"])
def test_second_start_in_the_same_directory_is_the_next_attempt(tmp_path: Path, start: str) -> None:
    variables, group, kind, found_by = STARTS[start]
    for attempt in (0, 1):
        launched(tmp_path, variables, group, recorded="a")
        is_one_attempt(tmp_path / "a", kind, found_by, attempt=attempt)


def test_rank_that_was_recorded_before_its_group_was_there_is_of_the_same_attempt(
    tmp_path: Path, bare: dict[str, dict[int, str]]
) -> None:
    for name, apart in {
        "first": ({"BEFORE": "1"}, {}),
        "second": ({}, {"BEFORE": "1"}),
        "both": ({"BEFORE": "1"}, {"BEFORE": "1"}),
    }.items():
        assert launched(tmp_path, SHELL, "env", recorded=name, apart=apart) == bare["env"]
        run = open_run(tmp_path / name)
        assert (run.attempts, sorted(run.ranks), run.incomplete_ranks) == ((0,), [0, 1], ())


def started(run: Path, variables: Mapping[str, str], **more: str) -> subprocess.Popen[bytes]:
    """One rank without a group, in a Python of its own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("GRADTRACE_")}
    environment = (
        kept | {"OMP_NUM_THREADS": "1", "GRADTRACE_DIR": str(run)} | dict(variables) | more
    )
    return subprocess.Popen([sys.executable, str(JOB), str(run) + ".bits", "none"], env=environment)


def ends(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        assert process.wait(100) == 0


def shell(rank: int, port: int, **more: str) -> dict[str, str]:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"RANK": str(rank), "WORLD_SIZE": "2", **place, **more}


def test_rank_whose_first_event_comes_when_the_other_has_ended_joins_it(tmp_path: Path) -> None:
    port = free_port()
    late = started(tmp_path / "run", shell(1, port), BEGIN=str(tmp_path / "begin"))
    ends(started(tmp_path / "run", shell(0, port)))
    (tmp_path / "begin").touch()
    ends(late)
    is_one_attempt(tmp_path / "run", "variables", "address")


def test_start_of_the_same_address_after_one_that_lost_a_rank_does_not_join_it(
    tmp_path: Path,
) -> None:
    """Of the first start rank 1 never came; the second's must not fill its place."""
    port = free_port()
    ends(started(tmp_path / "run", shell(0, port)))
    _let_grow_old(tmp_path / "run", 0)
    ends(started(tmp_path / "run", shell(1, port)), started(tmp_path / "run", shell(0, port)))
    assert sorted(open_run(tmp_path / "run", 0).ranks) == [0]
    assert sorted(open_run(tmp_path / "run", 1).ranks) == [0, 1]


def _let_grow_old(run: Path, attempt: int) -> None:
    """As if that attempt had been an hour ago."""
    hour = 3600 * 10**9
    files = [layout.attempt_file(run, attempt), *(run / layout.RANKS).glob(f"*-{attempt}.json")]
    for path in files:
        facts = json.loads(path.read_text())
        times = {k: v - hour for k, v in facts.items() if k in ("started_unix_ns", "wall_end_ns")}
        path.write_text(json.dumps(facts | times))


@pytest.mark.parametrize("group", ["none", "env"])
def test_two_jobs_in_one_directory_at_once_are_not_mixed(tmp_path: Path, group: str) -> None:
    """Of one size, at ports of their own, all four ranks begun at the same moment from one process."""
    ports = [free_port(), free_port()]
    own = [
        shell(rank, port, GRADTRACE_STEP_OFFSET=str(100 * job))
        for rank in (0, 1)
        for job, port in enumerate(ports)
    ]
    job = run_job(
        JOB, tmp_path / "bits", group, recorded=tmp_path / "run", forked=True, own=own, timeout=100
    )
    job.must_succeed()
    offsets = [_offsets(open_run(tmp_path / "run", attempt)) for attempt in (0, 1)]
    assert sorted(offsets) == [[0, 0], [100, 100]]


def _offsets(run: Run) -> list[int]:
    """Of each rank the offset of its steps: which job it was of."""
    return [info.facts["settings"]["step_offset"] for info in run.ranks.values()]


def test_rank_that_is_not_recorded_is_not_waited_for(tmp_path: Path) -> None:
    launched(tmp_path, SHELL, "env", recorded="a", env={"GRADTRACE_RANKS": "1"})
    run = open_run(tmp_path / "a")
    assert (run.attempts, sorted(run.ranks), run.incomplete_ranks) == ((0,), [1], ())
